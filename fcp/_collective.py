"""The one Function that carries every collective, and what a row of the table is.

A row (`Rule`) says what a collective takes and gives, its adjoint, and `dense`, the map over the stacked tensors of all
ranks. Under `simulate` a rank dimension is a vmap level. The Function's vmap rule knows its own level because the
axis's rank index, an extra operand, is batched there and nowhere else: it moves that dimension to the front, and when
every axis of a tuple lies in front it calls `dense`. At any other level the dims move by one and the Function is
called again. What comes out invariant comes out unbatched, so that later work is done once.

`pvary` and `all_gather` give the same value to every rank; they stay unbatched too (they give COPIES), because a
batched weight would cost one weight gradient a rank.

On real processes nothing is batched, and the Function's own forward is reached: `_process.py` says what runs there. Its
backward is the same: the adjoint row, whatever the ranks are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcp._process import on_processes
from fcp.axes import Axis, differentiated_inside, varying
from fcp.trace import Event, note, recording, tap

__all__ = ["COPIES", "INVARIANT", "VARYING", "Rule", "over_ranks"]

INVARIANT, VARYING, COPIES = "invariant", "varying", "copies"


@dataclass(frozen=True)
class Rule:
    """A row of the table. `dense` maps the tensors of all ranks; a varying side has the rank dim in front."""

    name: str
    takes: str
    gives: str
    dense: Callable[..., Tensor]
    adjoint: "Callable[[Rule], Rule] | None"
    dims: tuple[int, ...] = ()
    perm: tuple[tuple[int, int], ...] = ()
    backward: bool = False


@dataclass(frozen=True)
class _Call:
    """A collective under way: `waiting` axes are still vmap levels, `folded` ones are dims in front of the tensor.

    `names` and `sizes` are the whole axis tuple in its own order (first slowest); `extra` counts the dims between the
    folded ones and the tensor's own, which belong to other vmap levels. `mesh` is the DeviceMesh of axes that are
    processes.
    """

    rule: Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    waiting: tuple[str, ...]
    folded: tuple[str, ...] = ()
    extra: int = 0
    mesh: Any = None

    def size_of(self, name: str) -> int:
        return self.sizes[self.names.index(name)]


def over_ranks(rule: Rule, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    live = [(axis, axis.index) for axis in axes if axis.index is not None]
    if not live:
        return x
    names = tuple(axis.name for axis, _ in live)
    meshes = [axis.mesh for axis, _ in live]
    if any(mesh is not meshes[0] for mesh in meshes):
        raise ValueError(
            f"{rule.name}: axes {names} are not ranks of one runtime; name those of fcp.simulate and those of each "
            f"mesh in calls of their own"
        )
    if rule.takes == INVARIANT and rule.gives == COPIES and meshes[0] is None and not recording():
        # A copy computes nothing, and where the map is differentiated from outside its adjoint is torch's own. A model
        # has one of these a parameter; the Function's overhead alone would be several percent of a small step.
        wrong = varying(x) & set(names)
        if wrong:
            raise ValueError(_already_varies(rule, min(wrong)))
        if not differentiated_inside(tuple(axis for axis, _ in live)):
            return x
    call = _Call(rule, names, tuple(axis.size for axis, _ in live), waiting=names, mesh=meshes[0])
    return _Collective.apply(x, call, *(index for _, index in live))


def _finish(x: Tensor, call: _Call) -> Tensor:
    """Every axis lies in front: put them in the tuple's order, and do the dense map."""
    rule, count, size = call.rule, len(call.names), math.prod(call.sizes)
    order = [call.folded.index(name) for name in call.names]
    if rule.takes == VARYING:
        x = x.permute(*order, *range(count, x.dim())).flatten(0, count - 1)
    mine = tuple(x.shape[(rule.takes == VARYING) + call.extra :])
    note(Event(rule.name, call.names, mine, x.dtype, rule.backward))
    y = rule.dense(x, size, rule)
    if rule.adjoint is not None and recording():
        mine = tuple(y.shape[(rule.gives == VARYING) + call.extra :])
        y = tap(y, Event(rule.adjoint(rule).name, call.names, mine, y.dtype, backward=True))
    if rule.gives == VARYING:
        inverse = [call.names.index(name) for name in call.folded]
        y = y.unflatten(0, call.sizes).permute(*inverse, *range(count, y.dim() + count - 1))
    return y


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, call: _Call, *indices: Tensor) -> Tensor:
        if call.mesh is not None:
            note(Event(call.rule.name, call.names, tuple(x.shape[call.extra :]), x.dtype, call.rule.backward))
            return on_processes(call.rule, x, call.mesh, call.names)
        raise RuntimeError(
            f"{call.rule.name}: axis {call.waiting[0]!r} has no ranks here; its fcp.simulate call has already returned"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.call, *indices = inputs
        ctx.save_for_backward(*indices)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call, indices = ctx.call, ctx.saved_tensors
        rule = replace(call.rule.adjoint(call.rule), backward=True)
        if call.rule.gives == COPIES:  # g is one copy's cotangent, already summed over the folded axes: 1 of many
            for name in reversed(call.folded):
                rest = g.new_zeros((call.size_of(name) - 1, *g.shape))
                g = torch.cat([g.unsqueeze(0), rest])
        g = _Collective.apply(g, replace(call, rule=rule), *indices)
        if rule.gives == COPIES and call.folded:  # the operand has the folded axes in front: a copy for each rank
            g = g.expand(*(call.size_of(name) for name in call.folded), *g.shape)
        return g, None, *(None for _ in indices)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, call: _Call, *indices: Tensor) -> tuple[Tensor, Any]:
        x_dim, _, *index_dims = in_dims
        rule, front = call.rule, len(call.folded)
        mine = [name for name, dim in zip(call.waiting, index_dims, strict=True) if dim is not None]
        if not mine:  # another axis, or the caller's own vmap
            x = x.movedim(x_dim, front if rule.takes == VARYING else 0)
            moved = replace(call, rule=replace(rule, dims=tuple(d + 1 for d in rule.dims)), extra=call.extra + 1)
            return _Collective.apply(x, moved, *indices), (front if rule.gives == VARYING else 0)
        (name,) = mine
        if rule.takes == VARYING:
            x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        elif x_dim is not None:
            raise ValueError(_already_varies(rule, name))
        rest = [(n, i) for n, i in zip(call.waiting, indices, strict=True) if n != name]
        folded = replace(call, waiting=tuple(n for n, _ in rest), folded=(name, *call.folded))
        y = _Collective.apply(x, folded, *(i for _, i in rest)) if rest else _finish(x, folded)
        return y, (0 if rule.gives == VARYING else None)


def _already_varies(rule: Rule, name: str) -> str:
    if rule.backward:
        return (
            f"a gradient differs between the ranks of axis {name!r} where all must hold the same one: a value that is "
            f"the same on every rank was used by work that is not. Put fcp.pvary(value, {name!r}) before that work "
            f"(in a model: ops.enter), so that the ranks' gradients are summed."
        )
    return (
        f"{rule.name} over axis {name!r} takes a value that every rank holds alike, and was given one that differs "
        f"between the ranks. It is split or marked varying already; drop the second {rule.name}, or join it first "
        f"with fcp.unshard or fcp.psum."
    )

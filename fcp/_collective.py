"""The one Function that carries every collective, and what a row of the table is.

A row (`Rule`) says what a collective takes and gives, its adjoint, and `dense`, the map over the stacked tensors of all
ranks. Under `simulate` a rank dimension is a vmap level. The Function's vmap rule knows its own level because the
axis's rank index, an extra operand, is batched there and nowhere else: it moves that dimension to the front, and when
every axis of a tuple lies in front it calls `dense`. At any other level the dims move by one and the Function is
called again. What comes out invariant comes out unbatched, so that later work is done once.

`pvary` and `all_gather` give the same value to every rank; they stay unbatched too (they give COPIES), because a
batched weight would cost one weight gradient a rank.

Several tensors may take one collective together: a model's gradients are summed in a few large exchanges, not in one a
leaf. They share the row and its dims; each may lie in other vmap levels than its neighbour.

On real processes nothing is batched, and the Function's own forward is reached: `_process.py` says what runs there. Its
backward is the same: the adjoint row, whatever the ranks are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcp._function import Function
from fcp._process import on_processes, start_permute
from fcp.axes import Axis, differentiated_inside, varying
from fcp.trace import Event, event_of, note, recording, tap

__all__ = ["COPIES", "INVARIANT", "VARYING", "Rule", "over_ranks", "started"]

INVARIANT, VARYING, COPIES = "invariant", "varying", "copies"


@dataclass(frozen=True)
class Rule:
    """A row of the table. `dense` maps the tensors of all ranks; a varying side has the rank dim in front.

    `sum_dtype` is the dtype in which a sum, or the sum that is the adjoint, is taken and travels: None, the tensor's.
    """

    name: str
    takes: str
    gives: str
    dense: Callable[..., Tensor]
    adjoint: "Callable[[Rule], Rule] | None"
    dims: tuple[int, ...] = ()
    perm: tuple[tuple[int, int], ...] = ()
    backward: bool = False
    sum_dtype: torch.dtype | None = None

    def travels_in(self, x: Tensor) -> torch.dtype:
        """The dtype of what ranks exchange."""
        return self.sum_dtype if self.sum_dtype is not None and self.name in ("psum", "psum_scatter") else x.dtype


@dataclass(frozen=True)
class _Call:
    """A collective under way: `waiting` axes are still vmap levels, `folded` ones are dims in front of the tensors.

    `names` and `sizes` are the whole axis tuple in its own order (first slowest); `extras` counts, for each tensor, the
    dims between the folded ones and the tensor's own, which belong to other vmap levels. `mesh` is the DeviceMesh of
    axes that are processes.
    """

    rule: Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    waiting: tuple[str, ...]
    extras: tuple[int, ...]
    folded: tuple[str, ...] = ()
    mesh: Any = None

    def size_of(self, name: str) -> int:
        return self.sizes[self.names.index(name)]

    def rules(self) -> list[Rule]:
        """The row for each tensor, its dims counted past the dims of other levels."""
        return [replace(self.rule, dims=tuple(dim + extra for dim in self.rule.dims)) for extra in self.extras]


def over_ranks(rule: Rule, xs: Sequence[Tensor], axes: tuple[Axis, ...]) -> list[Tensor]:
    """The collective of each tensor of `xs`, all in one exchange."""
    live = [(axis, axis.index) for axis in axes if axis.index is not None]
    if not live or not xs:
        return list(xs)
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
        wrong = frozenset().union(*(varying(x) for x in xs)) & set(names)
        if wrong:
            raise ValueError(_already_varies(rule, min(wrong)))
        if not differentiated_inside(tuple(axis for axis, _ in live)):
            return list(xs)
    sizes = tuple(axis.size for axis, _ in live)
    call = _Call(rule, names, sizes, waiting=names, extras=(0,) * len(xs), mesh=meshes[0])
    return list(_Collective.apply(call, *xs, *(index for _, index in live)))


def started(rule: Rule, x: Tensor, axes: tuple[Axis, ...]) -> Callable[[], Tensor]:
    """A permutation of a plain tensor, under way; the call of what it gives waits for the result."""
    live = tuple(axis for axis in axes if axis.index is not None)
    if not live or live[0].mesh is None:
        (y,) = over_ranks(rule, (x,), axes)
        return lambda: y
    names = tuple(axis.name for axis in live)
    note(event_of(rule.name, names, [tuple(x.shape)], x.dtype, rule.backward))
    return start_permute(rule, x, live[0].mesh, names)


def _event(rule: Rule, call: _Call, xs: Sequence[Tensor], ranks_in_front: int) -> Event:
    """What one rank hands in: its tensor, or several as one row of numbers."""
    shapes = [tuple(x.shape[ranks_in_front + extra :]) for x, extra in zip(xs, call.extras, strict=True)]
    return event_of(rule.name, call.names, shapes, rule.travels_in(xs[0]), rule.backward)


def _finish(xs: Sequence[Tensor], call: _Call) -> tuple[Tensor, ...]:
    """Every axis lies in front: put them in the tuple's order, and do the dense map."""
    rule, count, size = call.rule, len(call.names), math.prod(call.sizes)
    order = [call.folded.index(name) for name in call.names]
    if rule.takes == VARYING:
        xs = [x.permute(*order, *range(count, x.dim())).flatten(0, count - 1) for x in xs]
    note(_event(rule, call, xs, rule.takes == VARYING))
    ys = [rule.dense(x, size, each) for x, each in zip(xs, call.rules(), strict=True)]
    if rule.adjoint is not None and recording():
        adjoint = replace(rule.adjoint(rule), backward=True)
        ys = tap(ys, _event(adjoint, call, ys, rule.gives == VARYING))
    if rule.gives == VARYING:
        inverse = [call.names.index(name) for name in call.folded]
        ys = [y.unflatten(0, call.sizes).permute(*inverse, *range(count, y.dim() + count - 1)) for y in ys]
    return tuple(ys)


class _Collective(Function):
    """(call, *tensors, *the rank indices of the waiting axes) -> the collective of each tensor."""

    @staticmethod
    def forward(call: _Call, *operands: Tensor) -> tuple[Tensor, ...]:
        if call.mesh is not None:
            xs = operands[: len(call.extras)]
            note(_event(call.rule, call, xs, 0))
            return tuple(on_processes(call.rules(), xs, call.mesh, call.names))
        raise RuntimeError(
            f"{call.rule.name}: axis {call.waiting[0]!r} has no ranks here; its fcp.simulate call has already returned"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *operands = inputs
        ctx.save_for_backward(*operands[len(ctx.call.extras) :])

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call, indices = ctx.call, ctx.saved_tensors
        rule = replace(call.rule.adjoint(call.rule), backward=True)
        if call.rule.gives == COPIES:  # g is one copy's cotangent, already summed over the folded axes: 1 of many
            for name in reversed(call.folded):
                others = call.size_of(name) - 1
                gs = tuple(torch.cat([g.unsqueeze(0), g.new_zeros((others, *g.shape))]) for g in gs)
        gs = _Collective.apply(replace(call, rule=rule), *gs, *indices)
        if rule.gives == COPIES and call.folded:  # the operand has the folded axes in front: a copy for each rank
            gs = tuple(g.expand(*(call.size_of(name) for name in call.folded), *g.shape) for g in gs)
        return None, *gs, *(None for _ in indices)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *operands: Tensor) -> tuple[Any, Any]:
        rule, front, count = call.rule, len(call.folded), len(call.extras)
        xs, x_dims = operands[:count], in_dims[1 : 1 + count]
        indices, index_dims = operands[count:], in_dims[1 + count :]
        mine = [name for name, dim in zip(call.waiting, index_dims, strict=True) if dim is not None]
        if not mine:  # another axis, or the caller's own vmap
            to, given = front if rule.takes == VARYING else 0, front if rule.gives == VARYING else 0
            xs = [x if dim is None else x.movedim(dim, to) for x, dim in zip(xs, x_dims, strict=True)]
            extras = tuple(e + (dim is not None) for e, dim in zip(call.extras, x_dims, strict=True))
            ys = _Collective.apply(replace(call, extras=extras), *xs, *indices)
            return ys, tuple(None if dim is None else given for dim in x_dims)
        (name,) = mine
        if rule.takes == VARYING:
            size = info.batch_size
            xs = [
                x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(xs, x_dims, strict=True)
            ]
        elif any(dim is not None for dim in x_dims):
            raise ValueError(_already_varies(rule, name))
        rest = [(n, i) for n, i in zip(call.waiting, indices, strict=True) if n != name]
        folded = replace(call, waiting=tuple(n for n, _ in rest), folded=(name, *call.folded))
        ys = _Collective.apply(folded, *xs, *(i for _, i in rest)) if rest else _finish(xs, folded)
        return ys, (0 if rule.gives == VARYING else None,) * count


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

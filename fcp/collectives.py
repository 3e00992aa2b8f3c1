"""Collectives: linear maps over the ranks of an axis, each with its adjoint.

Problem. A collective whose backward is wrong raises nothing: a gradient is cp times too small, or misses a sum. So a
collective here is defined by what it *means* over the list of all ranks' tensors, and its backward is another entry of
the same table, tested to be the exact adjoint of that meaning.

Idea. Two types, JAX's: a value is *invariant* over an axis (every rank holds the same) or *varying*. Every collective
says which it takes and gives, and an adjoint swaps the two:

    shard         invariant -> varying  adjoint unshard           pvary         invariant -> varying  adjoint psum
    unshard       varying -> invariant  adjoint shard             psum          varying -> invariant  adjoint pvary
    all_gather    varying -> varying    adjoint psum_scatter      psum_scatter  varying -> varying    adjoint all_gather
    all_to_all    varying -> varying    adjoint all_to_all        ppermute      varying -> varying    adjoint ppermute

One autograd Function carries all of them. A row of the table is a `_Rule`: its types, its adjoint, and `dense`, the map
over the stacked tensors of all ranks. Under `simulate` a rank dimension is a vmap level, and the Function's vmap rule
knows its own level because the axis's rank index, an extra operand, is batched there and nowhere else: it moves that
dimension to the front, and when every axis of a tuple lies in front it calls `dense`. At any other level the dims move
by one and the Function is called again. What comes out invariant comes out unbatched, so later work is done once.

`pvary` and `all_gather` give the same value to every rank; they stay unbatched too (their `gives` is COPIES), because a
batched weight would cost one weight gradient a rank. A reduction is always SUM; who wants a mean divides.

Left out: what a collective does on real processes has its place in `_Collective.forward`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from fcp.axes import Axes, Axis, axis_index, axis_size, lookup

__all__ = [
    "Event",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "own_slice",
    "pmax",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "record",
    "shard",
    "unshard",
]

INVARIANT, VARYING, COPIES = "invariant", "varying", "copies"


@dataclass(frozen=True)
class _Rule:
    """A row of the table. `dense` maps the tensors of all ranks; a varying side has the rank dim in front."""

    name: str
    takes: str
    gives: str
    dense: Callable[..., Tensor]
    adjoint: "Callable[[_Rule], _Rule] | None"
    dims: tuple[int, ...] = ()
    perm: tuple[tuple[int, int], ...] = ()
    backward: bool = False


# --- the public collectives -------------------------------------------------------------------------------------------


def shard(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int) -> Shaped[Tensor, "..."]:
    """Rank r keeps slice r of `x` along `dim`; moves [..., n, ...] to [..., n / size, ...].

    Meaning: invariant x to varying [x_0, x_1, ...] with x = concatenate(x_0, x_1, ...).

    ```text
    rank 0   [a b c]      [a]
    rank 1   [a b c]  ->  [b]
    rank 2   [a b c]      [c]
    ```

    Adjoint: `unshard`.

    Raises:
        ValueError: the size of `dim` is not a multiple of the number of ranks, or `x` already varies over `axis`.
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "shard")
    dim = _dim("shard", x, dim)
    _check_divides("shard", x, axes, dim)
    return _call(_Rule("shard", INVARIANT, VARYING, _dense_shard, _to_unshard, (dim,)), x, axes)


def unshard(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int) -> Shaped[Tensor, "..."]:
    """Concatenates the ranks' slices along `dim`; moves [..., n, ...] to [..., n * size, ...], the same on every rank.

    Meaning: varying [x_0, x_1, ...] to invariant concatenate(x_0, x_1, ...).

    ```text
    rank 0   [a]      [a b c]
    rank 1   [b]  ->  [a b c]
    rank 2   [c]      [a b c]
    ```

    Adjoint: `shard`. The cotangent that comes in is a copy, the same on every rank. Use `all_gather` where each rank
    goes on to use the result in its own way.

    Raises:
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "unshard")
    return _call(_Rule("unshard", VARYING, INVARIANT, _dense_join, _to_shard, (_dim("unshard", x, dim),)), x, axes)


def pvary(x: Shaped[Tensor, "..."], axis: Axes) -> Shaped[Tensor, "..."]:
    """x, from here on used by each rank in its own way: y_r = x.

    Meaning: invariant x to varying [x, x, ...].

    ```text
    rank 0   a      a
    rank 1   a  ->  a
    rank 2   a      a
    ```

    Adjoint: `psum`. The cotangents that come in are partial: each rank has what its own use contributed.

    Raises:
        ValueError: `x` already varies over `axis`.
        NameError: `axis` is not bound.
    """
    return _call(_Rule("pvary", INVARIANT, COPIES, _dense_same, _to_psum), x, lookup(axis, "pvary"))


def psum(x: Shaped[Tensor, "..."], axis: Axes) -> Shaped[Tensor, "..."]:
    """The sum over the ranks: y = x_0 + x_1 + ...

    Meaning: varying [x_0, x_1, ...] to invariant sum. A value that is the same on all ranks counts once a rank.

    ```text
    rank 0   a      a+b+c
    rank 1   b  ->  a+b+c
    rank 2   c      a+b+c
    ```

    Adjoint: `pvary`. The cotangent that comes in is a copy.

    Raises:
        NameError: `axis` is not bound.
    """
    return _call(_Rule("psum", VARYING, INVARIANT, _dense_sum, _to_pvary), x, lookup(axis, "psum"))


def all_gather(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int) -> Shaped[Tensor, "..."]:
    """Concatenates the ranks' slices along `dim` for each rank's own use; moves [..., n, ...] to [..., n * size, ...].

    Meaning: varying [x_0, x_1, ...] to varying [X, X, ...] with X = concatenate(x_0, x_1, ...).

    ```text
    rank 0   [a]      [a b c]
    rank 1   [b]  ->  [a b c]
    rank 2   [c]      [a b c]
    ```

    Adjoint: `psum_scatter`. The cotangents that come in are partial.

    Raises:
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "all_gather")
    return _call(
        _Rule("all_gather", VARYING, COPIES, _dense_join, _to_psum_scatter, (_dim("all_gather", x, dim),)), x, axes
    )


def psum_scatter(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int) -> Shaped[Tensor, "..."]:
    """Sums over the ranks and leaves slice r on rank r; moves [..., n, ...] to [..., n / size, ...].

    Meaning: varying [x_0, x_1, ...] to varying [s_0, s_1, ...] with concatenate(s_0, s_1, ...) = x_0 + x_1 + ...

    ```text
    rank 0   [a b c]      [a+d+g]
    rank 1   [d e f]  ->  [b+e+h]
    rank 2   [g h i]      [c+f+i]
    ```

    Adjoint: `all_gather`.

    Raises:
        ValueError: the size of `dim` is not a multiple of the number of ranks.
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "psum_scatter")
    dim = _dim("psum_scatter", x, dim)
    _check_divides("psum_scatter", x, axes, dim)
    return _call(_Rule("psum_scatter", VARYING, VARYING, _dense_sum_scatter, _to_all_gather, (dim,)), x, axes)


def all_to_all(x: Shaped[Tensor, "..."], axis: Axes, *, split_dim: int, concat_dim: int) -> Shaped[Tensor, "..."]:
    """Sends slice r of `split_dim` to rank r and concatenates what arrives along `concat_dim`, by sender.

    Moves [..., n, ..., m, ...] to [..., n / size, ..., m * size, ...].

    Meaning: varying to varying; y_r = concatenate over senders s of (slice r of x_s).

    ```text
    rank 0   [a b c]      [a d g]
    rank 1   [d e f]  ->  [b e h]
    rank 2   [g h i]      [c f i]
    ```

    Adjoint: `all_to_all` with the two dims swapped.

    Raises:
        ValueError: the size of `split_dim` is not a multiple of the number of ranks, or the dims are the same.
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "all_to_all")
    split, concat = _dim("all_to_all", x, split_dim), _dim("all_to_all", x, concat_dim)
    if split == concat:
        raise ValueError(f"all_to_all: split_dim and concat_dim are both {split}; they must differ")
    _check_divides("all_to_all", x, axes, split)
    return _call(_Rule("all_to_all", VARYING, VARYING, _dense_exchange, _to_exchange, (split, concat)), x, axes)


def ppermute(x: Shaped[Tensor, "..."], axis: Axes, *, perm: list[tuple[int, int]]) -> Shaped[Tensor, "..."]:
    """Sends each rank's tensor to another: for (source, target) in perm, y_target = x_source; zeros where none arrives.

    ```text
    rank 0   a      c
    rank 1   b  ->  a        perm = [(0, 1), (1, 2), (2, 0)]
    rank 2   c      b
    ```

    Adjoint: `ppermute` with the inverse permutation.

    Raises:
        ValueError: a source or a target is named twice, or is no rank of `axis`.
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "ppermute")
    size = math.prod(each.size for each in axes)
    for side, ranks in (("source", [s for s, _ in perm]), ("target", [t for _, t in perm])):
        if len(set(ranks)) != len(ranks) or any(not 0 <= rank < size for rank in ranks):
            raise ValueError(f"ppermute: {side}s {ranks} over axis {axis!r} must be different ranks of 0..{size - 1}")
    rule = _Rule("ppermute", VARYING, VARYING, _dense_permute, _to_permute, perm=tuple(perm))
    if size == 1:  # the one rank may still receive nothing
        return x if perm else torch.zeros_like(x)
    return _call(rule, x, axes)


def pmax(x: Shaped[Tensor, "..."], axis: Axes) -> Shaped[Tensor, "..."]:
    """The elementwise maximum over the ranks, the same on every rank. No gradient flows through it.

    Raises:
        NameError: `axis` is not bound.
    """
    return _call(_Rule("pmax", VARYING, INVARIANT, _dense_max, None), x.detach(), lookup(axis, "pmax"))


def own_slice(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int) -> Shaped[Tensor, "..."]:
    """Slice r of `x` along `dim` on rank r, where each rank already has its own use of `x` (after a `pvary`).

    It computes what `shard` does, but moves no gradient between ranks: its adjoint pads with zeros, and the sum is the
    `pvary`'s. `shard` after `pvary` would count every gradient once a rank.

    Raises:
        ValueError: the size of `dim` is not a multiple of the number of ranks.
        NameError: `axis` is not bound.
    """
    axes = lookup(axis, "own_slice")
    dim = _dim("own_slice", x, dim)
    _check_divides("own_slice", x, axes, dim)
    if all(each.size == 1 for each in axes):
        return x
    local = x.shape[dim] // math.prod(each.size for each in axes)
    rows = axis_index(axis).to(x.device) * local + torch.arange(local, device=x.device)
    return x.index_select(dim, rows)


# --- what each means over the stacked tensors of all ranks ------------------------------------------------------------
# x: the rank dim in front where the rule takes VARYING, then the tensor's own dims; `rule.dims` count from there.


def _dense_shard(x: Tensor, size: int, rule: _Rule) -> Tensor:
    (dim,) = rule.dims
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _dense_join(x: Tensor, size: int, rule: _Rule) -> Tensor:
    (dim,) = rule.dims
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _dense_same(x: Tensor, size: int, rule: _Rule) -> Tensor:
    return x.view_as(x)  # a Function may not return its input itself


def _dense_sum(x: Tensor, size: int, rule: _Rule) -> Tensor:
    return x.sum(0)


def _dense_sum_scatter(x: Tensor, size: int, rule: _Rule) -> Tensor:
    return _dense_shard(x.sum(0), size, rule)


def _dense_exchange(x: Tensor, size: int, rule: _Rule) -> Tensor:
    split, concat = rule.dims
    x = x.unflatten(split + 1, (size, -1)).movedim(split + 1, 0)  # [target, source, ...]
    return x.movedim(1, concat + 1).flatten(concat + 1, concat + 2)


def _dense_permute(x: Tensor, size: int, rule: _Rule) -> Tensor:
    source = {target: source for source, target in rule.perm}
    return torch.stack([x[source[rank]] if rank in source else torch.zeros_like(x[0]) for rank in range(size)])


def _dense_max(x: Tensor, size: int, rule: _Rule) -> Tensor:
    return x.amax(0)


def _to_unshard(rule: _Rule) -> _Rule:
    return replace(rule, name="unshard", takes=VARYING, gives=INVARIANT, dense=_dense_join, adjoint=_to_shard)


def _to_shard(rule: _Rule) -> _Rule:
    return replace(rule, name="shard", takes=INVARIANT, gives=VARYING, dense=_dense_shard, adjoint=_to_unshard)


def _to_psum(rule: _Rule) -> _Rule:
    return replace(rule, name="psum", takes=VARYING, gives=INVARIANT, dense=_dense_sum, adjoint=_to_pvary)


def _to_pvary(rule: _Rule) -> _Rule:
    return replace(rule, name="pvary", takes=INVARIANT, gives=COPIES, dense=_dense_same, adjoint=_to_psum)


def _to_psum_scatter(rule: _Rule) -> _Rule:
    return replace(rule, name="psum_scatter", gives=VARYING, dense=_dense_sum_scatter, adjoint=_to_all_gather)


def _to_all_gather(rule: _Rule) -> _Rule:
    return replace(rule, name="all_gather", gives=COPIES, dense=_dense_join, adjoint=_to_psum_scatter)


def _to_exchange(rule: _Rule) -> _Rule:
    return replace(rule, dims=rule.dims[::-1])


def _to_permute(rule: _Rule) -> _Rule:
    return replace(rule, perm=tuple((target, source) for source, target in rule.perm))


# --- the one Function -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A collective under way: `waiting` axes are still vmap levels, `folded` ones are dims in front of the tensor.

    `names` and `sizes` are the whole axis tuple in its own order (first slowest); `extra` counts the dims between the
    folded ones and the tensor's own, which belong to other vmap levels.
    """

    rule: _Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    waiting: tuple[str, ...]
    folded: tuple[str, ...] = ()
    extra: int = 0

    def size_of(self, name: str) -> int:
        return self.sizes[self.names.index(name)]


def _call(rule: _Rule, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    live = [(axis, axis.index) for axis in axes if axis.index is not None]
    if not live:
        return x
    names = tuple(axis.name for axis, _ in live)
    call = _Call(rule, names, tuple(axis.size for axis, _ in live), waiting=names)
    return _Collective.apply(x, call, *(index for _, index in live))


def _finish(x: Tensor, call: _Call) -> Tensor:
    """Every axis lies in front: put them in the tuple's order, and do the dense map."""
    rule, count, size = call.rule, len(call.names), math.prod(call.sizes)
    order = [call.folded.index(name) for name in call.names]
    if rule.takes == VARYING:
        x = x.permute(*order, *range(count, x.dim())).flatten(0, count - 1)
    _note(rule, call, tuple(x.shape[(rule.takes == VARYING) + call.extra :]), x.dtype)
    y = rule.dense(x, size, rule)
    if rule.adjoint is not None and _trace.get() is not None:
        back = replace(rule.adjoint(rule), backward=True)
        y = _Tap.apply(y, (back, call, tuple(y.shape[(rule.gives == VARYING) + call.extra :])))
    if rule.gives == VARYING:
        inverse = [call.names.index(name) for name in call.folded]
        y = y.unflatten(0, call.sizes).permute(*inverse, *range(count, y.dim() + count - 1))
    return y


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, call: _Call, *indices: Tensor) -> Tensor:
        # The place of the process rule: here no vmap level is left that belongs to a waiting axis.
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


def _already_varies(rule: _Rule, name: str) -> str:
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


def _dim(user: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{user}: dim {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _check_divides(user: str, x: Tensor, axes: tuple[Axis, ...], dim: int) -> None:
    size = math.prod(axis.size for axis in axes)
    if x.shape[dim] % size:
        names = " x ".join(f"{axis.name}={axis.size}" for axis in axes)
        raise ValueError(
            f"{user}: dim {dim} of shape {tuple(x.shape)} has {x.shape[dim]} entries, which {names} ranks do not divide"
            f"; pad it to a multiple of {size}"
        )


# --- the trace --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One collective as one rank sees it: what it handed in."""

    name: str
    axis: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    backward: bool

    @property
    def bytes(self) -> int:
        """The size of the tensor that one rank hands in, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


_trace: ContextVar[list[Event] | None] = ContextVar("fcp_trace", default=None)


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Records every collective that runs in the `with` block, forward and backward, in order, into the list it gives.

    In one program all ranks run the same collectives, so one list describes every rank. A `shard` or `pvary` is
    listed though it moves nothing forward; its adjoint moves data.

    >>> import fcp, torch
    >>> with fcp.record() as events:
    ...     _ = fcp.simulate(lambda x: fcp.psum(fcp.shard(x, "cp", dim=0), "cp"), cp=2)(torch.ones(4))
    >>> [(event.name, event.shape, event.bytes) for event in events]
    [('shard', (4,), 16), ('psum', (2,), 8)]
    """
    events: list[Event] = []
    token = _trace.set(events)
    try:
        yield events
    finally:
        _trace.reset(token)


def _note(rule: _Rule, call: _Call, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    events = _trace.get()
    if events is not None:
        events.append(Event(rule.name, call.names, shape, dtype, rule.backward))


class _Tap(torch.autograd.Function):
    """The identity, which notes the adjoint when a gradient passes.

    Where `grad` runs outside the map, torch differentiates the dense map itself and no collective's own backward is
    called; where it runs inside, this Function lies below the differentiated level and stays silent. So each
    backward collective is noted once either way.
    """

    @staticmethod
    def forward(x: Tensor, noted: tuple[_Rule, _Call, tuple[int, ...]]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.noted = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, None]:  # type: ignore[override]
        rule, call, shape = ctx.noted
        _note(rule, call, shape, g.dtype)
        return g, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, noted: Any) -> tuple[Tensor, Any]:
        return _Tap.apply(x, noted), in_dims[0]

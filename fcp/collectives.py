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

The first half of this file is that table, for its user. The second half says what each row does to the stacked tensors
of all ranks (`_dense_...`) and which row its adjoint is (`_to_...`). How a row meets vmap is `_collective.py`'s.

A reduction is always SUM; who wants a mean divides. Left out: uneven slices. Pad first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Shaped
from torch import Tensor

from fcp._collective import COPIES, INVARIANT, VARYING, Rule, over_ranks, started
from fcp.axes import Axes, Axis, axis_index, axis_size, lookup

__all__ = [
    "all_gather",
    "all_gather_adjoint_each",
    "all_gather_each",
    "all_to_all",
    "all_to_all_each",
    "axis_index",
    "axis_size",
    "own_slice",
    "pmax",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "pvary_each",
    "rows_gathered",
    "shard",
    "start_ppermute",
    "unshard",
]

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
    return _one(Rule("shard", INVARIANT, VARYING, _dense_shard, _to_unshard, (dim,)), x, axes)


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
    return _one(Rule("unshard", VARYING, INVARIANT, _dense_join, _to_shard, (_dim("unshard", x, dim),)), x, axes)


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
    return _one(Rule("pvary", INVARIANT, COPIES, _dense_same, _to_psum), x, lookup(axis, "pvary"))


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
    return _one(Rule("psum", VARYING, INVARIANT, _dense_sum, _to_pvary), x, lookup(axis, "psum"))


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
    return _one(
        Rule("all_gather", VARYING, COPIES, _dense_join, _to_psum_scatter, (_dim("all_gather", x, dim),)), x, axes
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
    return _one(Rule("psum_scatter", VARYING, VARYING, _dense_sum_scatter, _to_all_gather, (dim,)), x, axes)


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
    return all_to_all_each((x,), axis, split_dim=split_dim, concat_dim=concat_dim)[0]


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
    rule = Rule("ppermute", VARYING, VARYING, _dense_permute, _to_permute, perm=tuple(perm))
    if size == 1:  # the one rank may still receive nothing
        return x if perm else torch.zeros_like(x)
    return _one(rule, x, axes)


def pmax(x: Shaped[Tensor, "..."], axis: Axes) -> Shaped[Tensor, "..."]:
    """The elementwise maximum over the ranks, the same on every rank. No gradient flows through it.

    Raises:
        NameError: `axis` is not bound.
    """
    return _one(Rule("pmax", VARYING, INVARIANT, _dense_max, None), x.detach(), lookup(axis, "pmax"))


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


# --- several tensors in one exchange ----------------------------------------------------------------------------------
# The same rows, for tensors of one dtype: as many messages as one takes. A trace lists them as one row of numbers.


def pvary_each(xs: Sequence[Tensor], axis: Axes, *, sum_dtype: torch.dtype | None = None) -> list[Tensor]:
    """`pvary` of each tensor; the gradients of all are summed in one exchange, in `sum_dtype` or their own."""
    rule = Rule("pvary", INVARIANT, COPIES, _dense_same, _to_psum, sum_dtype=sum_dtype)
    return over_ranks(rule, xs, lookup(axis, "pvary"))


def all_gather_each(
    xs: Sequence[Tensor], axis: Axes, *, dim: int = 0, sum_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """`all_gather` of each tensor along `dim`; their gradients are summed (in `sum_dtype`) and scattered together."""
    rule = replace(rows_gathered(), dims=(dim,), sum_dtype=sum_dtype)
    return over_ranks(rule, xs, lookup(axis, "all_gather"))


def rows_gathered() -> Rule:
    """The row of `all_gather` along dim 0, for whoever gathers by other means."""
    return Rule("all_gather", VARYING, COPIES, _dense_join, _to_psum_scatter, (0,))


def all_gather_adjoint_each(
    gs: Sequence[Tensor], axes: tuple[Axis, ...], *, sum_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The backward of `all_gather_each`, for whoever gathered by other means; `axes` as they were bound then."""
    scatter = _dense_sum_scatter
    rule = Rule("psum_scatter", VARYING, VARYING, scatter, _to_all_gather, (0,), backward=True, sum_dtype=sum_dtype)
    return over_ranks(rule, gs, axes)


def all_to_all_each(xs: Sequence[Tensor], axis: Axes, *, split_dim: int, concat_dim: int) -> list[Tensor]:
    """`all_to_all` of each tensor along the same dims, in one exchange; so are their gradients."""
    axes = lookup(axis, "all_to_all")
    for x in xs:
        split, concat = _dim("all_to_all", x, split_dim), _dim("all_to_all", x, concat_dim)
        if split == concat:
            raise ValueError(f"all_to_all: split_dim and concat_dim are both {split}; they must differ")
        _check_divides("all_to_all", x, axes, split)
    dims = (_dim("all_to_all", xs[0], split_dim), _dim("all_to_all", xs[0], concat_dim))
    return over_ranks(Rule("all_to_all", VARYING, VARYING, _dense_exchange, _to_exchange, dims), xs, axes)


def start_ppermute(
    x: Tensor, axis: Axes, *, perm: list[tuple[int, int]], backward: bool = False
) -> Callable[[], Tensor]:
    """`ppermute` of a tensor that nothing differentiates, under way: call what it gives to wait for the result.

    On processes computation goes on meanwhile; in the simulator there is nothing to wait for.
    """
    rule = Rule("ppermute", VARYING, VARYING, _dense_permute, _to_permute, perm=tuple(perm), backward=backward)
    return started(rule, x, lookup(axis, "ppermute"))


def _one(rule: Rule, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    return over_ranks(rule, (x,), axes)[0]


# --- what each means over the stacked tensors of all ranks ------------------------------------------------------------
# x: the rank dim in front where the rule takes VARYING, then the tensor's own dims; `rule.dims` count from there.


def _dense_shard(x: Tensor, size: int, rule: Rule) -> Tensor:
    (dim,) = rule.dims
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _dense_join(x: Tensor, size: int, rule: Rule) -> Tensor:
    (dim,) = rule.dims
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _dense_same(x: Tensor, size: int, rule: Rule) -> Tensor:
    return x.view_as(x)  # a Function may not return its input itself


def _dense_sum(x: Tensor, size: int, rule: Rule) -> Tensor:
    return x.sum(0, dtype=rule.travels_in(x)).to(x.dtype)


def _dense_sum_scatter(x: Tensor, size: int, rule: Rule) -> Tensor:
    return _dense_shard(_dense_sum(x, size, rule), size, rule)


def _dense_exchange(x: Tensor, size: int, rule: Rule) -> Tensor:
    split, concat = rule.dims
    x = x.unflatten(split + 1, (size, -1)).movedim(split + 1, 0)  # [target, source, ...]
    return x.movedim(1, concat + 1).flatten(concat + 1, concat + 2)


def _dense_permute(x: Tensor, size: int, rule: Rule) -> Tensor:
    source = {target: source for source, target in rule.perm}
    return torch.stack([x[source[rank]] if rank in source else torch.zeros_like(x[0]) for rank in range(size)])


def _dense_max(x: Tensor, size: int, rule: Rule) -> Tensor:
    return x.amax(0)


def _to_unshard(rule: Rule) -> Rule:
    return replace(rule, name="unshard", takes=VARYING, gives=INVARIANT, dense=_dense_join, adjoint=_to_shard)


def _to_shard(rule: Rule) -> Rule:
    return replace(rule, name="shard", takes=INVARIANT, gives=VARYING, dense=_dense_shard, adjoint=_to_unshard)


def _to_psum(rule: Rule) -> Rule:
    return replace(rule, name="psum", takes=VARYING, gives=INVARIANT, dense=_dense_sum, adjoint=_to_pvary)


def _to_pvary(rule: Rule) -> Rule:
    return replace(rule, name="pvary", takes=INVARIANT, gives=COPIES, dense=_dense_same, adjoint=_to_psum)


def _to_psum_scatter(rule: Rule) -> Rule:
    return replace(rule, name="psum_scatter", gives=VARYING, dense=_dense_sum_scatter, adjoint=_to_all_gather)


def _to_all_gather(rule: Rule) -> Rule:
    return replace(rule, name="all_gather", gives=COPIES, dense=_dense_join, adjoint=_to_psum_scatter)


def _to_exchange(rule: Rule) -> Rule:
    return replace(rule, dims=rule.dims[::-1])


def _to_permute(rule: Rule) -> Rule:
    return replace(rule, perm=tuple((target, source) for source, target in rule.perm))


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

"""Expert compute on plain tensors: sort tokens by expert, one grouped product a projection, add back in a fixed order.

Problem. Each token goes through k of many experts. A loop over experts gathers, multiplies and scatters once an expert,
and adds up in an order that depends on the routing; a product for every (token, expert) pair multiplies mostly zeros.

Idea. Every (token, choice) pair is a *row*. Rows are sorted by expert (stably, so their order is one), and a projection
is one grouped product: segment e of the rows times matrix e (Gale et al. 2023, section 5, without its blocks). What
the experts gave is put back by the inverse order, and a token adds its k rows in the order of its choices. The
gradients follow the same two orders, so nothing is added by an atomic or a scatter.

A choice below 0 is no expert: it makes no row and adds zero. An expert with no row multiplies nothing, and its gradient
is zeros, not missing.

Everything here is at the bottom: nothing is batched, so segment lengths may be read. `_experts.py` brings it there.
Left out: capacity, dropped tokens, and padding of segments.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.functional import grouped_mm

from fcp._function import Function
from fcp.axes import bare
from fcp.typing import Params

__all__ = ["ExpertFn", "Project", "join_rows", "lengths", "run_experts", "run_sorted", "sort_rows"]

GROUPED_ON = {"cuda"}
"""Where torch's grouped product is one kernel. On the CPU it is a loop over segments too, and a slower one."""

Project = Callable[..., Tensor]
"""(rows [rows, in], weight [experts, out, in], bias [experts, out] or None) -> [rows, out], each row by its expert."""

ExpertFn = Callable[[Tensor, Params, Project], Tensor]
"""(rows [rows, hidden], expert parameters, project) -> [rows, hidden]: what one expert does to each of its rows."""


def run_experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    params: Params,
    fn: ExpertFn,
    num_experts: int,
) -> Float[Tensor, "tokens hidden"]:
    """y_t = sum over choices j of weights_tj * fn_e(x_t) with e = indices_tj, in x's dtype."""
    counts = lengths(indices.reshape(-1), num_experts)
    rows, place = sort_rows(x, indices, sum(counts))
    expert = torch.repeat_interleave(torch.arange(num_experts), torch.tensor(counts)).to(x.device)
    return join_rows(fn(rows, params, _projector(expert, counts)), weights, place).to(x.dtype)


def sort_rows(
    x: Float[Tensor, "tokens hidden"], indices: Int[Tensor, "tokens k"], num_rows: int
) -> tuple[Float[Tensor, "rows hidden"], Int[Tensor, "tokens k"]]:
    """One row for each of the `num_rows` choices that name an expert, sorted by it; and where each choice's row is.

    A choice that is none has its place past the last row.
    """
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)[flat.numel() - num_rows :]  # choices below 0 come first
    place = torch.full_like(flat, num_rows).index_copy(0, order, torch.arange(num_rows, device=flat.device))
    return _Spread.apply(x, order, indices.shape[1]), place.view_as(indices)


def join_rows(
    rows: Float[Tensor, "rows hidden"], weights: Float[Tensor, "tokens k"], place: Int[Tensor, "tokens k"]
) -> Float[Tensor, "tokens hidden"]:
    """y_t = sum over choices j of weights_tj * rows[place_tj], in the wider dtype; the row past the last is zero."""
    if rows.shape[0] < place.numel():
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return _Join.apply(rows, weights, place)


def run_sorted(
    rows: Float[Tensor, "rows hidden"], expert: Int[Tensor, " rows"], counts: list[int], params: Params, fn: ExpertFn
) -> Float[Tensor, "rows hidden"]:
    """fn on rows in any order, each with its `expert`, `counts` of each; gives them in the order in which they came."""
    order = torch.argsort(expert, stable=True)
    out = fn(_Spread.apply(rows, order, 1), params, _projector(expert.index_select(0, order), counts))
    return _Spread.apply(out, torch.argsort(order), 1)


def lengths(choices: Int[Tensor, " rows"], num_experts: int) -> list[int]:
    """How many of the choices name each expert, as numbers."""
    with temporarily_clear_interpreter_stack():
        found = bare(choices)
        return torch.bincount(found[found >= 0], minlength=num_experts).tolist()


def _projector(expert_of_row: Tensor, counts: list[int]) -> Project:
    def project(
        rows: Float[Tensor, "rows width"],
        weight: Float[Tensor, "experts out width"],
        bias: Float[Tensor, "experts out"] | None = None,
    ) -> Float[Tensor, "rows out"]:
        y = _Grouped.apply(rows, weight, counts)
        return y if bias is None else y + bias.index_select(0, expert_of_row)

    return project


class _Spread(Function):
    """x [tokens, hidden] -> the rows x[order // k]; backward adds a token's rows in the order of its choices."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, k: int) -> Tensor:
        return x.index_select(0, order // k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, order, ctx.k = inputs
        ctx.tokens = x.shape[0]
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        slots = ctx.tokens * ctx.k
        if order.numel() == slots:
            g = g.index_select(0, torch.argsort(order))
        else:
            g = g.new_zeros(slots, g.shape[1]).index_copy(0, order, g)
        return g.view(ctx.tokens, ctx.k, g.shape[1]).sum(1), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:
        return _one_by_one(_Spread, info.batch_size, in_dims, operands)


class _Join(Function):
    """rows, weights [tokens, k], place [tokens, k] -> sum over j of weights_tj * rows[place_tj], j in order."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        y = weights[:, :1] * rows.index_select(0, place[:, 0])
        for choice in range(1, place.shape[1]):
            y.addcmul_(weights[:, choice, None].to(y.dtype), rows.index_select(0, place[:, choice]).to(y.dtype))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weights, place = ctx.saved_tensors
        # Row place_tj is read by (t, j) alone, but for the row of zeros at the end, whose gradient nobody reads.
        flat = place.reshape(-1)
        slot = torch.zeros(rows.shape[0], dtype=flat.dtype, device=flat.device)
        slot = slot.index_copy(0, flat, torch.arange(flat.numel(), device=flat.device))
        spread = g.index_select(0, slot // place.shape[1])
        g_rows = (spread * weights.reshape(-1, 1).index_select(0, slot)).to(rows.dtype)
        of_row = (spread * rows).sum(-1)
        return g_rows, of_row.index_select(0, flat).view_as(weights).to(weights.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:
        return _one_by_one(_Join, info.batch_size, in_dims, operands)


class _Grouped(Function):
    """rows [rows, in], weight [experts, out, in], rows of each expert -> [rows, out]."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        if _fits(rows, weight):
            return grouped_mm(rows, weight.mT, offs=_ends(counts, rows.device))
        y = rows.new_empty(rows.shape[0], weight.shape[1])
        for begin, end, expert in _segments(counts):
            torch.mm(rows[begin:end], weight[expert].mT, out=y[begin:end])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, weight, ctx.counts = inputs
        ctx.save_for_backward(rows, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        return (
            _Grouped.apply(g, weight.mT, ctx.counts) if needs_rows else None,
            _GroupedOuter.apply(g, rows, ctx.counts) if needs_weight else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:
        return _one_by_one(_Grouped, info.batch_size, in_dims, operands)


class _GroupedOuter(Function):
    """g [rows, out], rows [rows, in] -> for each expert the sum over its rows of g x^T, [experts, out, in]."""

    @staticmethod
    def forward(g: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
        if _fits(g, rows):
            return grouped_mm(g.mT, rows, offs=_ends(counts, g.device))
        y = g.new_zeros(len(counts), g.shape[1], rows.shape[1])
        for begin, end, expert in _segments(counts):
            torch.mm(g[begin:end].mT, rows[begin:end], out=y[expert])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, rows, ctx.counts = inputs
        ctx.save_for_backward(g, rows)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        g, rows = ctx.saved_tensors
        return _Grouped.apply(rows, h, ctx.counts), _Grouped.apply(g, h.mT, ctx.counts), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:
        return _one_by_one(_GroupedOuter, info.batch_size, in_dims, operands)


def _segments(counts: list[int]) -> list[tuple[int, int, int]]:
    """(first row, row past the last, expert) of every expert that has rows."""
    found, begin = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((begin, begin + count, expert))
        begin += count
    return found


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def _fits(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes these: one dim dense, the others' strides multiples of 16 bytes."""
    for x in operands:
        strides = sorted((x.stride(-1), x.stride(-2)))
        aligned = [stride * x.element_size() % 16 == 0 for stride in (*x.stride()[:-2], strides[1])]
        if x.device.type not in GROUPED_ON or x.dtype not in (torch.bfloat16, torch.float32) or not x.numel():
            return False
        if strides[0] != 1 or not all(aligned) or x.data_ptr() % 16:
            return False
    return True


def _one_by_one(fn: Any, size: int, in_dims: tuple[Any, ...], operands: tuple[Any, ...]) -> tuple[Tensor, int]:
    """For a caller's own vmap over the gradient (a Jacobian's rows); ranks never come here."""
    pairs = list(zip(operands, in_dims, strict=True))
    picked = [[x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs] for i in range(size)]
    return torch.stack([fn.apply(*each) for each in picked]), 0

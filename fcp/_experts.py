"""experts: a token through the experts it chose, whatever ranks hold the tokens and the experts.

Problem. Under `simulate` tokens, choices and experts may each be batched over ranks, and how many rows an expert gets
is known only where nothing is batched.

Idea. As attention and linear do, the Function's vmap rule folds the rank dim away and calls itself one level below.
Ranks with other tokens are more tokens. Ranks with other experts are more experts: rank b's choice e becomes choice
b * num_experts + e. And over an expert-parallel axis, whose ranks hold experts 0..n-1, n..2n-1, ..., choices are
global already, so that the ranks' experts joined are the experts, and the exchange of tokens between the ranks is what
the fold does. At the bottom one call (`_grouped.py`) runs on plain tensors, with torch's own derivative where the map
is differentiated from outside.

Where each rank differentiates its own function (inside the map) the gradient is a Function too, which computes the
experts again; that mode is for checking, not for speed.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fcp import pytree
from fcp._function import Function
from fcp._grouped import ExpertFn, run_experts
from fcp.axes import Axis, batched
from fcp.typing import Params

__all__ = ["experts", "experts_over"]


def experts(
    x: Float[Tensor, "batch seq hidden"],
    weights: Float[Tensor, "batch seq k"],
    indices: Int[Tensor, "batch seq k"],
    params: Params,
    fn: ExpertFn,
) -> Float[Tensor, "batch seq hidden"]:
    """y_t = sum over choices j of weights_tj * expert_e(x_t) with e = indices_tj (Shazeer et al. 2017, section 2).

    Args:
        x: the tokens.
        weights: what each token's choices count; any floating dtype (the sum is taken in the wider of the two).
        indices: the experts chosen, int64; below 0 for none.
        params: a pytree of tensors [experts, ...], at least one.
        fn: (rows [rows, hidden], params, project) -> [rows, hidden], what an expert does to a row; `project(rows,
            weight, bias=None)` with weight [experts, out, in] and bias [experts, out] multiplies each row by its own
            expert's matrix. It closes over no tensor and acts on each row by itself.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return experts_over(x, weights, indices, params, fn, ())


def experts_over(
    x: Tensor, weights: Tensor, indices: Tensor, params: Params, fn: ExpertFn, axes: tuple[Axis, ...]
) -> Tensor:
    """`experts` where the experts are cut along simulated `axes` (first slowest) and `indices` count all of them."""
    found, spec = pytree.flatten(params)
    local = _check(x, weights, indices, pytree.paths(params), found)
    live = [(axis, axis.index) for axis in axes if axis.index is not None]
    total = local
    for axis, _ in live:
        total *= axis.size
    call = _Call(
        fn, spec, total, tuple(axis.name for axis, _ in live), tuple(axis.name for axis, _ in live), count=len(found)
    )
    operands = (x.flatten(0, -2), weights.flatten(0, -2), indices.flatten(0, -2), *found)
    if not live and not any(batched(each) for each in operands):
        y = _bottom(call, *operands)
    else:
        y = _Experts.apply(call, *operands, *(index for _, index in live))
    return y.view_as(x)


@dataclass(frozen=True)
class _Call:
    """An expert compute under way.

    `experts` is how many experts a choice may name; `names` are the axes over which the experts are cut, `waiting`
    those that are still vmap levels. `lead` tells what the dims in front of each parameter's own are: the name of such
    an axis, or None for ranks that have experts of their own, which are counted in `experts` already.
    """

    fn: ExpertFn
    spec: Any
    experts: int
    names: tuple[str, ...]
    waiting: tuple[str, ...]
    lead: tuple[str | None, ...] = ()
    count: int = 0


def _bottom(call: _Call, x: Tensor, weights: Tensor, indices: Tensor, *params: Tensor) -> Tensor:
    return run_experts(x, weights, indices, _joined(call, params), call.fn, call.experts)


def _joined(call: _Call, params: tuple[Tensor, ...]) -> Params:
    """The parameters with their rank dims in the order in which choices count, and flattened."""
    own = [i for i, name in enumerate(call.lead) if name is None]
    order = own + [call.lead.index(name) for name in call.names]
    front = len(call.lead)
    if not front:
        return pytree.unflatten(call.spec, params)
    joined = [x.permute(*order, *range(front, x.dim())).flatten(0, front) for x in params]
    return pytree.unflatten(call.spec, joined)


class _Experts(Function):
    """(call, x [tokens, hidden], weights and indices [tokens, k], *parameters, *rank indices) -> [tokens, hidden]."""

    @staticmethod
    def forward(call: _Call, *operands: Tensor) -> Tensor:
        return _bottom(call, *operands[: 3 + call.count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        operands = ctx.saved_tensors
        g_x, g_weights, *g_params = _ExpertsGradient.apply(ctx.call, g, *operands)
        rest = len(operands) - 3 - ctx.call.count
        return None, g_x, g_weights, None, *g_params, *(None for _ in range(rest))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *operands: Tensor) -> tuple[Tensor, int]:
        folded, values, rest = _fold(call, info.batch_size, in_dims[1:], operands, own_params=False)
        y = _Experts.apply(folded, *values, *rest) if rest or _any_batched(values) else _bottom(folded, *values)
        return y.unflatten(0, (info.batch_size, -1)), 0


class _ExpertsGradient(Function):
    """(call, g, *operands of _Experts) -> the gradients of x, weights and every parameter."""

    @staticmethod
    def forward(call: _Call, g: Tensor, x: Tensor, weights: Tensor, indices: Tensor, *rest: Tensor) -> Any:
        def fn(x: Tensor, weights: Tensor, *params: Tensor) -> Tensor:
            return _bottom(call, x, weights, indices, *params)

        _, vjp = cast(Any, torch.func.vjp)(fn, x, weights, *rest[: call.count])
        return vjp(g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(
            "experts: a second derivative inside fcp.simulate is not supported; differentiate around the simulated "
            "function, as torch.func.grad(lambda p: fn(p, batch).loss)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, g: Tensor, *operands: Tensor) -> Any:
        size = info.batch_size
        _, g_dim, *dims = in_dims
        g = g.expand(size, *g.shape) if g_dim is None else g.movedim(g_dim, 0)
        # Each rank has its own gradient of a parameter, even of one that all hold alike.
        folded, values, rest = _fold(call, size, dims, operands, own_params=True)
        g_x, g_weights, *g_params = _ExpertsGradient.apply(folded, g.flatten(0, 1), *values, *rest)
        split = [x.unflatten(0, (size, -1)) for x in (g_x, g_weights)]
        return (*split, *g_params), tuple(0 for _ in range(2 + call.count))


def _any_batched(values: list[Tensor]) -> bool:
    return any(batched(x) for x in values)


def _fold(
    call: _Call, size: int, dims: Any, operands: tuple[Tensor, ...], *, own_params: bool
) -> tuple[_Call, list[Tensor], list[Tensor]]:
    """One level less: the call, its values and its rank indices one level below."""
    end = 3 + call.count
    index_dims = dims[end:]
    mine = [name for name, dim in zip(call.waiting, index_dims, strict=True) if dim is not None]
    rest = [x for x, dim in zip(operands[end:], index_dims, strict=True) if dim is None]

    def in_front(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    x, weights, indices = (in_front(t, d) for t, d in zip(operands[:3], dims[:3], strict=True))
    params = list(operands[3:end])
    if mine:
        params = [in_front(t, d) for t, d in zip(params, dims[3:end], strict=True)]
        call = replace(call, waiting=tuple(n for n in call.waiting if n not in mine), lead=(mine[0], *call.lead))
    elif own_params or any(dim is not None for dim in dims[3:end]):
        params = [in_front(t, d) for t, d in zip(params, dims[3:end], strict=True)]
        first = torch.arange(size, device=indices.device).view(-1, 1, 1) * call.experts
        indices = torch.where(indices < 0, indices, indices + first)
        call = replace(call, experts=call.experts * size, lead=(None, *call.lead))
    return call, [x.flatten(0, 1), weights.flatten(0, 1), indices.flatten(0, 1), *params], rest


def _check(x: Tensor, weights: Tensor, indices: Tensor, paths: list[str], params: list[Tensor]) -> int:
    """The number of experts that the parameters hold."""
    wrong = []
    if not params:
        wrong.append("no expert parameters")
    counts = {path: x.shape[0] if x.dim() else 0 for path, x in zip(paths, params, strict=True)}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        wrong.append(f"parameters of {counts} experts, which must be one number, 1 or more")
    if weights.shape != indices.shape or x.shape[:-1] != indices.shape[:-1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, weights, indices))
        wrong.append(f"x, weights and indices of shapes {shapes}: they must be [..., hidden], [..., k] and [..., k]")
    if indices.is_floating_point() or not weights.is_floating_point():
        wrong.append(f"weights of {weights.dtype} and indices of {indices.dtype}: floating and integer are wanted")
    if wrong:
        raise ValueError(f"experts: {'; '.join(wrong)}")
    return next(iter(counts.values()))

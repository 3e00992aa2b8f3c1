"""linear: the matrix product of a model, with a vmap rule that never copies an activation once a rank.

Under `vmap`, torch lowers `F.linear` to a batched product and broadcasts: an activation that is split over cp, times a
weight that is split over tp, is first copied once a tp rank, and the copy is kept for backward. A layer has seven such
products.

What the ranks' products are together is simpler. Split rows (cp, dp) are more rows of one product. A weight split by
output (its activation is the same on all ranks) is one product with the slices stacked. Only where both differ between
the ranks is it a product a rank (`groups`). So the rule folds, as attention's does, and one product runs at the bottom.
Backward is two products of the same two kinds (`_Linear` and `_Outer`), so it folds too, at whatever level it runs.

Left out: `torch.nn.functional.linear` itself. A model that calls it is computed right, and costs more under tp.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fcp._function import Function

__all__ = ["linear"]


def linear(
    x: Float[Tensor, "*lead width"],
    weight: Float[Tensor, "out width"],
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*lead out"]:
    """x @ weight^T + bias, as `torch.nn.functional.linear`; cheap where simulated ranks split x, weight or both.

    Raises:
        ValueError: the weight is no matrix, or its rows are not as long as x's last dim.
    """
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: weight {tuple(weight.shape)} for x {tuple(x.shape)}; it must be [out, {x.shape[-1]}]"
        )
    y = _Linear.apply(x, weight)
    return y if bias is None else y + bias


class _Linear(Function):
    """x [*rows, width], weight [out, width] -> [*rows, out]; or with groups, all of them with the same dim 0."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return torch.nn.functional.linear(x, weight)
        return torch.bmm(x.flatten(1, -2), weight.mT).unflatten(1, x.shape[1:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            _Linear.apply(g, weight.mT) if needs_x else None,
            _Outer.apply(g, x, weight.dim() == 3) if needs_weight else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        x_dim, w_dim = in_dims
        size, groups = info.batch_size, weight.dim() - (w_dim is not None) == 3
        if w_dim is None:  # more rows
            first = 1 if groups else 0
            return _Linear.apply(x.movedim(x_dim, first), weight), first
        weight = weight.movedim(w_dim, 0)
        if x_dim is None and not groups:  # more outputs
            y = _Linear.apply(x, weight.flatten(0, 1)).unflatten(-1, (size, -1))
            return y, y.dim() - 2
        x = x.expand(size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if not groups:
            return _Linear.apply(x, weight), 0
        return _Linear.apply(x.flatten(0, 1), weight.flatten(0, 1)).unflatten(0, (size, -1)), 0


class _Outer(Function):
    """g [*rows, out], x [*rows, width] -> the sum over rows of g x^T [out, width]; with groups, one sum a group."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, groups: bool) -> Tensor:
        if groups:
            return torch.bmm(g.flatten(1, -2).mT, x.flatten(1, -2))
        return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, ctx.groups = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        g, x = ctx.saved_tensors
        return _Linear.apply(x, h), _Linear.apply(g, h.mT), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], g: Tensor, x: Tensor, groups: bool) -> tuple[Tensor, int]:
        g_dim, x_dim, _ = in_dims
        size = info.batch_size
        if not groups and x_dim is None:  # more outputs
            g = g.movedim(g_dim, -2).flatten(-2)
            return _Outer.apply(g, x, False).unflatten(0, (size, -1)), 0
        if not groups and g_dim is None:  # more columns
            x = x.movedim(x_dim, -2).flatten(-2)
            return _Outer.apply(g, x, False).unflatten(1, (size, -1)), 1
        g, x = (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in ((g, g_dim), (x, x_dim)))
        if not groups:
            return _Outer.apply(g, x, True), 0
        return _Outer.apply(g.flatten(0, 1), x.flatten(0, 1), True).unflatten(0, (size, -1)), 0

"""rms_norm: x / rms(x) * weight, in half the passes over memory that its formula and the formula's derivative take.

A norm computes little and reads much. Written out, it makes three tensors of x's size, its derivative ten, and two of
them are kept for backward beside x. Where the rest of a layer is split over tp, every rank has the norms whole.

What backward needs beside x, the weight and the gradient g is one number a row, which is faster computed again than a
row is kept. With t = g x both sums that a gradient has are products of a matrix and a vector,

    d weight = t^T scale        s = t weight        dx = scale (g weight) - x (s scale^3 / width)

so backward makes three tensors. It is written in torch's own operations, so that it has derivatives too.

Under `vmap` the ranks are more rows, as in `linear`; where the weight differs between them it lies along their dim.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fcp._function import Function

__all__ = ["rms_norm"]


def rms_norm(
    x: Float[Tensor, "*lead width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*lead width"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019, equation 4).

    The mean is taken in float32 or wider, and the quotient rounded to x's dtype before the weight multiplies it. Of
    the operands and what lies between, x alone is kept for backward.

    Args:
        eps: added to the mean of squares.

    Raises:
        ValueError: the weight is not one number for each of x's last dim.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} for x {tuple(x.shape)}; it must be [{x.shape[-1]}]")
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    """x [*rows, width] and weight, [width] or with as many dims as x and broadcast -> [*rows, width]."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        quotient = (x * _scale(x, eps)).to(x.dtype)
        return quotient.mul_(weight) if weight.dtype == x.dtype else quotient * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        scale, width = _scale(x, ctx.eps), x.shape[-1]
        product, wide = g * x.to(scale.dtype), weight.to(scale.dtype)
        along = weight.dim() == 1
        dx = d_weight = None
        if needs_weight:
            rows = product.reshape(-1, width)
            found = scale.reshape(-1) @ rows if along else (product * scale).sum_to_size(weight.shape)
            d_weight = found.to(weight.dtype)
        if needs_x:
            sums = (product @ wide).unsqueeze(-1) if along else (product * wide).sum(-1, keepdim=True)
            dx = torch.addcmul(x * (sums * scale**3 / -width), g * wide, scale).to(x.dtype)
        return dx, d_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, int]:
        x_dim, weight_dim, _ = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if weight_dim is not None:
            weight = weight.movedim(weight_dim, 0)
            weight = weight.reshape(info.batch_size, *[1] * (x.dim() - weight.dim()), *weight.shape[1:])
        elif weight.dim() > 1:
            weight = weight.unsqueeze(0)
        return _RMSNorm.apply(x, weight, eps), 0


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / rms of each row [*rows, 1], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)

"""The RMS norm that most families share (Zhang and Sennrich 2019)."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["rms", "rms_norm"]


def rms_norm(
    x: Float[Tensor, "*lead width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*lead width"]:
    """x / rms(x) * weight over the last dim, the mean in float32 or wider."""
    return weight * rms(x, eps)


def rms(x: Float[Tensor, "*lead width"], eps: float) -> Float[Tensor, "*lead width"]:
    """x / rms(x) over the last dim, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

"""The loss of each token, over a whole vocabulary or over slices of it.

    loss(x, target) = log sum_v exp(x_v) - x_target

One code path serves both: the row maximum, then the sum of exponentials and the target's logit, are numbers a token
that a vocabulary-parallel caller reduces over its axis (Shoeybi et al. 2019, section 3). The two reductions are handed
in as functions, each called once; alone they are the identity.

A token without a target is *selected away*, forward and backward: its loss is exactly 0, and so is the gradient of its
logits, whatever they hold, NaN included (a masked NaN that is multiplied by zero stays NaN). A target that no slice
holds has probability 0 and so an infinite loss, never the plausible number that a missing logit would leave.

Computed in float32 or wider. Backward keeps the logits and recomputes the exponentials, so no second copy of
[tokens, vocab] lives through the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fcp._function import Function
from fcp.typing import IGNORED

__all__ = ["cap", "mean_loss", "token_losses"]


def _identity(x: Tensor) -> Tensor:
    return x


def token_losses(
    logits: Float[Tensor, "*tokens vocab_local"],
    targets: Int[Tensor, "*tokens"],
    *,
    first: int | Tensor = 0,
    reduce_max: Callable[[Tensor], Tensor] = _identity,
    reduce_sum: Callable[[Tensor], Tensor] = _identity,
) -> Float[Tensor, "*tokens"]:
    """-log softmax(logits)[target] of each token; 0 where the target is IGNORED, inf where the vocabulary lacks it.

    Args:
        logits: any floating dtype; the result is float32, or float64 for float64.
        targets: token ids of the whole vocabulary, or IGNORED.
        first: the token id of the first column held here.
        reduce_max, reduce_sum: over the axis that splits the vocabulary.
    """
    keep = targets != IGNORED
    peak = reduce_max(logits.detach().amax(-1).to(torch.promote_types(logits.dtype, torch.float32)))
    column = targets - first
    column = torch.where(column < logits.shape[-1], column, -1)
    total, picked = _ExpSumAndPick.apply(logits, column, peak, keep)
    held = (column >= 0).to(total.dtype)
    total, picked, held = reduce_sum(torch.stack([total, picked, held])).unbind()
    losses = torch.where(held > 0, torch.log(total) - picked, torch.inf)
    return torch.where(keep, losses, 0.0)


def cap(logits: Float[Tensor, "*lead"], softcap: float | None) -> Float[Tensor, "*lead"]:
    """softcap * tanh(logits / softcap): each stays within softcap of 0 (Gemma 2, section 2.2). None: as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def mean_loss(total: Float[Tensor, ""] | None, num_targets: Int[Tensor, ""]) -> Float[Tensor, ""] | None:
    """total / num_targets, the one division of the loss; no targets at all give 0, and no loss gives None."""
    return None if total is None else total / num_targets.clamp(min=1)


class _ExpSumAndPick(Function):
    """(logits, column, peak, keep) -> (sum exp(logits - peak), logits[column] - peak), each [*tokens].

    column below 0: the target is not among these columns; picked is 0. Where keep is False: (1, 0), no gradient.
    """

    @staticmethod
    def forward(logits: Tensor, column: Tensor, peak: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        total = (logits - peak.unsqueeze(-1)).exp_().sum(-1)
        picked = logits.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1) - peak
        return torch.where(keep, total, 1.0), torch.where(keep & (column >= 0), picked, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g_total: Tensor, g_picked: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _ExpSumAndPickGradient.apply(g_total, g_picked, *ctx.saved_tensors), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Tensor) -> tuple[Any, Any]:
        return _ExpSumAndPick.apply(*_in_front(info.batch_size, in_dims, operands)), (0, 0)


class _ExpSumAndPickGradient(Function):
    """Its backward, a Function for the sake of one fused pass; differentiable again through plain operations."""

    @staticmethod
    def forward(
        g_total: Tensor, g_picked: Tensor, logits: Tensor, column: Tensor, peak: Tensor, keep: Tensor
    ) -> Tensor:
        g = (logits - peak.unsqueeze(-1)).exp_().mul_(g_total.unsqueeze(-1))
        g_picked = torch.where(column >= 0, g_picked, 0.0)
        g.scatter_add_(-1, column.clamp(min=0).unsqueeze(-1), g_picked.unsqueeze(-1).to(g.dtype))
        return g.masked_fill_(~keep.unsqueeze(-1), 0.0).to(logits.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        g_total, _, logits, column, peak, keep = ctx.saved_tensors
        h = h.to(peak.dtype)
        exp = torch.where(keep.unsqueeze(-1), torch.exp(logits - peak.unsqueeze(-1)), 0.0)
        for_total = (h * exp).sum(-1)
        for_picked = torch.where(column >= 0, h.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
        return for_total, for_picked, (h * exp * g_total.unsqueeze(-1)).to(logits.dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Tensor) -> tuple[Tensor, int]:
        return _ExpSumAndPickGradient.apply(*_in_front(info.batch_size, in_dims, operands)), 0


def _in_front(size: int, in_dims: tuple[Any, ...], operands: tuple[Tensor, ...]) -> list[Tensor]:
    return [
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, in_dims, strict=True)
    ]

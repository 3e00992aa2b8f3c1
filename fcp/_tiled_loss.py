"""The loss of each token from the hidden states, in tiles of tokens: the logits of all tokens never lie in memory.

Problem. With a vocabulary of 128,000 the logits of 8,192 tokens are 4 GB in float32, and their gradient another 4: more
than everything else of a small model's step.

Idea. The loss needs three numbers a token, not its logits: their maximum, the sum of exponentials, the target's logit.
Forward makes the logits of one tile, reads these off and drops them. Backward makes them again, turns them into their
gradient in place, and multiplies that with the table and the hidden states at once. One product more than the plain
loss has, for memory that does not grow with the number of tokens; what is saved by not touching it pays for most of
the product. (Making the gradient in the forward pass, as others do, saves that product too, but needs the whole
normaliser then: not there where the vocabulary is split, and wasted where nothing is differentiated.)

Where the vocabulary is split, each rank has the three numbers of its slice. They are reduced as in `loss.py`: one
maximum and one sum for all tokens, not one a tile.

Under simulated ranks the Function folds as `linear` does: ranks that share the table are more rows, ranks with tables
of their own are groups, computed one after the other. The three numbers are kept where a layer is rematerialised.

Left out: second derivatives (refused), and forward-mode ones. The plain loss has the former.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from fcp._function import Function
from fcp._kept import once
from fcp.typing import IGNORED

__all__ = ["TILE_ENTRIES", "in_tiles", "tiled_losses"]

TILE_ENTRIES = 2**25
"""Logits in a tile where nobody says how many tokens it has (128 MB in float32); fewer logits in all are not tiled."""

ELSEWHERE, NOWHERE = -1, -2
"""In the place of a column: the target lies in another slice of the vocabulary; the token has none."""


def in_tiles(
    hidden: Float[Tensor, "*tokens width"], table: Float[Tensor, "vocab width"] | None, logits: bool, tile: int | None
) -> bool:
    """Whether a loss is made in tiles: no logits are asked for, and those of all tokens would be more than a tile's.

    Raises:
        ValueError: a tile is named where the logits are wanted, or are there already.
    """
    if tile is not None and (logits or table is None):
        why = "the logits of all tokens are asked for; pass logits=False" if logits else "the model gives logits itself"
        raise ValueError(f"loss: tiles of {tile} tokens, and {why}")
    if logits or table is None:
        return False
    return tile is not None or hidden.numel() // hidden.shape[-1] * table.shape[0] > TILE_ENTRIES


def _identity(x: Tensor) -> Tensor:
    return x


def tiled_losses(
    hidden: Float[Tensor, "*tokens width"],
    table: Float[Tensor, "vocab_local width"],
    targets: Int[Tensor, "*tokens"],
    *,
    tile: int | None = None,
    softcap: float | None = None,
    first: int | Tensor = 0,
    vocab: int | None = None,
    reduce_max: Callable[[Tensor], Tensor] = _identity,
    reduce_sum: Callable[[Tensor], Tensor] = _identity,
) -> Float[Tensor, "*tokens"]:
    """`fcp.loss.token_losses` of the capped logits hidden table^T, of which one tile's lie in memory at a time.

    Args:
        hidden: any floating dtype; the result is float32, or float64 for float64.
        table: the rows of the vocabulary that are held here.
        targets: token ids of the whole vocabulary, or IGNORED.
        tile: tokens in a tile; None for as many as make `TILE_ENTRIES` logits.
        softcap: each logit x becomes softcap * tanh(x / softcap).
        first: the token id of the first row held here.
        vocab: the tokens of the vocabulary, where the table has rows past it (which are padding); None for no such.
        reduce_max, reduce_sum: over the axis that splits the vocabulary.

    Raises:
        ValueError: when a second derivative is taken.
    """
    keep = targets != IGNORED
    column = targets - first
    column = torch.where((column >= 0) & (column < table.shape[0]), column, ELSEWHERE)
    column = torch.where(keep, column, NOWHERE)
    limit = None if vocab is None else torch.as_tensor(vocab - first, device=hidden.device).reshape(1)
    peak, total, picked = _TiledSums.apply(
        hidden.flatten(0, -2).unsqueeze(0), table.unsqueeze(0), column.reshape(1, -1), limit, _Spec(tile, softcap)
    )
    peak, total, picked = (x.reshape(targets.shape) for x in (peak, total, picked))
    top = reduce_max(peak)
    held = column >= 0
    total = total * torch.exp(peak - top)
    picked = torch.where(held, picked - top, 0.0)
    total, picked, held = reduce_sum(torch.stack([total, picked, held.to(total.dtype)])).unbind()
    losses = torch.where(held > 0, torch.log(total) - picked, torch.inf)
    return torch.where(keep, losses, 0.0)


# --- one tile ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """What is fixed: tokens in a tile (None: by size), and the soft cap."""

    tile: int | None
    softcap: float | None


def _tiles(hidden: Tensor, table: Tensor, spec: _Spec) -> Iterator[tuple[int, slice]]:
    """(group, rows) of every tile."""
    size = spec.tile or max(1, TILE_ENTRIES // table.shape[1])
    for group in range(hidden.shape[0]):
        for start in range(0, hidden.shape[1], size):
            yield group, slice(start, start + size)


def _scores(hidden: Tensor, table: Tensor, spec: _Spec) -> Tensor:
    """[rows, vocab]: the tile's capped logits, in the dtype that the plain loss has them in."""
    scores = hidden @ table.mT
    return scores if spec.softcap is None else scores.div_(spec.softcap).tanh_().mul_(spec.softcap)


def _padding(limit: Tensor, scores: Tensor) -> Tensor:
    """bool [vocab]: the columns that are no token."""
    return torch.arange(scores.shape[-1], device=scores.device) >= limit


def _at(limit: Tensor | None, group: int) -> Tensor | None:
    return None if limit is None else limit[group]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _finite(peak: Tensor) -> Tensor:
    """What may be subtracted: a slice that is padding alone has the peak -inf, and -inf less -inf is no number."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def _sums(
    hidden: Tensor, table: Tensor, column: Tensor, limit: Tensor | None, spec: _Spec
) -> tuple[Tensor, Tensor, Tensor]:
    peak, total, picked = (column.new_empty(column.shape, dtype=_wide(hidden)) for _ in range(3))
    for group, rows in _tiles(hidden, table, spec):
        found = _sums_of_tile(hidden[group, rows], table[group], column[group, rows], _at(limit, group), spec)
        peak[group, rows], total[group, rows], picked[group, rows] = found
    return peak, total, picked


def _sums_of_tile(
    hidden: Tensor, table: Tensor, column: Tensor, limit: Tensor | None, spec: _Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """A function of its own, so that a tile's logits are gone before the next one's are made."""
    scores = _scores(hidden, table, spec).to(_wide(hidden))
    if limit is not None:
        scores.masked_fill_(_padding(limit, scores), -math.inf)
    peak = torch.where(column == NOWHERE, 0.0, scores.amax(-1))
    picked = scores.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = scores.sub_(_finite(peak).unsqueeze(-1)).exp_().sum(-1)
    return peak, torch.where(column == NOWHERE, 1.0, total), torch.where(column >= 0, picked, 0.0)


def _add_gradient_of_tile(
    d_table: Tensor,
    g_total: Tensor,
    g_picked: Tensor,
    hidden: Tensor,
    table: Tensor,
    column: Tensor,
    limit: Tensor | None,
    peak: Tensor,
    spec: _Spec,
) -> Tensor:
    """The gradient of `hidden`; that of the table is added to `d_table`."""
    scores = _scores(hidden, table, spec)
    slope = None if spec.softcap is None else 1 - (scores / spec.softcap).square_()
    g = scores.to(_wide(hidden)).sub_(_finite(peak).unsqueeze(-1)).exp_().mul_(g_total.unsqueeze(-1))
    g_picked = torch.where(column >= 0, g_picked, 0.0)
    g.scatter_add_(-1, column.clamp(min=0).unsqueeze(-1), g_picked.unsqueeze(-1))
    g.masked_fill_((column == NOWHERE).unsqueeze(-1), 0.0)
    if limit is not None:
        g.masked_fill_(_padding(limit, g), 0.0)
    g = g.to(hidden.dtype)
    if slope is not None:
        g.mul_(slope)
    if d_table.dtype == g.dtype:
        d_table.addmm_(g.mT, hidden)
    else:
        d_table += g.mT @ hidden
    return g @ table


# --- the Function and its gradient ------------------------------------------------------------------------------------


class _TiledSums(Function):
    """(hidden [groups, rows, width], table [groups, vocab, width], column [groups, rows], limit [groups] or None, spec)
    -> (peak, sum exp(scores - peak), scores[column]), each [groups, rows]; `limit` counts the columns that are tokens.

    No gradient flows through the peak. A token without a target has (0, 1, 0), and no gradient.
    """

    @staticmethod
    def forward(
        hidden: Tensor, table: Tensor, column: Tensor, limit: Tensor | None, spec: _Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        return once("loss", _sums, hidden, table, column, limit, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.spec = inputs
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(*tensors, output[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor, g_total: Tensor, g_picked: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = unwrap_dead_wrappers(ctx.saved_tensors)
        return *_TiledGradient.apply(g_total, g_picked, *saved, ctx.spec), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        hidden, table, column, limit, spec = operands
        size = info.batch_size
        if in_dims[1] is not None or in_dims[3] is not None:
            folded = [_into_groups(x, dim, size) for x, dim in zip(operands[:-1], in_dims, strict=False)]
            found = _TiledSums.apply(*folded, spec)
            return tuple(x.unflatten(0, (size, -1)) for x in found), (0, 0, 0)
        rows = [
            x.unsqueeze(1).expand(-1, size, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
            for x, dim in ((hidden, in_dims[0]), (column, in_dims[2]))
        ]
        found = _TiledSums.apply(rows[0].flatten(1, 2), table, rows[1].flatten(1, 2), limit, spec)
        return tuple(x.unflatten(1, (size, -1)) for x in found), (1, 1, 1)


class _TiledGradient(Function):
    """(g_total, g_picked, hidden, table, column, limit, peak, spec) -> the gradients of hidden and table."""

    @staticmethod
    def forward(
        g_total: Tensor,
        g_picked: Tensor,
        hidden: Tensor,
        table: Tensor,
        column: Tensor,
        limit: Tensor | None,
        peak: Tensor,
        spec: _Spec,
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        d_table = table.new_zeros(table.shape, dtype=_wide(table))  # a sum over many tiles
        for group, rows in _tiles(hidden, table, spec):
            d_hidden[group, rows] = _add_gradient_of_tile(
                d_table[group],
                g_total[group, rows],
                g_picked[group, rows],
                hidden[group, rows],
                table[group],
                column[group, rows],
                _at(limit, group),
                peak[group, rows],
                spec,
            )
        return d_hidden, d_table.to(table.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(
            "loss: a second derivative through the loss in tiles, which has the first alone. The plain loss has every "
            "order: fcp.transform(..., logits=True), or Ops.loss with logits=True."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        *tensors, spec = operands  # a rank's own gradient of the table: ranks are groups
        folded = [_into_groups(x, dim, info.batch_size) for x, dim in zip(tensors, in_dims, strict=False)]
        found = _TiledGradient.apply(*folded, spec)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


def _into_groups(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

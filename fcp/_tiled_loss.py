"""The loss of each token from the hidden states, in tiles of tokens: the logits of all tokens never lie in memory.

Problem. With a vocabulary of 128,000 the logits of 8,192 tokens are 4 GB in float32, and their gradient another 4: more
than everything else of a small model's step.

Idea. The loss needs three numbers a token, not its logits: their maximum, the sum of exponentials, the target's logit.
Forward makes the logits of one tile, reads these off and drops them. Backward makes them again, turns them into their
gradient in place, and multiplies that with the table and the hidden states at once: one product of three more than the
plain loss has.

Where one process has the whole vocabulary, that product is spared (`tiled_total`). The sum of the losses has one
cotangent, a number, so while a tile's logits are there its gradient is made as for 1, and backward multiplies. That
needs the whole normaliser at once, which slices of a vocabulary do not have, and one cotangent, which simulated ranks
need not share; there, and where nothing is differentiated, the first way is gone.

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
import torch._C._functorch as _functorch
from jaxtyping import Float, Int
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from fcp._function import Function
from fcp._kept import once
from fcp.axes import batched
from fcp.typing import IGNORED

__all__ = ["TILE_ENTRIES", "in_tiles", "tiled_losses", "tiled_total"]

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


def tiled_total(
    hidden: Float[Tensor, "*tokens width"],
    table: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "*tokens"],
    *,
    tile: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, ""]:
    """The sum of `tiled_losses` over a whole vocabulary; the arguments are those.

    Raises:
        ValueError: when a second derivative is taken.
    """
    if any(batched(x) for x in (hidden, table, targets)) or not (_followed(hidden) or _followed(table)):
        return tiled_losses(hidden, table, targets, tile=tile, softcap=softcap).sum()
    beyond = targets >= table.shape[0]
    column = torch.where((targets == IGNORED) | beyond, NOWHERE, targets).reshape(1, -1)
    spec = _Spec(tile, softcap)
    total, _, _ = _TiledTotal.apply(hidden.flatten(0, -2).unsqueeze(0), table.unsqueeze(0), column, spec)
    return torch.where(beyond.any(), torch.inf, total)


def _followed(x: Tensor) -> bool:
    """Whether a derivative in `x` may be taken: by torch.func at any level, or by autograd."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return x.requires_grad and torch.is_grad_enabled()


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
        scores = _scores(hidden[group, rows], table[group], spec)
        found = _sums_of_tile(scores, column[group, rows], _at(limit, group))
        peak[group, rows], total[group, rows], picked[group, rows] = found
        del scores  # a tile's logits are gone before the next one's are made
    return peak, total, picked


def _sums_of_tile(scores: Tensor, column: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    wide = scores.to(_wide(scores))
    if limit is not None:
        wide = wide.masked_fill(_padding(limit, wide), -math.inf)
    peak = torch.where(column == NOWHERE, 0.0, wide.amax(-1))
    picked = wide.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = (wide - _finite(peak).unsqueeze(-1)).exp_().sum(-1)
    return peak, torch.where(column == NOWHERE, 1.0, total), torch.where(column >= 0, picked, 0.0)


def _gradient_of_tile(
    scores: Tensor,
    g_total: Tensor,
    g_picked: Tensor,
    column: Tensor,
    limit: Tensor | None,
    peak: Tensor,
    spec: _Spec,
) -> Tensor:
    """The gradient of the logits before their cap, in their place where that can be."""
    slope = None if spec.softcap is None else 1 - (scores / spec.softcap).square_()
    g = scores.to(_wide(scores)).sub_(_finite(peak).unsqueeze(-1)).exp_().mul_(g_total.unsqueeze(-1))
    g_picked = torch.where(column >= 0, g_picked, 0.0)
    g.scatter_add_(-1, column.clamp(min=0).unsqueeze(-1), g_picked.unsqueeze(-1))
    g.masked_fill_((column == NOWHERE).unsqueeze(-1), 0.0)
    if limit is not None:
        g.masked_fill_(_padding(limit, g), 0.0)
    g = g.to(scores.dtype)
    return g if slope is None else g.mul_(slope)


def _to_operands(g: Tensor, hidden: Tensor, table: Tensor, d_table: Tensor) -> Tensor:
    """The gradient of a tile's `hidden`; that of the table is added to `d_table`."""
    if d_table.dtype == g.dtype:
        d_table.addmm_(g.mT, hidden)
    else:
        d_table += g.mT @ hidden
    return g @ table


# --- the Function and its gradient ------------------------------------------------------------------------------------


_FIRST_ONLY = (
    "loss: a second derivative through the loss in tiles, which has the first alone. The plain loss has every order: "
    "fcp.transform(..., logits=True), or Ops.loss with logits=True."
)


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
            scores = _scores(hidden[group, rows], table[group], spec)
            g = _gradient_of_tile(
                scores,
                g_total[group, rows],
                g_picked[group, rows],
                column[group, rows],
                _at(limit, group),
                peak[group, rows],
                spec,
            )
            d_hidden[group, rows] = _to_operands(g, hidden[group, rows], table[group], d_table[group])
            del scores, g
        return d_hidden, d_table.to(table.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(_FIRST_ONLY)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        *tensors, spec = operands  # a rank's own gradient of the table: ranks are groups
        folded = [_into_groups(x, dim, info.batch_size) for x, dim in zip(tensors, in_dims, strict=False)]
        found = _TiledGradient.apply(*folded, spec)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


class _TiledTotal(Function):
    """(hidden [1, rows, width], table [1, vocab, width], column [1, rows], spec) -> (the sum of the losses, and its
    gradients of hidden and table, which are only kept for backward)."""

    @staticmethod
    def forward(hidden: Tensor, table: Tensor, column: Tensor, spec: _Spec) -> tuple[Tensor, Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        d_table = table.new_zeros(table.shape, dtype=_wide(table))
        losses = column.new_empty(column.shape, dtype=_wide(hidden))
        for group, rows in _tiles(hidden, table, spec):
            here = column[group, rows]
            scores = _scores(hidden[group, rows], table[group], spec)
            peak, total, picked = _sums_of_tile(scores, here, None)
            losses[group, rows] = torch.where(here == NOWHERE, 0.0, torch.log(total) + peak - picked)
            g = _gradient_of_tile(scores, 1 / total, -torch.ones_like(total), here, None, peak, spec)
            d_hidden[group, rows] = _to_operands(g, hidden[group, rows], table[group], d_table[group])
            del scores, g
        return losses.sum(), d_hidden, d_table.to(table.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, table, *_ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(hidden, table, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return *_Scaled.apply(g, *unwrap_dead_wrappers(ctx.saved_tensors)), None, None


class _Scaled(Function):
    """(g, hidden, table, d_hidden, d_table) -> (g d_hidden, g d_table); of the first two only whether they are followed
    counts, so that a second derivative is noticed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, hidden: Tensor, table: Tensor, d_hidden: Tensor, d_table: Tensor) -> tuple[Tensor, Tensor]:
        return (d_hidden * g).to(d_hidden.dtype), (d_table * g).to(d_table.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(_FIRST_ONLY)


def _into_groups(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

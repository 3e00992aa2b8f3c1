"""The order in which ranks hold a sequence: whose slice a token is in, so that every rank has as much attention to do.

Problem. Under a causal mask a later token sees more keys. Ranks that keep their own queries (`ring`, `gather`) and hold
the sequence in order wait for the last one, which has almost twice the mean work. On packed rows it depends on where
the documents lie.

Idea. An order is a permutation of each row's tokens, of which rank r then takes the r-th equal slice. "zigzag" cuts a
row into two pieces a rank and gives rank r the r-th from the front and the r-th from the back (Brandon et al. 2023,
section 3.2, interleave single tokens to the same end; pieces keep the kernel's tiles whole). "balanced" looks at the
documents: it counts the keys that each block of tokens sees, and deals the blocks out from the heaviest to the
lightest, to the ranks in turn, back and forth.

The mask's description carries the order along (`Mask.rows`), and everything else is gathered by it.

Left out: windows and chunks, which differ between layers. Under them work is nearly even in any order, and it is
"contiguous" that lets a ring send least.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from fcp.masks import Mask, first_keys

__all__ = ["LAYOUTS", "check_layout", "multiple_of", "order_of"]

LAYOUTS = ("contiguous", "zigzag", "balanced")

BLOCKS = 16
"""Blocks a rank is dealt: enough to come out even, few enough that a block is a tile of its own."""


def check_layout(user: str, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{user}: layout={layout!r}; it is one of {', '.join(LAYOUTS)}")


def multiple_of(layout: str, seq: int, size: int) -> int:
    """What a sequence's length must be a multiple of, so that `size` ranks can hold it so."""
    if size == 1:
        return 1
    return {"contiguous": size, "zigzag": 2 * size, "balanced": size * _block(seq, size)}[layout]


def _block(seq: int, size: int) -> int:
    return max(1, seq // (size * BLOCKS))


def order_of(layout: str, mask: Mask, size: int, block: int) -> Int[Tensor, "batch seq"] | None:
    """For each place in the order in which `size` ranks hold a row, which token it holds; None for the row's own order.

    Args:
        layout: one of `LAYOUTS`.
        mask: the description of whole rows, in order, of a length that is a multiple of `multiple_of`.
        size: the number of ranks.
        block: that multiple over `size`: the tokens that stay together.
    """
    if layout == "contiguous" or size == 1:
        return None
    device = mask.positions.device
    if layout == "zigzag":
        ranks = torch.arange(size, device=device)
        pieces = torch.stack([ranks, 2 * size - 1 - ranks], 1).flatten().expand(mask.positions.shape[0], -1)
        return _tokens(pieces, mask.seq // (2 * size))
    # Heaviest first, and dealt as 0 1 2 .. n n .. 2 1 0 0 1 2 ..
    work = count_keys(mask).unflatten(1, (-1, block)).sum(-1)
    turn = work.sort(dim=1, descending=True, stable=True).indices.argsort(1) % (2 * size)
    rank = torch.minimum(turn, 2 * size - 1 - turn)
    number = torch.arange(work.shape[1], device=device)
    return _tokens((rank * work.shape[1] + number).argsort(1), block)


def _tokens(blocks: Int[Tensor, "batch n"], size: int) -> Int[Tensor, "batch seq"]:
    own = torch.arange(size, device=blocks.device)
    return (blocks.unsqueeze(-1) * size + own).flatten(1)


def count_keys(mask: Mask) -> Int[Tensor, "batch seq"]:
    """How many keys each query sees (at most, where ids of documents come back), windows and chunks left out."""
    valid = torch.ones_like(mask.positions) if mask.valid is None else mask.valid.to(torch.int64)
    upto = valid.cumsum(1)
    return upto - upto.gather(1, first_keys(mask)) + valid.gather(1, first_keys(mask))

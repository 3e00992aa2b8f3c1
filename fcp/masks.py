"""Masks: who may see whom, as a small description, and as booleans where somebody needs them.

Problem. A dense mask built for a slice is where packing, padding and windows go wrong: built from local positions it
restarts documents at shard edges; built once it costs a square of the sequence.

Idea. A description (`Mask`) holds one position, one document and one validity a token of the whole sequence, and
nothing else. The mask is a pure function of it, on any slice of queries and keys:

    allowed(q, k) = same document  and  k valid  and  k <= q in row order
                    and  position_q - position_k < window       (window: the number of keys, the query itself included)
                    and  position_q // chunk == position_k // chunk

Documents are explicit, or start wherever a position is not the previous one plus one. They come from the whole
sequence, never from a slice. `describe` looks at the values once and drops what says nothing (all valid, one document),
so that a plain causal description is recognised as such and materialises to None.

Left out: a mask that these words cannot say (bidirectional, an arbitrary 4-D mask). Those are refused by `prepare`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fcp import pytree

__all__ = ["Mask", "count_pairs", "describe", "materialize"]


@pytree.node("consecutive")
@dataclass(frozen=True)
class Mask:
    """The description of a causal mask over whole rows; make it with `describe`.

    Attributes:
        positions: [batch, seq], int64.
        documents: [batch, seq], int64, or None where every row is one document.
        valid: [batch, seq], bool, or None where every token is valid.
        consecutive: whether positions rise by one inside each document (then a window at least as long as the row
            says nothing).
    """

    positions: Int[Tensor, "batch seq"]
    documents: Int[Tensor, "batch seq"] | None
    valid: Bool[Tensor, "batch seq"] | None
    consecutive: bool

    @property
    def seq(self) -> int:
        return self.positions.shape[-1]

    @property
    def plain(self) -> bool:
        """Whether this is the plain causal mask: one document a row, every token valid."""
        return self.documents is None and self.valid is None


def describe(
    positions: Int[Tensor, "*batch seq"],
    *,
    documents: Int[Tensor, "*batch seq"] | None = None,
    valid: Bool[Tensor, "*batch seq"] | None = None,
) -> Mask:
    """The description of the mask of whole rows.

    Args:
        positions: [batch, seq] (or [seq], one row), the position id of each token.
        documents: the document id of each token; tokens see each other only inside one. None: a document starts
            wherever a position is not the previous one plus one.
        valid: False for padding, which no query sees. None: all valid.

    Raises:
        ValueError: the shapes differ.

    >>> import fcp, torch
    >>> mask = fcp.masks.describe(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
    >>> mask.documents
    tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    >>> fcp.masks.count_pairs(mask), fcp.masks.count_pairs(mask, window=3)
    (21, 18)
    """
    given = {"positions": positions, "documents": documents, "valid": valid}
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    if len(set(shapes.values())) > 1 or positions.dim() not in (1, 2):
        raise ValueError(f"masks.describe: {shapes}: all must be [batch, seq], of one shape")
    positions = positions.to(torch.int64).reshape(-1, positions.shape[-1])
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if documents is None:
        documents, consecutive = starts.cumsum(-1) - 1, True
    else:
        documents = documents.to(torch.int64).reshape(positions.shape)
        inside = documents[:, 1:] == documents[:, :-1]
        consecutive = not bool((inside & starts[:, 1:]).any()) and not _come_back(documents)
    if valid is not None:
        valid = valid.bool().reshape(positions.shape)
    return Mask(
        positions,
        documents if bool((documents != documents[:, :1]).any()) else None,
        None if valid is None or bool(valid.all()) else valid,
        consecutive,
    )


def _come_back(documents: Int[Tensor, "batch seq"]) -> bool:
    """Whether an id comes back in its row after another one: sorting the row then leaves fewer changes of id."""

    def changes(ids: Tensor) -> Tensor:
        return (ids[:, 1:] != ids[:, :-1]).sum(-1)

    return bool((changes(documents) != changes(documents.sort(-1).values)).any())


def materialize(
    mask: Mask,
    q_slice: slice = slice(None),
    k_slice: slice = slice(None),
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Bool[Tensor, "batch 1 q k"] | None:
    """allowed(q, k) for a slice of queries and a slice of keys.

    Args:
        mask: the description of the whole sequence.
        q_slice, k_slice: which rows and columns, in row order.
        window: sliding window, the number of keys a query sees, itself included.
        chunk: chunked attention, the length of a chunk.

    Returns:
        bool [batch, 1, q, k]; None where the slices are the same and the mask on them is plain causal.

    Raises:
        ValueError: window or chunk below 1.
    """
    for name, value in (("window", window), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ValueError(f"masks.materialize: {name}={value} must be 1 or more (None for no {name})")
    if window is not None and mask.consecutive and window >= mask.seq:
        window = None
    rows = torch.arange(mask.seq, device=mask.positions.device)
    q_rows, k_rows = rows[q_slice], rows[k_slice]
    if mask.plain and window is None and chunk is None and q_slice.indices(mask.seq) == k_slice.indices(mask.seq):
        return None
    q_positions = mask.positions[:, q_slice, None]
    k_positions = mask.positions[:, None, k_slice]
    allowed = (k_rows[None, :] <= q_rows[:, None])[None]
    if mask.documents is not None:
        allowed = allowed & (mask.documents[:, q_slice, None] == mask.documents[:, None, k_slice])
    if mask.valid is not None:
        allowed = allowed & mask.valid[:, None, k_slice]
    if window is not None:
        allowed = allowed & (q_positions - k_positions < window)
    if chunk is not None:
        same = torch.div(q_positions, chunk, rounding_mode="floor") == torch.div(
            k_positions, chunk, rounding_mode="floor"
        )
        allowed = allowed & same
    return allowed.expand(mask.positions.shape[0], -1, -1)[:, None]


def count_pairs(mask: Mask, *, window: int | None = None, chunk: int | None = None) -> int:
    """The number of allowed (query, key) pairs, over all rows."""
    allowed = materialize(mask, window=window, chunk=chunk)
    if allowed is None:
        batch, seq = mask.positions.shape
        return batch * seq * (seq + 1) // 2
    return int(allowed.sum())

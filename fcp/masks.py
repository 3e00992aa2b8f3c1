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

Ranks may hold the sequence in another order than its rows', and a rank meets the queries of one part with the keys of
another. `take` gives the description of some of the tokens, in any order; each keeps its `rows`, the place in the whole
sequence by which causality is decided. `against` says whose keys the queries meet.

Left out: a mask that these words cannot say (bidirectional, an arbitrary 4-D mask). Those are refused by `prepare`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fcp import pytree

__all__ = ["Mask", "count_pairs", "describe", "first_keys", "materialize", "rows_of"]


@pytree.node("consecutive")
@dataclass(frozen=True)
class Mask:
    """The description of a causal mask over whole rows; make it with `describe`.

    Attributes:
        positions: [batch, seq], int64.
        documents: [batch, seq], int64, or None where every row is one document.
        valid: [batch, seq], bool, or None where every token is valid.
        consecutive: whether positions rise by one inside each document of the whole rows (then a window at least as
            long as the row says nothing).
        rows: [batch, seq], int64, where in the whole row each token is; None where they are all there, in order.
        keys: the description of the keys, where they are other tokens than the queries; itself without keys.
    """

    positions: Int[Tensor, "batch seq"]
    documents: Int[Tensor, "batch seq"] | None
    valid: Bool[Tensor, "batch seq"] | None
    consecutive: bool
    rows: Int[Tensor, "batch seq"] | None = None
    keys: "Mask | None" = None

    @property
    def seq(self) -> int:
        """The number of queries."""
        return self.positions.shape[-1]

    @property
    def plain(self) -> bool:
        """Whether this is the plain causal mask: one document a row, every token valid, whole rows in order."""
        return self.documents is None and self.valid is None and self.whole

    @property
    def whole(self) -> bool:
        """Whether queries and keys are the same whole rows, in order."""
        return self.rows is None and self.keys is None

    def narrowed(self, window: int | None) -> int | None:
        """The window; None where it says nothing, because no row is longer."""
        if window is not None and self.consecutive and self.whole and window >= self.seq:
            return None
        return window

    def take(self, at: Int[Tensor, "*batch n"]) -> "Mask":
        """The description of the tokens `at` (of each row, or of all rows alike), in that order."""
        at = at.expand(self.positions.shape[0], -1)

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.gather(1, at)

        return Mask(
            self.positions.gather(1, at),
            pick(self.documents),
            pick(self.valid),
            self.consecutive,
            at if self.rows is None else self.rows.gather(1, at),
        )

    def against(self, keys: "Mask") -> "Mask":
        """These queries, with the keys of another description of the same rows."""
        return replace(self, keys=keys)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What it holds, as operands of a Function: four tensors of the queries, four of the keys; see `of`."""
        own = (self.positions, self.documents, self.valid, self.rows)
        return (*own, *((None,) * 4 if self.keys is None else self.keys.tensors()[:4]))

    @classmethod
    def of(cls, tensors: Sequence[Any], consecutive: bool) -> "Mask":
        """The description whose `tensors` these are."""
        positions, documents, valid, rows, *others = tensors
        keys = None if others[0] is None else cls.of((*others, *(None,) * 4), consecutive)
        return cls(positions, documents, valid, consecutive, rows, keys)

    def in_order(self) -> "Mask":
        """The description of whole rows that are held in another order, in their own."""
        return self if self.rows is None else replace(self.take(self.rows.argsort(-1)), rows=None)


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
        mask: the description of the whole sequence, or of the queries and keys of a part.
        q_slice, k_slice: which queries and keys, as the description has them.
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
    window = mask.narrowed(window)
    if mask.plain and window is None and chunk is None and q_slice.indices(mask.seq) == k_slice.indices(mask.seq):
        return None
    keys = mask if mask.keys is None else mask.keys
    allowed = rows_of(keys)[:, None, k_slice] <= rows_of(mask)[:, q_slice, None]
    q_positions = mask.positions[:, q_slice, None]
    k_positions = keys.positions[:, None, k_slice]
    if mask.documents is not None and keys.documents is not None:
        allowed = allowed & (mask.documents[:, q_slice, None] == keys.documents[:, None, k_slice])
    if keys.valid is not None:
        allowed = allowed & keys.valid[:, None, k_slice]
    if window is not None:
        allowed = allowed & (q_positions - k_positions < window)
    if chunk is not None:
        same = torch.div(q_positions, chunk, rounding_mode="floor") == torch.div(
            k_positions, chunk, rounding_mode="floor"
        )
        allowed = allowed & same
    return allowed.expand(mask.positions.shape[0], -1, -1)[:, None]


def rows_of(mask: Mask) -> Int[Tensor, "batch seq"]:
    """[batch, seq], or [1, seq] where all rows are alike."""
    return torch.arange(mask.seq, device=mask.positions.device)[None] if mask.rows is None else mask.rows


def first_keys(mask: Mask, *, window: int | None = None, chunk: int | None = None) -> Int[Tensor, "batch seq"]:
    """The first key that each query may see, as a place in the row; the last is the query itself.

    What lies between may still be padding, or of another document where ids come back; then the first place says no
    more than that nothing before it is seen.

    Args:
        mask: of whole rows, in order.
    """
    own = torch.arange(mask.seq, device=mask.positions.device).expand_as(mask.positions)
    if not mask.consecutive:
        return torch.zeros_like(own)
    first = torch.zeros_like(own)
    if mask.documents is not None:
        changes = torch.cat([first[:, :1], own[:, 1:] * (mask.documents[:, 1:] != mask.documents[:, :-1])], 1)
        first = changes.cummax(1).values
    if window is not None:
        first = torch.maximum(first, own - window + 1)
    if chunk is not None:
        first = torch.maximum(first, own - torch.remainder(mask.positions, chunk))
    return first


def count_pairs(mask: Mask, *, window: int | None = None, chunk: int | None = None) -> int:
    """The number of allowed (query, key) pairs, over all rows."""
    allowed = materialize(mask, window=window, chunk=chunk)
    if allowed is None:
        batch, seq = mask.positions.shape
        return batch * seq * (seq + 1) // 2
    return int(allowed.sum())

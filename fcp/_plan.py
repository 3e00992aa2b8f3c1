"""The tiles of an attention mask: which rectangles of queries and keys have to be computed, found before any number is.

Problem. A mask of packed documents, windows or padding is mostly empty, and a dense one costs as if it were full: in
time, and in memory that grows with the square of the sequence.

Idea. Each row of the batch falls into *runs* of tokens that are alike: of one document and one chunk, valid or not,
their positions rising by one. What the queries of one run see of another is a rectangle: nothing, all of it, the causal
triangle, or a band of it where a window says so. A long band is cut into blocks of queries. Rectangles of the same
shape and mask, wherever they lie, are one group, and one call of a kernel; a small mask is made only for those that are
cut by a diagonal.

Masks that fall into very many runs (every other token padding, say) are planned as blocks of queries with all keys
before their end, and the mask of that block alone. So no [seq, seq] tensor is ever made.

The queries may be some of the sequence's tokens and the keys others, in any order (`Mask.rows`, `Mask.keys`): a run
is then tokens that are held side by side and are side by side in their row, and rows say which run comes first.

A plan is found once for a mask and kept while the mask lives (`_per_mask.py`): the layers of a model share it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fcp._per_mask import PerMask
from fcp.masks import Mask

__all__ = ["Group", "Run", "plan_of", "runs_of"]

BLOCK = 256
"""Queries in a block of a band (half the window where that is more), and of a mask that falls into too many runs."""


Place = tuple[int, int, int]
"""Where a rectangle is: its row, its first query and its first key."""


@dataclass(frozen=True)
class Group:
    """Rectangles of one shape and one mask: the same call for all.

    Attributes:
        places: where each is. Several of one row follow each other at equal steps, or those of all rows are alike, or
            they lie anywhere.
        queries, keys: the size of each.
        causal: whether it is the plain causal triangle.
        diagonal: where not None, only keys with `i - j + diagonal >= 0` are seen (it is first query - first key).
        band: where not None, only keys with `i - j + band[0] < band[1]` are seen.
        blocks: where True, the mask is that of the description on these queries and keys, of the whole batch.
        shared: whether another rectangle has some of the same queries, so that what they find is merged.
    """

    places: tuple[Place, ...]
    queries: int
    keys: int
    causal: bool = False
    diagonal: int | None = None
    band: tuple[int, int] | None = None
    blocks: bool = False
    shared: bool = False

    @cached_property
    def steps(self) -> tuple[int, int] | None:
        """From one rectangle's queries and keys to the next one's, in a series of one row; None where it is none."""
        if len(self.places) < 2 or len({place[0] for place in self.places}) > 1:
            return None
        return _step(self.places)

    def allowed(self, device: torch.device) -> Tensor | None:
        """bool [queries, keys]; None where all are seen, or `causal` says it."""
        if self.causal or (self.diagonal is None and self.band is None):
            return None
        i = torch.arange(self.queries, device=device)[:, None]
        j = torch.arange(self.keys, device=device)[None, :]
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool, device=device)
        if self.diagonal is not None:
            seen = seen & (i - j + self.diagonal >= 0)
        if self.band is not None:
            seen = seen & (i - j + self.band[0] < self.band[1])
        return seen


_plans: PerMask[tuple[Group, ...]] = PerMask(512)  # those of a step's rings, of several windows


def plan_of(mask: Mask, window: int | None, chunk: int | None) -> tuple[Group, ...]:
    """The groups of a mask's rectangles; queries that are in none see nothing."""
    return _plans.get(mask, (window, chunk), lambda: _find(mask, window, chunk))


def _find(mask: Mask, window: int | None, chunk: int | None) -> tuple[Group, ...]:
    window = mask.narrowed(window)
    batch, seq = mask.positions.shape
    if mask.plain and window is None and chunk is None:
        return (Group(tuple((row, 0, 0) for row in range(batch)), seq, seq, causal=True),)
    found: dict[Group, list[Place]] = defaultdict(list)
    cover = np.zeros((batch, seq), dtype=np.int32)
    count, most = 0, 64 + batch * seq // 32
    for row in range(batch):
        queries = runs_of(mask, row, window, chunk)
        runs = queries if mask.keys is None else runs_of(mask.keys, row, window, chunk)
        before: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for key in runs:
            if key.valid:
                before[key.kind].append(key)
        for query in queries:
            for key in before.get(query.kind, ()):
                for place, shape in _rectangles(query, key, window):
                    found[shape].append((row, *place))
                    cover[row, place[0] : place[0] + shape.queries] += 1
                    count += 1
                    if count > most:
                        return _blocks(mask)
    groups = []
    for shape, places in found.items():
        for shared in (False, True):
            here = [p for p in places if bool((cover[p[0], p[1] : p[1] + shape.queries] > 1).any()) is shared]
            groups += [replace(shape, places=each, shared=shared) for each in _series(here)]
    return tuple(groups)


def _step(places: Sequence[Place]) -> tuple[int, int] | None:
    """From each place's queries and keys to the next one's, where that is the same for all."""
    steps = {(b[1] - a[1], b[2] - a[2]) for a, b in pairwise(places)}
    return steps.pop() if len(steps) == 1 else None


def _series(places: list[Place]) -> list[tuple[Place, ...]]:
    """Those of one row that follow each other at equal steps, a series a row; and all that are left."""
    by_row: dict[int, list[Place]] = defaultdict(list)
    for place in places:
        by_row[place[0]].append(place)
    found, rest = [], []
    for held in by_row.values():
        if _step(held) is not None:
            found.append(tuple(held))
        else:
            rest += held
    return found + ([tuple(rest)] if rest else [])


@dataclass(frozen=True)
class Run:
    """Tokens first..end as they are held, and from `row` on in their row, that are alike: `kind` is their document and
    chunk, `position` that of the first."""

    first: int
    end: int
    row: int
    position: int
    kind: tuple[int, int]
    valid: bool

    @property
    def size(self) -> int:
        return self.end - self.first


def runs_of(mask: Mask, row: int, window: int | None, chunk: int | None) -> list[Run]:
    """The runs of one row, in order; their positions rise by one where a window looks at them."""
    positions = mask.positions[row]
    kinds = torch.zeros_like(positions) if mask.documents is None else mask.documents[row]
    chunks = torch.zeros_like(positions) if chunk is None else torch.div(positions, chunk, rounding_mode="floor")
    valid = torch.ones_like(positions, dtype=torch.bool) if mask.valid is None else mask.valid[row]
    rows = torch.arange(mask.seq, device=positions.device) if mask.rows is None else mask.rows[row]
    starts = torch.ones_like(valid)
    starts[1:] = (kinds[1:] != kinds[:-1]) | (chunks[1:] != chunks[:-1]) | (valid[1:] != valid[:-1])
    if mask.rows is not None:
        starts[1:] |= rows[1:] != rows[:-1] + 1
    if window is not None:
        starts[1:] |= positions[1:] != positions[:-1] + 1
    first = starts.nonzero()[:, 0]
    ends = [*first[1:].tolist(), len(positions)]
    columns = (x[first].tolist() for x in (rows, positions, kinds, chunks, valid))
    return [
        Run(begin, end, at, position, (kind, part), real)
        for begin, end, at, position, kind, part, real in zip(first.tolist(), ends, *columns, strict=True)
    ]


def _rectangles(query: Run, key: Run, window: int | None) -> list[tuple[tuple[int, int], Group]]:
    """((first query, first key), shape) of what one run's queries see of another's keys."""
    below = key.row - query.row  # query i sees key j where j + below <= i
    begin, end = max(below, 0), query.size  # the queries that see any
    step = query.size
    ahead = query.position - key.position  # of the first query's position, against the first key's
    if window is not None:
        end, step = min(end, key.size - 1 + window - ahead), max(BLOCK, window // 2)
    found = []
    for start in range(begin, end, step):
        stop = min(start + step, end)
        first = 0 if window is None else max(0, start + ahead - window + 1)  # the first key that the first query sees
        last = min(key.size, stop - below)
        if first >= last:
            continue
        diagonal = start - below - first  # the last key that the first query sees, of these keys
        apart = start + ahead - first  # of the first query's and the first key's positions
        band = None if window is None or apart + stop - start - 1 < window else (apart, window)
        shape = _shape(stop - start, last - first, diagonal if diagonal < last - first - 1 else None, band)
        found.append(((query.first + start, key.first + first), shape))
    return found


def _shape(queries: int, keys: int, diagonal: int | None, band: tuple[int, int] | None = None) -> Group:
    causal = queries == keys and diagonal == 0 and band is None
    return Group((), queries, keys, causal, None if causal else diagonal, band)


def _blocks(mask: Mask) -> tuple[Group, ...]:
    """Blocks of queries, each with all keys before its end."""
    keys = mask.seq if mask.keys is None else mask.keys.seq
    return tuple(
        Group(
            ((0, begin, 0),),
            min(BLOCK, mask.seq - begin),
            min(begin + BLOCK, mask.seq) if mask.whole else keys,
            blocks=True,
        )
        for begin in range(0, mask.seq, BLOCK)
    )

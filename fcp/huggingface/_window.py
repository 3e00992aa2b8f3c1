"""The window or chunk that a mask function of transformers means, found by asking it.

A layer's mask reaches its attention as a function of indices, `allowed(batch, head, query, key)`, composed of closures.
What it means in fcp's words is read off the function itself: not off the configuration, whose names differ from family
to family and which may say one thing and build another. Being a function of indices, it may be asked about any row,
far past the end of the batch.

For one far query the keys that it sees end somewhere back. If they end at the same distance for its neighbour, that is
a window; if not, a chunk. Then the words are held against the function on rows near the start, around every edge and
far out; one that says something else (keys ahead, a prefix, blocks that see each other) is refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["words_of"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]

FAR = 1 << 40
"""A row index past every window and chunk; a window that reaches this far says nothing."""


def words_of(allowed: MaskFunction) -> tuple[int | None, int | None]:
    """(window, chunk) such that the function is fcp's causal mask with them.

    Raises:
        ValueError: no window and no chunk give this function.
    """
    reach = _reach(allowed, FAR)
    window = chunk = None
    if reach is not None and _reach(allowed, FAR + 1) == reach:
        window = reach
    elif reach is not None:  # from the first key of FAR's chunk to the first query that does not see it
        chunk = _lifetime(allowed, FAR + 1 - reach)
    if not _agree(allowed, window, chunk):
        raise ValueError(
            f"a mask that is not causal with a window or a chunk (nearest: window={window}, chunk={chunk}), which is "
            f"what fcp's masks can say"
        )
    return window, chunk


def _ask(allowed: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    answer = torch.as_tensor(allowed(zero, zero, queries, keys), dtype=torch.bool)
    return answer.expand(torch.broadcast_shapes(queries.shape, keys.shape))


def _reach(allowed: MaskFunction, query: int) -> int | None:
    """The number of keys that `query` sees, itself included; None where it sees all of them."""
    return _first_false(lambda back: _ask(allowed, torch.tensor(query), query - back), query)


def _lifetime(allowed: MaskFunction, key: int) -> int | None:
    """The number of queries, from `key` on, that see `key`."""
    return _first_false(lambda ahead: _ask(allowed, key + ahead, torch.tensor(key)), FAR)


def _first_false(holds: Callable[[Tensor], Tensor], end: int) -> int | None:
    """The first number up to `end` for which `holds` fails (None: none does), if it fails from there on."""
    low, high = -1, end + 1  # holds at low, fails at high
    steps = torch.tensor([0, *(1 << i for i in range(end.bit_length())), end]).unique()
    while high - low > 1:
        answers = holds(steps)
        wrong = steps[~answers]
        high = int(wrong[0]) if len(wrong) else high
        right = steps[steps < high]
        low = int(right[-1]) if len(right) else low
        if low == end:
            return None
        count = min(64, high - low - 1)
        steps = torch.unique(torch.tensor([low + (high - low) * (i + 1) // (count + 1) for i in range(count)]))
        steps = steps[(steps > low) & (steps < high)]
    return high


@cache
def _grid(window: int | None, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Queries [n, 1] and keys [1, n] near the start, far out and around every edge."""
    edges = [edge for edge in (window, chunk) if edge is not None]
    places = {0, 64, 4096, FAR, *edges, *(2 * edge for edge in edges), *(FAR - edge for edge in edges)}
    places |= set() if chunk is None else {FAR // chunk * chunk}
    near = torch.tensor(sorted({place + step for place in places for step in range(-7, 8) if place + step >= 0}))
    return near[:, None], near[None, :]


def _agree(allowed: MaskFunction, window: int | None, chunk: int | None) -> bool:
    if 0 in (window, chunk):
        return False
    queries, keys = _grid(window, chunk)
    expected = keys <= queries
    if window is not None:
        expected = expected & (queries - keys < window)
    if chunk is not None:
        expected = expected & (queries // chunk == keys // chunk)
    return torch.equal(_ask(allowed, queries, keys), expected)

"""What a ring has to send: which rank's queries see any of which rank's keys, before any number is computed.

In a ring each block of keys goes from rank to rank, and every rank meets every block. Under a mask of documents or
windows most of these meetings are empty. A block is sent only as far as the last rank that sees any of it, and a turn
of the ring that no rank needs is left out.

The ranks of a process group must agree on what is sent. So the schedule is found from the description of the whole
sequence alone, which all of them hold, for all rows of the batch together: one list of sends for all. In the simulator
the batch's rows may be spread over the ranks of another axis; then it is the list for all of theirs.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fcp.axes import bare_ranks
from fcp.masks import Mask, first_keys

__all__ = ["Perm", "Schedule", "schedule_of"]

Perm = list[tuple[int, int]]


@dataclass(frozen=True)
class Schedule:
    """Who needs whose keys, on a ring of `size` ranks: at turn t, rank r is where the keys of rank r - t are.

    Attributes:
        needs: for each rank, those whose keys it sees any of; itself always.
        last: for each rank, the last turn at which its keys are needed.
    """

    needs: tuple[frozenset[int], ...]
    last: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.needs)

    @property
    def turns(self) -> int:
        """The number of turns, that of each rank with its own keys (0) left out."""
        return max(self.last)

    def busy(self, turn: int) -> bool:
        """Whether any rank sees what it is given at this turn."""
        return any((rank - turn) % self.size in self.needs[rank] for rank in range(self.size))

    def onward(self, turn: int) -> Perm:
        """Who sends to whom so that each block is where `turn` wants it, from where it was a turn before."""
        return [
            ((source + turn - 1) % self.size, (source + turn) % self.size)
            for source in range(self.size)
            if self.last[source] >= turn
        ]

    def home(self, turn: int) -> Perm:
        """Who sends what it has added up for a block that ends its way at `turn` to the block's owner."""
        return [
            ((source + turn) % self.size, source) for source in range(self.size) if self.last[source] == turn and turn
        ]


_kept: OrderedDict[bytes, Schedule] = OrderedDict()
KEPT = 64


def schedule_of(mask: Mask, size: int, window: int | None, chunk: int | None) -> Schedule:
    """The schedule of a ring of `size` ranks, rank r with the r-th of equal slices of the tokens that `mask` describes.

    It is found once for the same numbers: the layers of a step share it.
    """
    parts = (mask.positions, mask.documents, mask.valid, mask.rows)
    # Stacked, they share their rank dims.
    stacked = torch.stack([torch.zeros_like(mask.positions) if x is None else x.to(torch.int64) for x in parts])
    with temporarily_clear_interpreter_stack():
        found = bare_ranks(stacked).movedim(-3, 0).flatten(1, -2)
        documents, valid, rows = (None if given is None else x for x, given in zip(found[1:], parts[1:], strict=True))
        whole = Mask(found[0], documents, None if valid is None else valid.bool(), mask.consecutive, rows)
        told = (size, window, chunk, whole.consecutive, tuple(found.shape), [x is None for x in parts])
        key = hashlib.blake2b(repr(told).encode() + found.numpy(force=True).tobytes()).digest()
        schedule = _kept.pop(key, None) or _find(whole, size, window, chunk)
    _kept[key] = schedule  # the last used is the last to go
    if len(_kept) > KEPT:
        _kept.popitem(last=False)
    return schedule


def _find(mask: Mask, size: int, window: int | None, chunk: int | None) -> Schedule:
    local = mask.seq // size
    held = torch.arange(mask.seq, device=mask.positions.device).expand_as(mask.positions) // local
    order = None if mask.rows is None else mask.rows.argsort(-1)
    holder = held if order is None else held.gather(1, order)  # of each place in the row
    whole = mask.in_order()
    first = first_keys(whole, window=window, chunk=chunk)
    needs = [{rank} for rank in range(size)]
    for source in range(size):
        here = holder == source
        if whole.valid is not None:
            here = here & whole.valid
        before = torch.nn.functional.pad(here.cumsum(-1), (1, 0))
        seen = before[:, 1:] > before.gather(1, first)
        for rank in range(size):
            if rank != source and bool((seen & (holder == rank)).any()):
                needs[rank].add(source)
    last = tuple(
        max((turn for turn in range(size) if source in needs[(source + turn) % size]), default=0)
        for source in range(size)
    )
    return Schedule(tuple(frozenset(each) for each in needs), last)

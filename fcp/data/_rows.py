"""Rows of documents and their order: a pure pair over a position that is one number.

Row i of a run is the row that the order of its pass puts there, and the order of a pass is drawn from (seed, number of
the pass) by a generator of its own; nothing else is asked. So a batch is rows taken .. taken + size, whatever the batch
size was before, and a rank's part of it is cut from the same list on every rank. A batch that holds the row which
padding fills up has an attention mask on every part, since ranks must be handed batches of the same names.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fcp.data._documents import Documents

__all__ = ["DataState", "Packed", "pack", "part_of"]


@dataclass(frozen=True)
class DataState:
    """The position in the data; plain values, so that JSON holds it: `DataState(**record)` of `dataclasses.asdict`.

    Attributes:
        taken: how many rows were taken.
        source: a fingerprint of the data whose rows they were: another data set, length of row or seed has another.
    """

    taken: int
    source: str


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows in an order, endlessly: a pure pair `init` and `batch`. `pack` makes it, and says what these are."""

    documents: Documents
    seq: int
    size: int
    seed: int
    shuffle: bool
    overlap: int
    part: tuple[int, int]
    pad_token: int

    def init(self) -> DataState:
        """The state before the first batch."""
        return DataState(0, self.source)

    def batch(self, state: DataState) -> tuple[dict[str, Tensor], DataState]:
        """The batch at `state`, and the state after it.

        Returns:
            The rows of this part, `input_ids`, `position_ids` and `labels` [rows, seq], int64, and, where the batch has
            the row that padding fills up, `attention_mask` (on every part, so that all have the same names).

        Raises:
            ValueError: the state is one of other data.
        """
        if state.source != self.source:
            raise ValueError(
                f"batch: this state is a position in other data ({state.source}, here {self.source}): the documents, "
                f"seq, seed or the tokenizer have changed. Begin anew, or give the data that it was taken from."
            )
        index, parts = self.part
        numbers = [self._row(state.taken + place) for place in range(self.size)]
        each = self.size // parts
        rows = self.rows(numbers[index * each : (index + 1) * each], padded=self.num_rows - 1 in numbers)
        return rows, DataState(state.taken + self.size, self.source)

    def batches(self, state: DataState | None = None) -> Iterator[tuple[dict[str, Tensor], DataState]]:
        """Each batch from `state` (or the first) on and the state after it, without end."""
        state = self.init() if state is None else state
        while True:
            batch, state = self.batch(state)
            yield batch, state

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (batch for batch, _ in self.batches())

    @property
    def num_rows(self) -> int:
        """The rows of one pass."""
        rest = self.documents.tokens.numel() - self.overlap
        return max(-(-rest // (self.seq - self.overlap)), 1)

    @cached_property
    def source(self) -> str:
        """The fingerprint that states carry."""
        digest = hashlib.blake2b(digest_size=8)
        for x in (self.documents.tokens, self.documents.ends):
            digest.update(x.numpy().tobytes())
        digest.update(json.dumps([self.seq, self.overlap, self.seed, self.shuffle]).encode())
        return digest.hexdigest()

    def rows(self, numbers: Sequence[int], *, padded: bool = True) -> dict[str, Tensor]:
        """The rows of these numbers, in the text's order; one past the last is padding alone.

        Args:
            numbers: which rows.
            padded: whether the batch has an `attention_mask`.
        """
        flat, ends = self.documents.tokens, self.documents.ends
        wanted = torch.tensor(list(numbers), dtype=torch.int64)[:, None]
        starts = wanted * (self.seq - self.overlap)
        index = starts + torch.arange(self.seq)
        real = (index < flat.numel()) & (wanted < self.num_rows)
        inside = index.clamp(max=flat.numel() - 1)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])[torch.searchsorted(ends, inside, right=True)]
        ids = torch.where(real, flat[inside].long(), self.pad_token)
        positions = torch.where(real, inside - torch.maximum(begins, starts), 0)
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
        return {**batch, "attention_mask": real.long()} if padded else batch

    def _row(self, taken: int) -> int:
        """The number of the row that is taken after `taken` others."""
        turn, place = divmod(taken, self.num_rows)
        return int(_order(self.seed, turn, self.num_rows)[place]) if self.shuffle else place

    def __repr__(self) -> str:
        return f"Packed({self.documents}: {self.num_rows} rows of {self.seq}, {self.size} a batch, seed {self.seed})"


@functools.lru_cache(maxsize=2)  # a batch may lie across the end of a pass
def _order(seed: int, turn: int, num_rows: int) -> Tensor:
    """[num_rows]: the order of the rows in pass number `turn`."""
    digest = hashlib.blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1))


def pack(
    documents: Documents,
    *,
    seq: int,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    overlap: Literal[0, 1] = 0,
    part: tuple[int, int] = (0, 1),
    pad_token: int = 0,
) -> Packed:
    """Documents as rows of `seq` tokens, `batch` of them at a time.

    Args:
        documents: what `read` or `of_tokens` gives.
        seq: the tokens of a row, 2 or more.
        batch: the rows of the whole batch, over all ranks.
        seed: of the order.
        shuffle: each pass in another order; False: always that of the text.
        overlap: 1 lets each row begin with the last token of the row before, which that did not predict from.
        part: (index, number of parts): which part of each batch's rows to give, as `part_of` says for a rank. The
            state does not depend on it.
        pad_token: what fills up the last row.

    Raises:
        ValueError: a length or number that is too small, or parts that do not divide the batch.

    >>> import fcp
    >>> documents = fcp.data.of_tokens([[1, 2, 3], [4, 5, 6, 7]])
    >>> data = pack(documents, seq=4, batch=1, shuffle=False)
    >>> first, state = data.batch(data.init())
    >>> first["input_ids"].tolist(), first["position_ids"].tolist(), state.taken
    ([[1, 2, 3, 4]], [[0, 1, 2, 0]], 1)
    """
    sizes = (("seq", seq, 2), ("batch", batch, 1), ("the number of parts", part[1], 1))
    wrong = [f"{name}={size!r} must be a whole number, {least} or more" for name, size, least in sizes if size < least]
    wrong += [f"overlap={overlap!r} must be 0 or 1"] if overlap not in (0, 1) else []
    index, parts = part
    if not wrong and batch % parts:
        wrong.append(f"{parts} parts do not divide a batch of {batch} rows; give a multiple of {parts} rows")
    if not wrong and not 0 <= index < parts:
        wrong.append(f"part {index} of {parts}")
    if wrong:
        raise ValueError(f"pack: {'; '.join(wrong)}")
    return Packed(documents, seq, batch, seed, shuffle, overlap, part, pad_token)


def part_of(sharded: Any) -> tuple[int, int]:
    """(index, number of parts): the part of each batch that this rank is handed.

    Args:
        sharded: what `fcp.transform` gives. Where it was told `rows="own"`, the ranks of dp x fsdp have a part each and
            those of a cp or tp group share one; else every rank is handed all rows.
    """
    index, parts = 0, 1
    for axis in sharded.own:
        size = sharded.mesh.size(sharded.mesh.mesh_dim_names.index(axis))
        index, parts = index * size + sharded.mesh.get_local_rank(axis), parts * size
    return index, parts

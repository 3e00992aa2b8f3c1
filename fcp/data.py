"""Data: documents, packed into rows of one length, in an order that the seed and the step alone decide.

    documents = fcp.data.read("book.txt", checkpoint=folder)
    data = fcp.data.pack(documents, seq=1024, batch=8, seed=0)
    state = data.init()
    batch, state = data.batch(state)

Problem. Runs on two meshes can be compared only if step 17 sees the same rows on both, and a run that was interrupted
is the same run only if it goes on where it stopped. An order that depends on how many workers read, or on what was
drawn before, gives neither.

Idea. Row number i of a run is a pure function of (documents, seq, seed, i): each pass over the rows has an order of its
own, drawn from the seed and the number of the pass. So the position in the data is one count, `DataState`, that fits
into a checkpoint, and (state) -> (batch, state) is a pure pair. On processes a rank of dp or fsdp takes its part of the
batch's rows (`part_of`), and the ranks of a cp or tp group, whose part is the same, take the same rows.

Packed, documents follow one another without a gap, and positions restart with each one and with each row, whose end may
cut one. The last row is filled up with padding. With `overlap=1` a row begins with the last token of the row before, so
that each token but a document's first is predicted exactly once a pass: what a perplexity wants.

Left out: a text that is larger than memory (its tokens, 4 bytes each, are held by every process), and documents that
are kept whole by leaving gaps.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fcp import huggingface
from fcp.huggingface._checkpoint import extra

__all__ = [
    "DataState",
    "Documents",
    "Packed",
    "check_vocabulary",
    "of_tokens",
    "pack",
    "part_of",
    "read",
    "read_text",
    "sections",
    "tokens",
]

DATA_FILES = (".parquet", ".jsonl", ".json", ".arrow", ".csv")
Whole = Literal["sections", "whole"]


# --- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokens of documents, one after another.

    Attributes:
        tokens: [num_tokens], int32 token ids.
        ends: [num_documents], int64: where each document ends among the tokens; none is empty.
    """

    tokens: Tensor
    ends: Tensor

    @property
    def largest(self) -> int:
        """The largest token id."""
        return int(self.tokens.max())

    def __repr__(self) -> str:
        return f"Documents({self.ends.numel()} documents, {self.tokens.numel()} tokens)"


def read(
    path: str | Path,
    *,
    checkpoint: str | Path | None = None,
    documents: Whole = "sections",
    column: str = "text",
    split: str = "train",
) -> Documents:
    """The documents of a text file or of a folder of Hugging Face's datasets, as tokens.

    Args:
        path: a text file in UTF-8; or a folder that `datasets` saved (`save_to_disk`), or of its data files (parquet,
            JSON lines). Nothing is fetched from anywhere.
        checkpoint: the folder or GGUF file whose tokenizer reads the text. None: a token is a byte.
        documents: of a text file: "sections", what blank lines separate, or "whole", the file is one document.
        column: of a folder: the column that holds the documents, texts or lists of token ids.
        split: of a folder with several splits: which one.

    Raises:
        ValueError: the path is neither, cannot be read, has no such column or split, or holds no token.
        ImportError: transformers (`pip install fcp[hf]`) or datasets (`pip install fcp[train]`) is not installed.
    """
    path = Path(path).expanduser()
    if documents not in ("sections", "whole"):
        raise ValueError(f"read: documents={documents!r}; it is 'sections' or 'whole'")
    if path.is_dir():
        return of_tokens(tokens(_column(path, column, split), checkpoint), source=path)
    if path.suffix in DATA_FILES:
        raise ValueError(f"{path}: a {path.suffix} file is read as part of its folder; give {path.parent}, or a text")
    text = read_text(path)
    return of_tokens(tokens(sections(text) if documents == "sections" else [text.strip()], checkpoint), source=path)


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or has nothing but blanks.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: not readable as text ({why})") from None
    if not text.strip():
        raise ValueError(f"{path}: empty text; give a file with some")
    return text


def sections(text: str) -> list[str]:
    """What blank lines separate.

    >>> sections("one\\n\\n  \\ntwo\\nlines\\n")
    ['one', 'two\\nlines']
    """
    return [piece.strip() for piece in re.split(r"\n\s*\n", text) if piece.strip()]


def tokens(pieces: Iterable[Any], checkpoint: str | Path | None = None) -> list[list[int]]:
    """Each piece's tokens, those that have none left out: by the checkpoint's tokenizer, or its bytes in UTF-8.

    Args:
        pieces: texts; a list of token ids comes back as it is.
        checkpoint: the folder or GGUF file with the tokenizer. None: a token is a byte.

    Raises:
        ValueError: there is no readable tokenizer.
        ImportError: transformers is not installed.
    """
    tokenizer = None if checkpoint is None else huggingface.tokenizer(checkpoint)

    def of(piece: Any) -> list[int]:
        if not isinstance(piece, str):
            return list(piece)
        return list(piece.encode()) if tokenizer is None else list(tokenizer(piece)["input_ids"])

    return [ids for piece in pieces if (ids := of(piece))]


def of_tokens(documents: Iterable[Sequence[int]], *, source: Any = "documents") -> Documents:
    """Lists of token ids as `Documents`; empty ones are left out.

    Args:
        documents: a list of token ids each.
        source: what they are called where they are refused.

    Raises:
        ValueError: there is no token, or one below zero.

    >>> of_tokens([[1, 2, 3], [4]])
    Documents(2 documents, 4 tokens)
    """
    kept = [torch.tensor(ids, dtype=torch.int32) for ids in documents if len(ids)]
    if not kept:
        raise ValueError(f"{source}: no token in it; give documents that have some")
    flat = torch.cat(kept)
    if int(flat.min()) < 0:
        raise ValueError(f"{source}: a token id of {int(flat.min())}; ids are 0 or more")
    return Documents(flat, torch.tensor([ids.numel() for ids in kept]).cumsum(0))


def check_vocabulary(documents: Documents, model: Any, source: Any = "documents") -> None:
    """Raises ValueError where a token is none that the model knows, or its config does not say which it knows.

    Args:
        documents: what it is to read.
        model: an `fcp.Model`.
        source: what they are called where they are refused.
    """
    vocab = getattr(model.config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise ValueError(
            f"{source}: the model's config has no vocab_size, so there is no telling which tokens it takes"
        )
    if documents.largest >= vocab:
        raise ValueError(
            f"{source}: a token outside the vocabulary: {documents.largest}, and the model knows 0 to {vocab - 1}; "
            f"give the model's own checkpoint, whose tokenizer is used then (without one, tokens are bytes)"
        )


def _column(folder: Path, column: str, split: str) -> Iterator[Any]:
    """The entries of a column of a folder that `datasets` saved, or of its parquet or JSON files, in their order."""
    datasets = extra("datasets", of="train")
    saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()]
    if not saved and not any(any(folder.rglob(f"*{ending}")) for ending in (".parquet", ".jsonl", ".json")):
        raise ValueError(
            f"{folder}: no data set in this folder; give one that datasets saved (save_to_disk), or one of .parquet or "
            f".jsonl files, or a text file"
        )
    try:
        # Streamed, so that nothing is copied into a cache in the user's home.
        found = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), streaming=True)
    except Exception as error:  # of every kind: each format's reader fails in its own way
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{folder}: not readable as a data set ({reason})") from None
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(f"{folder}: no split {split!r}; it has {', '.join(map(repr, found))}")
        found = found[split]
    names = found.column_names or list(next(iter(found), {}))
    if column not in names:
        raise ValueError(f"{folder}: no column {column!r}; it has {', '.join(map(repr, names))}")
    return (_entry(folder, column, row[column]) for row in found)


def _entry(folder: Path, column: str, value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(type(x) is int for x in value)):
        return value
    raise ValueError(f"{folder}: column {column!r} holds {type(value).__name__}; texts or lists of token ids are read")


# --- rows -------------------------------------------------------------------------------------------------------------


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

    >>> data = pack(of_tokens([[1, 2, 3], [4, 5, 6, 7]]), seq=4, batch=1, shuffle=False)
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

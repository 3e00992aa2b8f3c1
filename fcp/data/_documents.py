"""Documents as tokens: of a text file, of a folder of Hugging Face's datasets, or of lists.

A text is cut where blank lines separate its sections, the rule that `fcp check --packed` has too, and is read by the
checkpoint's own tokenizer, special tokens as that one sets them; without a checkpoint a token is a byte. A folder is
read by `datasets`, streamed in the order of its rows, so that nothing is copied into a cache, and nothing is fetched.

What would be trained on as if it were prose and is none (a JSON file, a folder without a data set, a column of numbers)
is refused. Left out: a text that is larger than memory.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fcp import huggingface
from fcp.huggingface._checkpoint import extra

__all__ = ["Documents", "check_vocabulary", "of_tokens", "read", "read_text", "sections", "tokens"]

DATA_FILES = (".parquet", ".jsonl", ".json", ".arrow", ".csv")
Whole = Literal["sections", "whole"]


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

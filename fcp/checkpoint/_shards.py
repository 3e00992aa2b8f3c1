"""Tensors in a checkpoint's folder: each process writes and reads its own blocks, by torch's safetensors storage.

Problem. A checkpoint is written on one mesh and read on another. No process can hold a leaf whole, and what a process
holds of it is not always one rectangle: of a fused matrix it has a slice of each part, and padding lies at the end.

Idea. torch.distributed.checkpoint knows a tensor as rectangular chunks with offsets, and reads any rectangle from
whichever chunks meet it. So what a process has is said in those words, a `Block` at a time, computed by `_layout.py`.
Where every block lies and which process writes it is arithmetic, so there is no plan to exchange, and nothing waits for
another process. Files are read by torch's `HuggingFaceStorageReader`, and are what its `HuggingFaceStorageWriter`
writes: `dcp.load` reads them too, which a test holds. That writer itself puts a file together in memory, two copies of
all that a process has (three times torch's other storage's peak). Here the entries go from where they are to the disk,
their checksum computed meanwhile, and all files are forced to it together, when it has been busy with them for a while.

A file has one block of a leaf, since its chunks have the leaf's name. The reader maps a file that it reads, so long
blocks are cut: what a process holds beside its shards is some 64th of them.

Left out: scalars, which are in state.json; and every other storage of torch's, whose metadata is a pickle.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fcp.checkpoint._folder import CHECKSUM, Checksum
from fcp.checkpoint._state import CODES, Block

__all__ = ["Stored", "read_blocks", "stored", "write_blocks"]

FILES, FILE_BYTES = 64, 16 * 2**20
"""How many files a process writes, about, and the least that makes another one worth it."""

Facts = dict[str, dict[str, Any]]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_blocks(folder: Path, number: int, count: int, blocks: Sequence[Block]) -> Facts:
    """Writes process `number`'s blocks (of `count` processes) into `folder`; each one's bytes and checksum, by name."""
    facts: Facts = {}
    for index, chosen in enumerate(_files(blocks)):
        name = f"shard-{index * count + number + 1:05d}-model-00001-of-00001.safetensors"
        facts[name] = _write_file(folder / name, chosen)
    for name in facts:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    return facts


def _write_file(path: Path, blocks: Sequence[Block]) -> dict[str, Any]:
    """One safetensors file, with the offsets of its chunks as torch's storage has them; its bytes and checksum."""
    header: dict[str, Any] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps({block.name: {"saved_offsets": block.offsets} for block in blocks}),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    end = 0
    for block in blocks:
        start, end = end, end + _bytes(block)
        about = {"dtype": CODES[block.values.dtype], "shape": list(block.values.shape), "data_offsets": [start, end]}
        header[block.name] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = Checksum()
    with path.open("wb") as file:
        for piece in itertools.chain([len(text).to_bytes(8, "little") + text], map(_entries, blocks)):
            file.write(piece)
            checksum.update(piece)
    return {"bytes": 8 + len(text) + end, CHECKSUM: checksum.hexdigest()}


def _entries(block: Block) -> memoryview:
    entries: Any = block.values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(entries)


def _files(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of each file: no more than it should hold, and no leaf twice."""
    most = max(sum(_bytes(block) for block in blocks) // FILES, FILE_BYTES)
    files: list[list[Block]] = []
    size = 0
    for block in (piece for whole in blocks for piece in _cut(whole, most)):
        if not files or size + _bytes(block) > most or any(block.name == each.name for each in files[-1]):
            files.append([])
            size = 0
        files[-1].append(block)
        size += _bytes(block)
    return files


def _bytes(block: Block) -> int:
    return block.values.numel() * block.values.element_size()


def _cut(block: Block, most: int) -> Iterator[Block]:
    """The block in runs of rows (of its first dim) that a file holds."""
    rows = max(most * block.values.shape[0] // max(_bytes(block), 1), 1)
    for first in range(0, block.values.shape[0], rows):
        offsets = (block.offsets[0] + first, *block.offsets[1:])
        yield replace(block, offsets=offsets, values=block.values[first : first + rows])


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """What the headers of a folder's files say, and what reads them."""

    reader: HuggingFaceStorageReader
    metadata: Metadata

    def differs(self, leaves: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What is otherwise than `leaves` (name to dtype and shape) say; nothing where the chunks tile each leaf."""
        found = cast(Mapping[str, TensorStorageMetadata], self.metadata.state_dict_metadata)
        wrong = [f"{name} is in no file" for name in leaves if name not in found]
        wrong += [f"{name} is in a file and not listed" for name in found if name not in leaves]
        for name, about in leaves.items():
            if name in found:
                shape, dtype = tuple(found[name].size), str(found[name].properties.dtype).removeprefix("torch.")
                entries = sum(math.prod(chunk.sizes) for chunk in found[name].chunks)
                if (list(shape), dtype, entries) != (about["shape"], about["dtype"], math.prod(about["shape"])):
                    wrong.append(f"{name} has {entries} entries of {shape} {dtype} in the files")
        return wrong


def stored(folder: Path) -> Stored:
    """The headers of all safetensors files of a folder."""
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return Stored(reader, metadata)


def read_blocks(files: Stored, blocks: Sequence[Block]) -> None:
    """Reads each block's entries into its values, from whichever chunks have them."""
    items: list[ReadItem] = []
    for block in blocks:
        there = cast(TensorStorageMetadata, files.metadata.state_dict_metadata[block.name])
        here = ChunkStorageMetadata(torch.Size(block.offsets), block.values.shape)
        items += create_read_items_for_chunk_list(block.name, there, [here])
    into = _Into({(block.name, block.offsets): block.values for block in blocks})
    files.reader.read_data(LoadPlan(items), cast(Any, into)).wait()


class _Into:
    """What of a LoadPlanner the storage asks for when it reads."""

    def __init__(self, values: Mapping[tuple[str, tuple[int, ...]], Tensor]) -> None:
        self._values = values

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        values = self._values[item.dest_index.fqn, tuple(item.dest_index.offset or ())]
        ends = zip(item.dest_offsets, item.lengths, strict=True)
        return values[tuple(slice(start, start + length) for start, length in ends)]

    def commit_tensor(self, item: ReadItem, values: Tensor) -> None:
        """Nothing: the values are in their place."""

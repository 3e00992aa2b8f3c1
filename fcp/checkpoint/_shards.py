"""Tensors in a checkpoint's folder: each process writes and reads its own blocks, by torch's safetensors storage.

Problem. A checkpoint is written on one mesh and read on another. No process can hold a leaf whole, and what a process
holds of it is not always one rectangle: of a fused matrix it has a slice of each part, and padding lies at the end.

Idea. torch.distributed.checkpoint knows a tensor as rectangular chunks with offsets, and reads any rectangle from
whichever chunks meet it. So what a process has is said in those words, a `Block` at a time, computed by `_layout.py`.
Where every block lies and which process writes it is arithmetic, so there is no plan to exchange: the storage's own
`write_data` and `read_data` are called with the blocks at hand, in any thread, and nothing waits for another process.
What is written is torch's format, and `dcp.load` with a `HuggingFaceStorageReader` reads it.

The storage puts a file together in memory before it writes it, so a process's blocks go into files of `FILE_BYTES`:
what it holds beside its shards is one file. A file has one block of a leaf (its chunks have the leaf's name), so
further blocks of a leaf go to files of their own. Checksums are computed while the bytes are written.

Left out: scalars, which are in state.json; and every other storage of torch's, whose metadata is a pickle.
"""

import hashlib
import io
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fcp.checkpoint._state import Block

__all__ = ["Stored", "read_blocks", "stored", "write_blocks"]

FILE_BYTES = 64 * 2**20
"""What a file may hold before the next one is begun: enough for a disk's speed, little enough to hold twice."""

Facts = dict[str, dict[str, Any]]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_blocks(folder: Path, number: int, count: int, blocks: Sequence[Block]) -> Facts:
    """Writes process `number`'s blocks (of `count` processes) into `folder`; each file's bytes and sha256, by name."""
    files, digests = _files(blocks), _Digests()
    for wave, indices in enumerate(files):
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=indices, save_distributed=True)
        writer.fs = digests
        writer.set_up_storage_writer(is_coordinator=number == 0)
        chosen = {block.name: block for block in _nth(blocks, wave)}
        about = {"fqn_to_index_mapping": indices, "shard_index": wave * count + number + 1}
        plan = SavePlan([_item(block) for block in chosen.values()], storage_data=about)
        writer.write_data(plan, cast(Any, _From(chosen))).wait()
    return digests.found


def _nth(blocks: Sequence[Block], n: int) -> Iterator[Block]:
    """The n-th block of each leaf that has so many."""
    seen: dict[str, int] = {}
    for block in blocks:
        if seen.setdefault(block.name, 0) == n:
            yield block
        seen[block.name] += 1


def _files(blocks: Sequence[Block]) -> list[dict[str, int]]:
    """For the first, second, ... block of every leaf: leaf to number of the file, from 1."""
    files: list[dict[str, int]] = []
    while True:
        indices: dict[str, int] = {}
        index, size = 1, 0
        for block in _nth(blocks, len(files)):
            more = block.values.numel() * block.values.element_size()
            if size and size + more > FILE_BYTES:
                index, size = index + 1, 0
            indices[block.name], size = index, size + more
        if not indices:
            return files
        files.append(indices)


def _item(block: Block) -> WriteItem:
    offsets = torch.Size(block.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, block.values.shape),
        properties=TensorProperties(dtype=block.values.dtype),
        size=torch.Size(block.shape),
    )
    return WriteItem(MetadataIndex(block.name, offsets), WriteItemType.SHARD, tensor_data=data)


class _From:
    """What of a SavePlanner the storage asks for when it writes."""

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks

    def resolve_data(self, item: WriteItem) -> Tensor:
        return self._blocks[item.index.fqn].values.detach().contiguous()


class _Digests(FileSystem):
    """torch's file system, which remembers of each file that it writes how long it is and its checksum."""

    def __init__(self) -> None:
        self.found: Facts = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with _Hashed(path) as stream:
            yield stream
        self.found[Path(path).name] = {"bytes": stream.written, "sha256": stream.sha256.hexdigest()}


class _Hashed(io.BufferedWriter):
    """A file whose checksum is computed beside the writing of it."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.sha256, self.written = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        hashing = threading.Thread(target=self.sha256.update, args=(data,))
        hashing.start()
        try:
            written = super().write(data)
            super().flush()  # the storage calls fsync next, which knows nothing of what is still in a buffer
        finally:
            hashing.join()
        self.written += written
        return written


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

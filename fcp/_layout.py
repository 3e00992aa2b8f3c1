"""Where a rank's part of a leaf lies in the whole leaf, in numbers.

`sharded.py` cuts a leaf by collectives, which needs the whole leaf on every rank. A model that fits no rank needs the
same cut without the whole: read from a file, or put together for one. So here the cut is arithmetic. A `Part` lists,
for each dim, the ranges of the whole leaf's indices that a rank holds, in order, and the shape they fill (padded at the
end of a dim where the ranks do not divide it). Whatever can be sliced can be cut by it: a tensor, or what stands for
one in a safetensors file.

That the arithmetic says what the collectives do is a test over every kind of placement.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcp.axes import names_of
from fcp.sharded import Placement

__all__ = ["Part", "blocks", "part_of", "put", "real", "take"]

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """A rank's part of a leaf.

    Attributes:
        ranges: for each dim, the (start, stop) ranges of the whole leaf's indices, in the order in which they lie here.
        shape: of the part; longer than the ranges where a dim is padded.
        whole: the shape of the slice that is computed with, before it was stored in pieces.
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


def part_of(shape: tuple[int, ...], placement: Placement, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Part:
    """The part of a leaf of `shape` that the rank with the index `ranks[axis]` on each axis holds."""
    ranges: list[Ranges] = [[(0, n)] for n in shape]
    lengths = list(shape)
    for axis, split in placement.slices:
        size, rank, dim = *_of_product(names_of(axis), sizes, ranks), split.dim % len(shape)
        if split.pieces is None:
            lengths[dim] = -(-lengths[dim] // size)
            ranges[dim] = _narrow(ranges[dim], rank * lengths[dim], lengths[dim])
        else:
            starts = itertools.accumulate((0, *split.pieces[:-1]))
            cuts = [(start + rank * (n // size), n // size) for start, n in zip(starts, split.pieces, strict=True)]
            ranges[dim] = [found for start, n in cuts for found in _narrow(ranges[dim], start, n)]
            lengths[dim] //= size
    whole = tuple(lengths)
    if placement.stored:
        size, rank = _of_product(placement.stored, sizes, ranks)
        lengths[0] = -(-lengths[0] // size)
        ranges[0] = _narrow(ranges[0], rank * lengths[0], lengths[0])
    return Part(tuple(map(tuple, ranges)), tuple(lengths), whole)


def _of_product(names: tuple[str, ...], sizes: Mapping[str, int], ranks: Mapping[str, int]) -> tuple[int, int]:
    """The size of the product of some axes, the first slowest, and the rank's index in it."""
    size, rank = 1, 0
    for name in names:
        size, rank = size * sizes[name], rank * sizes[name] + ranks[name]
    return size, rank


def _narrow(ranges: Ranges, start: int, length: int) -> Ranges:
    """The entries start..start + length of what the ranges list, in order."""
    found, before = [], 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(start + length - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return found


def take(source: Any, part: Part) -> Tensor:
    """The part of `source`, anything that slices give tensors of, in memory of its own."""
    if not part.shape:
        return source[()].clone()
    found = [(here, source[there]) for here, there in blocks(part)]
    if len(found) == 1 and tuple(found[0][1].shape) == part.shape:
        return found[0][1].clone(memory_format=torch.contiguous_format)
    like = found[0][1] if found else source[(slice(0, 1),) * len(part.shape)]
    local = like.new_zeros(part.shape)
    for here, block in found:
        local[here] = block
    return local


def put(whole: Tensor, part: Part, local: Tensor) -> None:
    """Writes a rank's part into its place in the whole leaf; the inverse of `take`, without the padding."""
    if not part.shape:
        whole.copy_(local)
    for here, there in blocks(part):
        whole[there] = local[here]


def real(local: Tensor, part: Part) -> list[Tensor]:
    """The blocks of a rank's part that are entries of the whole leaf, without the padding."""
    return [local[here] for here, _ in blocks(part)] if part.shape else [local]


def blocks(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(where in the part, where in the whole leaf) of each block that lies in one piece in both."""
    by_dim = []
    for ranges in part.ranges:
        ends = list(itertools.accumulate((last - first for first, last in ranges), initial=0))
        by_dim.append(
            [
                (slice(at, at + last - first), slice(first, last))
                for at, (first, last) in zip(ends, ranges, strict=False)
            ]
        )
    for block in itertools.product(*by_dim):
        yield tuple(here for here, _ in block), tuple(there for _, there in block)

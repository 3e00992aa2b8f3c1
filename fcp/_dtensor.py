"""Shards as torch's DTensors, and back: so that torch's own tools (its checkpoints, its clipping) take them.

A DTensor's dims are cut by mesh dimensions in the mesh's order, each cut in equal chunks but for the last. Where a
leaf's `Placement` says the same, a shard *is* the DTensor's local tensor, and nothing moves. It says something else
where a fused matrix is cut by its pieces, where the stored axes come before the sliced one in the mesh and cut the same
dim, or where several axes cut a dim that they do not divide. Such a leaf is put together, one at a time, and cut again.

Left out: torch's private strided placement, which could say the second of these.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fcp._layout import Part, part_of, take
from fcp.axes import names_of
from fcp.sharded import Placement, pad_to

if TYPE_CHECKING:  # half a second of imports that only a user of DTensors pays
    from torch.distributed.tensor import DTensor

__all__ = ["from_dtensor", "to_dtensor"]


def _placements_of(placement: Placement, shape: tuple[int, ...], mesh: Any) -> tuple[Any, ...]:
    """The DTensor placement for each mesh dimension.

    A dim that several axes cut and do not divide is cut by the largest alone: torch (2.13) puts such a one together
    wrongly, one row off for each short chunk.
    """
    from torch.distributed.tensor import Replicate, Shard

    sizes = _sizes(mesh)
    cut: dict[str, int] = {}
    for dim, axes in _by_dim(placement, len(shape)).items():
        even = shape[dim] % math.prod(sizes[axis] for axis in axes) == 0
        cut.update(dict.fromkeys(axes if even else [max(axes, key=lambda axis: sizes[axis])], dim))
    return tuple(Shard(cut[name]) if name in cut else Replicate() for name in mesh.mesh_dim_names)


def _is_local_of(placement: Placement, shape: tuple[int, ...], mesh: Any) -> bool:
    """Whether a shard, less its padding, is the local tensor of that DTensor, on every rank."""
    order, sizes = list(mesh.mesh_dim_names), _sizes(mesh)
    return not any(split.pieces for _, split in placement.slices) and all(
        axes == sorted(axes, key=order.index)
        and (len(axes) == 1 or shape[dim] % math.prod(sizes[axis] for axis in axes) == 0)
        for dim, axes in _by_dim(placement, len(shape)).items()
    )


def _by_dim(placement: Placement, ndim: int) -> dict[int, list[str]]:
    """The axes that cut each dim, in the order in which they do."""
    found: dict[int, list[str]] = {}
    for axis, split in placement.slices:
        found.setdefault(split.dim % ndim, []).extend(names_of(axis))
    for axis in placement.stored:
        found.setdefault(0, []).append(axis)
    return found


def _sizes(mesh: Any) -> dict[str, int]:
    return {name: mesh.size(dim) for dim, name in enumerate(mesh.mesh_dim_names)}


def to_dtensor(x: Tensor, whole: Any, placement: Placement, shape: tuple[int, ...], mesh: Any) -> "DTensor":
    """One shard as a DTensor of `shape`; `whole()` puts the leaf together where its rows have to move."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    to = _placements_of(placement, shape, mesh)
    if not _is_local_of(placement, shape, mesh):
        return distribute_tensor(whole(), mesh, to, src_data_rank=None)
    part = _part(shape, placement, mesh)
    held = tuple(slice(0, sum(last - first for first, last in ranges)) for ranges in part.ranges)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(x[held].contiguous(), mesh, to, run_check=False, shape=torch.Size(shape), stride=stride)


def from_dtensor(x: "DTensor", placement: Placement, mesh: Any) -> Tensor:
    """This rank's shard of a DTensor, however it lies over the mesh."""
    shape = tuple(x.shape)
    part = _part(shape, placement, mesh)
    if not _is_local_of(placement, shape, mesh):
        return take(x.full_tensor(), part)
    local = x.redistribute(mesh, _placements_of(placement, shape, mesh)).to_local().clone()
    for dim, length in enumerate(part.shape):
        local = pad_to(local, length, dim)
    return local


def _part(shape: tuple[int, ...], placement: Placement, mesh: Any) -> Part:
    return part_of(shape, placement, _sizes(mesh), {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names})

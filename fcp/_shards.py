"""Parameters that no process ever holds whole: each rank keeps its own part of every leaf.

Global in, global out is what a proof wants, and what a model too large for one device cannot have. So the same
transformed function also runs on *shards*: a tree of the parameters' own structure, whose leaves are this rank's parts,
plain tensors. What a part is, the leaf's `Placement` says (`sharded.py`), and where it lies in the whole leaf,
`_layout.py` computes; so shards can be cut from whole leaves or read from a file, put together again, and handed to
torch's own tools as DTensors, all without a description of their own.

Left out: in the simulator one process holds every rank's part, which is the whole leaf. There, shards are the global
parameters, so that the same training step runs there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcp import pytree
from fcp._dtensor import from_dtensor, to_dtensor
from fcp._layout import Part, part_of, put, real, take
from fcp._process import group_of
from fcp._watch import collective
from fcp.sharded import Placement, Shapes, cut_along, piece_of

__all__ = ["Held", "cut", "from_dtensors", "held", "join", "lay", "norm", "power_of", "to_dtensors", "together"]

Placements = Mapping[str, Placement]


@dataclass(frozen=True)
class Held:
    """What a rank holds of a leaf.

    Attributes:
        shape: of the whole leaf.
        part: where this rank's part lies in it.
        copies: how many ranks hold this very part.
        copy: the index of this rank among them.
    """

    shape: tuple[int, ...]
    part: Part
    copies: int = 1
    copy: int = 0


def held(placements: Placements, shapes: Shapes, mesh: Any) -> dict[str, Held]:
    """What this rank holds of every leaf."""
    sizes, ranks = _sizes(mesh), _ranks(mesh)
    found = {}
    for path, shape in shapes.items():
        over = {*placements[path].stored, *cut_along(placements[path])}
        copies, copy = 1, 0
        for name, size in sizes.items():
            if name not in over:
                copies, copy = copies * size, copy * size + ranks[name]
        found[path] = Held(shape, part_of(shape, placements[path], sizes, ranks), copies, copy)
    return found


def cut(params: Any, placements: Placements, mesh: Any) -> Any:
    """This rank's part of every leaf, in memory of its own. A leaf may be anything with a shape that slices read."""
    sizes, ranks = _sizes(mesh), _ranks(mesh)
    return pytree.map_with_path(
        lambda path, x: take(x, part_of(tuple(x.shape), placements[path], sizes, ranks)), params
    )


def lay(shards: Any, placements: Placements, shapes: Shapes, mesh: Any) -> Any:
    """The shards as the leaves that the transforms compute with: tensors, and Pieces where they are stored.

    Raises:
        ValueError: they are not this rank's parts of parameters of these shapes; every leaf that is not, is named.
    """
    parts = _parts(shards, placements, shapes, mesh, "on_shards")

    def leaf(path: str, x: Tensor) -> Any:
        placement = placements[path]
        return piece_of(x, parts[path].whole[0], placement) if placement.stored else x

    return pytree.map_with_path(leaf, shards)


def join(shards: Any, placements: Placements, shapes: Shapes, mesh: Any, to: int | None) -> Any:
    """The whole parameters, one leaf after the other, on every rank or on the rank `to` alone (None on the others)."""
    _parts(shards, placements, shapes, mesh, "unshard")
    if to is not None and not 0 <= to < dist.get_world_size():
        raise ValueError(f"unshard: to={to!r} is no rank of 0..{dist.get_world_size() - 1}")
    whole = pytree.map_with_path(lambda path, x: _whole(x, placements[path], shapes[path], mesh, to), shards)
    return whole if to is None or dist.get_rank() == to else None


def to_dtensors(shards: Any, placements: Placements, shapes: Shapes, mesh: Any) -> Any:
    """Each shard as a DTensor."""
    _parts(shards, placements, shapes, mesh, "to_dtensor")
    return pytree.map_with_path(
        lambda path, x: to_dtensor(
            x, lambda: _whole(x, placements[path], shapes[path], mesh, None), placements[path], shapes[path], mesh
        ),
        shards,
    )


def from_dtensors(dtensors: Any, placements: Placements, shapes: Shapes, mesh: Any) -> Any:
    """Each DTensor's shard."""
    given = pytree.shapes(dtensors)
    if given != shapes:
        wrong = [path for path in {**given, **shapes} if given.get(path) != shapes.get(path)]
        raise ValueError(f"from_dtensor: {', '.join(wrong[:8])} are no parameters of the model, or of another shape")
    return pytree.map_with_path(lambda path, x: from_dtensor(x, placements[path], mesh), dtensors)


def norm(shards: Any, placements: Placements, shapes: Shapes, mesh: Any, order: float) -> Tensor:
    """The norm of all entries of the whole leaves, each counted once, in one exchange.

    Every rank adds its own entries, padding left out, divided by the number of ranks that hold the same part; so the
    sum over all ranks counts an entry once, however its leaf lies. For the infinity norm copies do no harm.
    """
    parts, sizes = _parts(shards, placements, shapes, mesh, "norm"), _sizes(mesh)
    names, found = tuple(mesh.mesh_dim_names), []
    for path, x in zip(pytree.paths(shards), pytree.leaves(shards), strict=True):
        over = {*placements[path].stored, *cut_along(placements[path])}
        copies = math.prod(size for name, size in sizes.items() if name not in over)
        found += [power_of(block, order) / (1 if order == math.inf else copies) for block in real(x, parts[path])]
    group = group_of(mesh, names)
    total = together(found, order).to(mesh.device_type)
    with collective("norm", names):
        if order == math.inf:  # a maximum of NaN is not the same on every backend: count them beside it
            both = torch.stack([total.nan_to_num(0.0, posinf=math.inf), total.isnan().to(total.dtype)])
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
            return torch.where(both[1] > 0, math.nan, both[0])
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
    return total ** (1 / order)


def power_of(x: Tensor, order: float) -> Tensor:
    """sum |x|^order, or max |x|, in float64."""
    x = x.detach().to(torch.float64).abs()
    if order == math.inf:
        return x.amax() if x.numel() else x.new_zeros(())
    return (x**order).sum()


def together(found: list[Tensor], order: float) -> Tensor:
    if not found:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack(found)
    return stacked.amax() if order == math.inf else stacked.sum()


def _whole(x: Tensor, placement: Placement, shape: tuple[int, ...], mesh: Any, to: int | None) -> Tensor | None:
    """One leaf, put together from its shards, on every rank or on the rank `to`; None elsewhere."""
    sizes, mine = _sizes(mesh), _ranks(mesh)
    over = {*placement.stored, *cut_along(placement)}
    names = tuple(name for name in mesh.mesh_dim_names if name in over and sizes[name] > 1)
    if not names:
        return x.clone() if to is None or dist.get_rank() == to else None
    found = _gather(x, mesh, names, to)
    if found is None:
        return None
    whole = x.new_empty(shape)
    for index, local in enumerate(found):
        put(whole, part_of(shape, placement, sizes, mine | _coordinates(index, names, sizes)), local)
    return whole


def _gather(x: Tensor, mesh: Any, names: tuple[str, ...], to: int | None) -> list[Tensor] | None:
    """The tensors of the ranks of these axes, on each of them, or on the rank `to` alone where it is one of them."""
    group = group_of(mesh, names)
    size, x = dist.get_world_size(group), x.detach().contiguous()
    if to is None:
        flat = x.new_empty(size * x.numel())
        with collective("unshard", names):
            dist.all_gather_single(flat, x.view(-1), group)
        return list(flat.view(size, *x.shape))
    if to not in dist.get_process_group_ranks(group):
        return None
    found = [torch.empty_like(x) for _ in range(size)] if dist.get_rank() == to else None
    with collective("unshard", names):
        dist.gather(x, found, dst=to, group=group)
    return found


def _coordinates(index: int, names: tuple[str, ...], sizes: Mapping[str, int]) -> dict[str, int]:
    """The rank on each axis of the group's member `index`, the first name slowest."""
    found = {}
    for name in reversed(names):
        index, found[name] = divmod(index, sizes[name])
    return found


def _parts(shards: Any, placements: Placements, shapes: Shapes, mesh: Any, user: str) -> dict[str, Part]:
    """Where each of this rank's shards lies in its leaf; an error where one cannot."""
    given, sizes, ranks = pytree.shapes(shards), _sizes(mesh), _ranks(mesh)
    parts = {path: part_of(shape, placements[path], sizes, ranks) for path, shape in shapes.items()}
    wrong = [f"{path} is missing" for path in shapes if path not in given]
    wrong += [f"{path} is unknown" for path in given if path not in shapes]
    wrong += [
        f"{path} has shape {given[path]} and is {part.shape} on a rank ({shapes[path]} in all)"
        for path, part in parts.items()
        if path in given and given[path] != part.shape
    ]
    if wrong:
        raise ValueError(f"{user}: {'; '.join(wrong[:8])}. Give what `shard` gives on this mesh.")
    return parts


def _sizes(mesh: Any) -> dict[str, int]:
    return {name: mesh.size(dim) for dim, name in enumerate(mesh.mesh_dim_names)}


def _ranks(mesh: Any) -> dict[str, int]:
    return {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}

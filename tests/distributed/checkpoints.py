"""Cases of worker.py: a training state saved by the processes of one mesh, and loaded by those of others."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import pytree
from fcp.checkpoint import _shards
from tests import experts_grid
from tests.grid import batch, model_of

Result = tuple[str, float, bool]

MESHES = ({"cp": 2, "tp": 2}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 2})
"""Of 4 processes. From the first to each other one, and from each back to the first."""


def on_mesh(model: fcp.Model, sizes: dict[str, int]) -> fcp.Transformed:
    names = tuple(name for name in sizes if name != "ep")
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
    settings: Any = sizes
    return fcp.transform(model, mesh=mesh, **settings)


def trained(sharded: fcp.Transformed, params: Any, inputs: Any) -> Any:
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-3))
    state = step.init(sharded.shard(params))
    for _ in range(2):
        state, _ = step(state, inputs)
    return state


def whole(sharded: fcp.Transformed, state: Any) -> dict[str, Any]:
    """Everything in a state, put together from all ranks."""
    spec = pytree.flatten(state.params)[1]
    moments, paths = state.optimizer["moments"], pytree.paths(state.params)
    kinds = sorted({kind for each in moments.values() for kind in each})
    found = {"params": sharded.unshard(state.params), "counts": (state.step, state.skipped, state.optimizer["step"])}
    for kind in kinds:
        leaves = [moments[path][kind] for path in paths]
        if leaves[0].dim():
            found[kind] = sharded.unshard(pytree.unflatten(spec, leaves))
        else:
            found[kind] = leaves
    return found


def same(expected: Any, actual: Any) -> bool:
    pairs = zip(pytree.leaves(expected), pytree.leaves(actual), strict=True)
    return pytree.paths(expected) == pytree.paths(actual) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def shared_folder() -> Path:
    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def saves() -> Iterator[Result]:
    """Saved from each mesh, loaded on each other one and by one process alone, and back: every bit the same."""
    folder = shared_folder()
    model, params = model_of("qwen2", "packed", (8, 4))
    inputs = {key: torch.cat([x, x]) for key, x in batch("packed").items()}
    for index, sizes in enumerate(MESHES):
        sharded = on_mesh(model, sizes)
        state = trained(sharded, params, inputs)
        path = folder / str(index)
        saving = fcp.checkpoint.save(path, sharded, state, extra={"row": index}, asynchronous=index % 2 == 1)
        expected = whole(sharded, state)
        saving.wait()
        yield from goes_on(path, model, sizes, MESHES if index == 0 else MESHES[:1], expected, {"row": index})
        fcp.checkpoint.verify(saving.path)  # each entry of each leaf is there once
        written = list(saving.path.glob("*.safetensors"))
        yield f"every rank writes {sizes}", 0.0, len(written) == dist.get_world_size()
    yield from experts(folder)
    yield from failures(folder / "failures", model, params, MESHES[0], inputs)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def goes_on(
    path: Path, model: fcp.Model, sizes: dict[str, int], meshes: Any, expected: Any, extra: Any
) -> Iterator[Result]:
    for others in meshes:
        sharded = on_mesh(model, others)
        state, found = fcp.checkpoint.load(path, sharded)
        yield f"saved on {sizes}, loaded on {others}", 0.0, same(expected, whole(sharded, state)) and found == extra
    alone = fcp.transform(model, cp=2)
    state, _ = fcp.checkpoint.load(path, alone)  # each process by itself
    back = path / f"back-{dist.get_rank()}"
    fcp.checkpoint.save(back, alone, state)
    again, _ = fcp.checkpoint.load(back, alone)
    yield f"saved on {sizes}, loaded by one, and back", 0.0, same(expected, whole(alone, state)) and same(state, again)


def experts(folder: Path) -> Iterator[Result]:
    """Experts that a group cuts and the rest stores, with fused gate and up matrices under tp."""
    model, params = experts_grid.model_of("mixtral", "uneven", True)
    inputs = {key: torch.cat([x, x.flip(0)]) for key, x in experts_grid.batch("plain").items()}
    meshes = ({"cp": 2, "tp": 2, "ep": 4}, {"fsdp": 4, "ep": 2}, {"cp": 2, "fsdp": 2})
    sharded = on_mesh(model, meshes[0])
    state = trained(sharded, params, inputs)
    fcp.checkpoint.save(folder / "experts", sharded, state)
    expected = whole(sharded, state)
    for sizes in meshes:
        other = on_mesh(model, sizes)
        found, _ = fcp.checkpoint.load(folder / "experts", other)
        yield f"experts loaded on {sizes}", 0.0, same(expected, whole(other, found))


def failures(folder: Path, model: fcp.Model, params: Any, sizes: dict[str, int], inputs: Any) -> Iterator[Result]:
    """What fails on rank 1 alone is raised on every rank, in the same words, and they go on."""
    sharded = on_mesh(model, sizes)
    state = trained(sharded, params, inputs)
    rank = dist.get_rank()
    full = OSError(28, "No space left on device")
    disk = mock.patch.object(_shards, "_entries", side_effect=full)

    def refused(name: str, act: Callable[[], Any], words: str, *, odd: Any = None) -> Result:
        said = ""
        try:
            if odd is not None and rank == 1:
                with odd:
                    act()
            else:
                act()
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        dist.barrier()
        left = [each.name for each in folder.iterdir() if each.name.endswith(".partial")] if folder.exists() else []
        dist.barrier()
        return name, 0.0 if words in said else math.inf, len(set(everyone)) == 1 and not left

    space = "RuntimeError: checkpoint.save: rank 1: OSError: [Errno 28] No space left on device"
    save = fcp.checkpoint.save
    yield refused("a full disk", lambda: save(folder, sharded, state), space, odd=disk)
    beside = lambda: save(folder, sharded, state, asynchronous=True).wait()  # noqa: E731
    yield refused("a full disk, beside the training", beside, space, odd=disk)
    mine = {"rank": rank}
    yield refused("another extra", lambda: save(folder, sharded, state, extra=mine), "another folder, step, `extra`")
    shards = pytree.map(lambda x: x[:-1] if rank == 1 and x.dim() else x, state.params)
    wrong = fcp.TrainState(shards, state.optimizer, state.step, state.skipped)
    yield refused("another shape", lambda: save(folder, sharded, wrong), " on a rank (")
    path = save(folder, sharded, state).path
    if rank == 1:
        file = sorted(path.glob("*.safetensors"))[-1]
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    words = f"altered; its checksum is not what manifest.json says. There is no whole one in {folder}."
    yield refused("an altered byte", lambda: fcp.checkpoint.load(path, sharded), words)
    save(folder, sharded, state)
    yield "and again", 0.0, same(state, fcp.checkpoint.load(path, sharded)[0])

"""Cases of worker.py: training steps whose rows are each rank's own, in micro-batches, with float32 masters."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import pytree
from tests.grid import model_of
from tests.toys import tokens, worst_error

Result = tuple[str, float, bool]

MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"dp": 2}, {"fsdp": 2}),
    4: ({"dp": 2, "cp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}),
}
MICRO_BATCHES = ((slice(0, 1), slice(1, 2)), (slice(2, 5), slice(5, 6)))
"""[reader][micro-batch] its rows, of 6: no two readers hold as many, and no two micro-batches of one need to."""


def on_mesh(model: fcp.Model, sizes: dict[str, int]) -> tuple[fcp.Transformed, int]:
    """The transformed model, and which reader this rank is."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    settings: Any = sizes
    return fcp.transform(model, mesh=mesh, rows="own", **settings), mesh.get_local_rank(next(iter(sizes)))


def own_steps() -> Iterator[Result]:
    """A step of every reader's own micro-batches is the step of all rows at once, for one process."""
    model, params = model_of("llama", "packed", (6, 2))
    ids = tokens(6, 9, vocab=61)
    labels = ids.clone()
    labels[0, 3:] = labels[3, 5:] = fcp.typing.IGNORED  # no two rows count the same
    everything = {"input_ids": ids, "labels": labels}
    masters = pytree.map(lambda x: x.float(), params)
    alone = fcp.transform(model)
    for sizes in MESHES[dist.get_world_size()]:
        sharded, reader = on_mesh(model, sizes)
        parts = [{name: x[rows] for name, x in everything.items()} for rows in MICRO_BATCHES[reader]]

        (expected, one), (found, two) = (
            stepped(fn, params, given) for fn, given in ((alone, everything), (sharded, parts))
        )
        errors = [fcp.relative_error(one[name], two[name]) for name in ("loss", "norm")]
        yield f"{sizes}, micro-batches", max(*errors, worst_error(expected, found)), float(one["norm"]) > MAX_NORM

        counted = [{**part, "num_items_in_batch": fcp.prepare(everything).num_targets} for part in parts]
        again = stepped(sharded, params, counted)[1]["loss"]
        yield f"{sizes}, counted by the caller", fcp.relative_error(one["loss"], again), True

        rough, _ = stepped(alone, masters, everything, compute_dtype=torch.bfloat16)
        rounded, _ = stepped(sharded, masters, parts, compute_dtype=torch.bfloat16)
        moved = [distance(expected, params, each, masters) for each in (rough, rounded)]
        kept = {x.dtype for x in pytree.leaves(rounded)} == {torch.float32}
        yield f"{sizes}, float32 masters", 0.0 if moved[1] <= 2 * moved[0] else math.inf, kept and 0 < moved[0] < 0.1

        yield from refused(sharded, params, parts, reader)


MAX_NORM = 0.01


def stepped(sharded: fcp.Transformed, params: Any, given: Any, **options: Any) -> tuple[Any, Any]:
    """The whole parameters after one step, and its metrics."""
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=0.1), max_norm=MAX_NORM, **options)
    state, metrics = step(step.init(sharded.shard(params)), given)
    return sharded.unshard(state.params), metrics


def distance(expected: Any, start: Any, found: Any, masters: Any) -> float:
    """How far an update is from the expected one, relative to it: over all parameters, in float64."""

    def update(before: Any, after: Any) -> torch.Tensor:
        pairs = zip(pytree.leaves(before), pytree.leaves(after), strict=True)
        return torch.cat([(b.double() - a.double()).flatten() for a, b in pairs])

    right = update(start, expected)
    return float((update(masters, found) - right).norm() / right.norm())


def refused(sharded: fcp.Transformed, params: Any, parts: list[Any], reader: int) -> Iterator[Result]:
    """Reader 1 passes one micro-batch less, or the count of its own targets."""
    cases: dict[str, tuple[Callable[[], Any], str]] = {
        "fewer micro-batches": (lambda: parts[: 2 - reader], "another number of micro-batches"),
        "a count of its own": (
            lambda: [{**part, "num_items_in_batch": 10 + reader} for part in parts],
            "another num_items_in_batch",
        ),
        "a count that one has": (
            lambda: [{**part, "num_items_in_batch": 10} for part in parts] if reader else parts,
            "another num_items_in_batch",
        ),
    }
    for name, (given, words) in cases.items():
        said = ""
        try:
            stepped(sharded, params, given())
        except ValueError as error:
            said = str(error)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        yield f"{sharded.axes}, {name}", 0.0 if words in said else math.inf, len(set(everyone)) == 1

"""What the processes of test_distributed.py run: `torchrun ... worker.py WHAT COUNT RESULTS`.

Every rank computes every case on processes and in the simulator, on the same mesh, and rank 0 writes one JSON line a
case to RESULTS: the largest error over all ranks, and whether all ranks ran the same collectives as the simulator.
"""

import gc
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import _collective, pytree
from fcp import collectives as collectives_of
from tests import experts_grid
from tests.distributed import checkpoints, shards, steps
from tests.grid import MESHES, WAYS, Case, batch, cases, model_of, reference, sample
from tests.toys import gradient, tokens, worst_error

Result = tuple[str, float, bool]
DEVICE = os.environ.get("FCP_TEST_DEVICE", "cpu")
MORE_ROWS = ({"dp": 2, "cp": 2}, {"dp": 2, "fsdp": 2})
"""Meshes of 4 that the grid, whose batch has 2 rows, does not hold."""
# The grid's own {"cp": 2, "fsdp": 2} is a mesh whose dimensions are in another order than the simulator's axes.


def grid(chosen: list[Case], *, more: bool) -> Iterator[Result]:
    """Loss, logits and every gradient against the unsharded function, and the trace against the simulator's."""
    for case in chosen:
        model, params = model_of(case.family, case.mask, case.heads)
        yield one(
            case.name, model, params, batch(case.mask), dict(case.mesh), *reference(case.family, case.mask, case.heads)
        )
    if more and dist.get_world_size() == 4:
        model, params = model_of("qwen3", "packed", (6, 2))
        rows = {"input_ids": tokens(4, 11, vocab=61), "labels": tokens(4, 11, vocab=61)}
        for sizes in MORE_ROWS:
            yield one(str(sizes), model, params, rows, sizes, model(params, rows), gradient(model, params, rows))


def experts(chosen: list[experts_grid.Case]) -> Iterator[Result]:
    """As `grid`, with the statistics: rows that travel, and come back to where they were."""
    for case in chosen:
        key = (case.family, case.routes, case.auxiliary)
        model, params = experts_grid.model_of(*key)
        inputs, expected = experts_grid.batch(case.mask), experts_grid.reference(*key, case.mask)
        yield one(case.name, model, params, inputs, dict(case.mesh), *expected)


def one(
    name: str, model: fcp.Model, params: Any, inputs: Any, sizes: dict[str, Any], expected: fcp.Output, grads: Any
) -> Result:
    mesh = mesh_of(
        tuple(
            (name, math.prod(size) if isinstance(size, tuple) else size)
            for name, size in sizes.items()
            if name not in ("ep", "ep_plan", "cp_impl", "layout")
        )
    )
    params, inputs, expected, grads = (
        pytree.map(lambda x: x.to(DEVICE), each) for each in (params, dict(inputs), expected, grads)
    )
    here = fcp.transform(model, mesh=mesh, **sizes)
    simulated = fcp.transform(model, **sizes)
    with fcp.record() as ran:
        out, found = fcp.value_and_grad(here)(params, inputs)
    wanted = simulated_events(simulated, params, inputs)
    error = max(
        fcp.relative_error(expected.loss, out.loss),
        fcp.relative_error(expected.logits, out.logits),
        worst_error(grads, found),
        worst_error(grads, gradient(here, params, inputs)),
    )
    for key, value in (expected.statistics or {}).items():
        error = max(error, fcp.relative_error(value.double(), out.statistics[key].double()))
    return name, error, in_any_order(ran) == in_any_order(wanted)


@cache
def mesh_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    """One mesh for all cases of these sizes: each group keeps threads, and a thousand of them leave no time to work."""
    return init_device_mesh(DEVICE, tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes))


LITTLE: tuple[dict[str, Any], ...] = (
    {"logits": False, "loss_tile": 3},
    {"logits": False, "loss_tile": 3, "remat": "layer", "mlp_tile": 4},
    {"remat": "attention", "mlp_tile": 4},
)


def memory() -> Iterator[Result]:
    """Tiles and remat policies: loss and gradients against the plain function, and the trace of the simulator."""
    world = dist.get_world_size()
    meshes = [{name: world} for name in ("cp", "tp", "fsdp")]
    for sizes in meshes if world == 2 else [{"cp": 2, "tp": 2}]:
        mesh = mesh_of(tuple(sizes.items()))
        model, params = model_of("smollm", "packed", (8, 4))
        (expected, grads), inputs = reference("smollm", "packed", (8, 4)), batch("packed")
        params, inputs, grads = (pytree.map(lambda x: x.to(DEVICE), each) for each in (params, dict(inputs), grads))
        for options in LITTLE:
            here = fcp.transform(model, mesh=mesh, **sizes, **options)
            simulated = fcp.transform(model, **sizes, **options)
            with fcp.record() as ran:
                out, found = fcp.value_and_grad(here)(params, inputs)
            wanted = simulated_events(simulated, params, inputs)
            loss = fcp.relative_error(expected.loss.to(DEVICE), out.loss)
            error = max(loss, worst_error(grads, found), worst_error(grads, gradient(here, params, inputs)))
            yield f"{sizes} {options}", error, in_any_order(ran) == in_any_order(wanted)


def simulated_events(sharded: Any, params: Any, inputs: Any) -> list[fcp.Event]:
    """What the simulator's ranks run; rank 0 asks it and tells the others, whose cores have the real ranks to run."""
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        with fcp.record() as events:
            fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, fcp.prepare(inputs))
        said = [list(events)]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def in_any_order(events: list[fcp.Event]) -> list[fcp.Event]:
    """A mesh may have its dimensions in another order than the simulator nests them."""
    return [replace(event, axis=tuple(sorted(event.axis))) for event in events]


UNARY: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "psum": lambda x, axis: fcp.psum(x, axis),
    "pmax": lambda x, axis: fcp.pmax(x, axis) * fcp.psum(x, axis),
    "all_gather": lambda x, axis: fcp.psum(fcp.all_gather(x, axis, dim=1), axis),
    "psum_scatter": lambda x, axis: fcp.unshard(fcp.psum_scatter(x, axis, dim=2), axis, dim=2),
    "all_to_all": lambda x, axis: fcp.unshard(fcp.all_to_all(x, axis, split_dim=2, concat_dim=1), axis, dim=2),
    "all_to_all back": lambda x, axis: fcp.unshard(fcp.all_to_all(x, axis, split_dim=1, concat_dim=0), axis, dim=1),
    "ppermute": lambda x, axis: fcp.unshard(
        fcp.ppermute(x, axis, perm=[(r, (r + 1) % fcp.axis_size(axis)) for r in range(fcp.axis_size(axis))]),
        axis,
        dim=0,
    ),
    "ppermute to one": lambda x, axis: fcp.unshard(fcp.ppermute(x, axis, perm=[(0, 1)]), axis, dim=0),
    "own_slice": lambda x, axis: fcp.unshard(fcp.own_slice(x, axis, dim=2), axis, dim=2),
    "axis_index": lambda x, axis: fcp.psum(x * (1 + fcp.axis_index(axis)), axis),
}


def collectives() -> Iterator[Result]:
    """Every collective over one axis and over the product of two: value, gradient and trace of the simulator."""
    world = dist.get_world_size()
    meshes = [{"a": world}] if world == 2 else [{"a": 4}, {"a": 2, "b": 2}]
    x = torch.randn(8, 3 * 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for sizes in meshes:
        mesh = init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        axis: Any = "a" if len(sizes) == 1 else ("a", "b")
        for name, collective in UNARY.items():

            def fn(x: torch.Tensor, collective: Any = collective, axis: Any = axis) -> torch.Tensor:
                y = collective(fcp.shard(x, axis, dim=0), axis)
                weight = torch.cos(torch.arange(y.numel(), dtype=y.dtype, device=y.device)).view_as(
                    y
                )  # no two entries alike
                return (torch.sin(y) * weight).sum()

            with fcp.record() as ran:
                value, grad = fcp.value_and_grad(fcp.distribute(fn, mesh))(x)
            with fcp.record() as wanted:
                expected, expected_grad = fcp.simulate(fcp.value_and_grad(fn), **sizes)(x)
            error = max(fcp.relative_error(expected, value), fcp.relative_error(expected_grad, grad))
            yield f"{name} over {axis}", error, ran == wanted


def sums() -> Iterator[Result]:
    """256 + 1 + 1 + 2 is no sum that bfloat16 can add up one by one; in float32 it is 260, which bfloat16 has."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    weight = torch.tensor([256.0, 1.0, 1.0, 2.0], dtype=torch.bfloat16)

    def marked(xs: list[torch.Tensor]) -> torch.Tensor:
        xs = collectives_of.pvary_each(xs, "a", sum_dtype=torch.float32)
        return fcp.psum(sum(x.sum() for x in xs) * weight[int(fcp.axis_index("a"))], "a")

    def gathered(xs: list[torch.Tensor]) -> torch.Tensor:
        xs = collectives_of.all_gather_each([fcp.shard(x, "a", dim=0) for x in xs], "a", sum_dtype=torch.float32)
        return fcp.psum(sum(x.sum() for x in xs) * weight[int(fcp.axis_index("a"))], "a")

    for fn in (marked, gathered):
        for count in (1, 2):
            xs = [torch.ones(4, 3 + i, dtype=torch.bfloat16) for i in range(count)]
            _, grads = fcp.value_and_grad(fcp.distribute(fn, mesh))(xs)
            yield (
                f"{fn.__name__} {count}",
                0.0,
                all(g.dtype == x.dtype and (g == 260).all() for g, x in zip(grads, xs, strict=True)),
            )


def disagreements() -> Iterator[Result]:
    """Rank 1 is handed something else: the result is 0 where every rank refused it with the same words."""
    model, params = model_of("llama", "causal", (6, 2))
    inputs = batch("causal")
    sizes = {"cp": dist.get_world_size()}
    sharded = fcp.transform(model, mesh=init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=("cp",)), **sizes)
    odd = dist.get_rank() == 1
    other = inputs["input_ids"].clone()
    other[0, -1] += 1 - 2 * (other[0, -1] > 0)
    shorter = {name: x[:, :-1] for name, x in inputs.items()}
    single = pytree.map(lambda x: x.float(), params)
    cases: dict[str, tuple[Any, Any, str]] = {
        "one token": (params, {**inputs, "input_ids": other}, "[1] of the mesh were handed another batch than rank 0"),
        "one label": (params, {**inputs, "labels": other}, "another batch"),
        "a mask": (params, {**inputs, "attention_mask": (other > 9).long()}, "another batch"),
        "another length": (params, shorter, "another batch"),
        "a dtype": (single, inputs, "[1] of the mesh were handed other parameters"),
        "a missing leaf": ({"model": params["model"]}, inputs, "other parameters"),
    }
    for name, (odd_params, odd_inputs, words) in cases.items():
        said = ""
        try:
            fcp.value_and_grad(sharded)(odd_params if odd else params, odd_inputs if odd else inputs)
        except ValueError as error:
            said = str(error)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        yield name, 0.0 if words in said else math.inf, len(set(everyone)) == 1
    out = sharded(params, inputs)  # and the processes are still of use
    yield "the same again", fcp.relative_error(model(params, inputs).loss, out.loss), True


KINDS: dict[str, Callable[[], Iterator[Result]]] = {
    "collectives": collectives,
    "mutant": collectives,
    "sums": sums,
    "disagreements": disagreements,
    "shards": shards.on_shards,
    "checkpoints": shards.checkpoints,
    "regathers": shards.regathers,
    "rows": shards.own_rows,
    "steps": steps.own_steps,
    "saves": checkpoints.saves,
    "memory": memory,
}


def main() -> None:
    what, count, results = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    world = dist.get_world_size()
    meshes = WAYS if what == "ways" else MESHES
    every = cases(meshes) if count < 0 else sample(10**6, meshes=meshes)
    fitting = [case for case in every if case.ranks == world]
    if what == "mutant":
        right = _collective.on_processes
        _collective.on_processes = lambda rules, xs, *more: (
            [x.clone() for x in xs] if rules[0].name == "psum" else right(rules, xs, *more)
        )
    if what in ("grid", "ways"):
        found = grid(fitting if count < 0 else fitting[:count], more=what == "grid")
    elif what == "experts":
        found = experts(experts_grid.sample(10**6 if count < 0 else count, ranks=world))
    else:
        found = KINDS[what]()
    with open(results if dist.get_rank() == 0 else os.devnull, "w", buffering=1) as file:  # a line a case, as it ends
        for name, error, same in found:
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, (error, same))
            line = {"name": name, "error": max(e for e, _ in everyone), "same": all(s for _, s in everyone)}
            file.write(json.dumps(line) + "\n")
    # A group that something still holds when the interpreter ends takes its threads down with it: "terminate called".
    mesh_of.cache_clear()
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    gc.collect()
    # (torch's functional collectives, which its DTensors use, do hold the world's.)
    assert what == "shards" or not [group for group in groups if group() is not None]


if __name__ == "__main__":
    main()

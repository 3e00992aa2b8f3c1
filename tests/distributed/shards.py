"""Cases of worker.py: parameters that are whole in no process, and rows that each rank reads by itself."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fcp
from fcp import _regather, pytree
from models import llama
from tests import experts_grid
from tests.grid import batch, model_of, reference
from tests.toys import batch_of, gradient, tokens, worst_error

Result = tuple[str, float, bool]

MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"cp": 2}, {"tp": 2}, {"fsdp": 2}),
    4: ({"fsdp": 4}, {"tp": 4}, {"cp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "fsdp": 2}),
}
SPLIT = {"tp", "fsdp"}


def fused() -> tuple[fcp.Model, Any]:
    """A model whose one matrix holds two, of which each rank needs a slice of each; 11 tokens, 9 rows of a bias."""

    def mlp(p: Any, h: torch.Tensor, ops: Any) -> torch.Tensor:
        both = fcp.linear(ops.enter(h), p["both"])
        gate, up = both.chunk(2, dim=-1)
        return h + ops.leave(fcp.linear(torch.sin(gate) * up, p["down"])) + p["bias"].sum()

    def apply(params: Any, inputs: Any, ops: Any) -> fcp.Output:
        h = ops.layer(lambda p, ids: ops.embed(ids, p), params["table"], inputs.tokens)
        h = ops.layer(lambda p, h: mlp(p, h, ops), params["mlp"], h)
        total, logits = ops.layer(lambda p, h, targets: ops.loss(h, p, targets), params["table"], h, inputs.targets)
        return fcp.Output(None if total is None else total / inputs.num_targets, logits)

    def init(seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"table": (11, 6), "mlp.both": (16, 6), "mlp.down": (6, 8), "mlp.bias": (9,)}
        drawn = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        return pytree.nest(drawn)

    rules = {
        "table": fcp.Split(0, vocab=11),
        "mlp.both": fcp.Split(0, pieces=(8, 8)),
        "mlp.down": fcp.Split(1),
        "mlp.bias": fcp.Replicated(),
    }
    model = fcp.Model(None, apply, init, rules)
    return model, model.init(seed=3)


def on_shards() -> Iterator[Result]:
    """Loss, logits, and the gradient of every shard; shards joined again, saved, and as DTensors, bit for bit."""
    world = dist.get_world_size()
    everything = {
        "qwen2": (*model_of("qwen2", "packed", (8, 4)), batch("packed"), *reference("qwen2", "packed", (8, 4))),
        "smollm": (*model_of("smollm", "causal", (8, 4)), batch("causal"), *reference("smollm", "causal", (8, 4))),
    }
    model, params = fused()
    rows = batch_of(tokens(4, 7, vocab=11))
    everything["fused"] = (model, params, rows, model(params, rows), gradient(model, params, rows))
    for sizes in MESHES[world]:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name, (model, params, inputs, expected, grads) in everything.items():
            if name == "fused" and ("cp" in sizes or sizes.get("tp") == 4):
                continue  # it does not attend; 4 ranks do not divide 6 columns
            if math.prod(sizes.get(axis, 1) for axis in ("dp", "fsdp")) > inputs["labels"].shape[0]:
                inputs = {key: torch.cat([x, x.flip(0)]) for key, x in inputs.items()}
                expected, grads = model(params, inputs), gradient(model, params, inputs)
            sharded = fcp.transform(model, mesh=mesh, **sizes)
            shards = sharded.shard(params)
            out, found = fcp.value_and_grad(sharded.on_shards)(shards, inputs)
            error = max(
                fcp.relative_error(expected.loss, out.loss),
                fcp.relative_error(expected.logits, out.logits),
                worst_error(grads, sharded.unshard(found)),
                worst_error(grads, sharded.unshard(gradient(sharded.on_shards, shards, inputs))),
            )
            kept = sum(x.numel() for x in pytree.leaves(shards)) / sum(x.numel() for x in pytree.leaves(params))
            ranks = math.prod(sizes[axis] for axis in SPLIT & set(sizes))
            few = kept <= (1.0 if ranks == 1 else 1.15 / ranks)  # padding, and what tp keeps whole
            yield f"{name} {sizes}: {kept:.2f}", error, few and joined(sharded, shards, params)
    if world == 4:
        yield from expert_shards()


def expert_shards() -> Iterator[Result]:
    """The same of experts, which an expert group cuts and the rest of the ranks store."""
    model, params = experts_grid.model_of("mixtral", "uneven", True)
    inputs = {key: torch.cat([x, x.flip(0)]) for key, x in experts_grid.batch("plain").items()}
    expected, grads = model(params, inputs), gradient(model, params, inputs)
    for sizes, ep in (({"cp": 2, "fsdp": 2}, 4), ({"cp": 2, "fsdp": 2}, 2), ({"fsdp": 4}, 2), ({"cp": 2, "tp": 2}, 4)):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sharded = fcp.transform(model, mesh=mesh, ep=ep, **sizes)
        shards = sharded.shard(params)
        out, found = fcp.value_and_grad(sharded.on_shards)(shards, inputs)
        error = max(fcp.relative_error(expected.loss, out.loss), worst_error(grads, sharded.unshard(found)))
        yield f"experts {sizes} ep={ep}", error, joined(sharded, shards, params)


def regathers() -> Iterator[Result]:
    """Stored parameters that two layers share, that a layer returns, or that none uses; and when they are in memory."""

    def fn(params: Any, inputs: Any, ops: Any = fcp.LOCAL) -> fcp.Output:
        x = ops.layer(lambda p, ids: ops.embed(ids, p), params["a"], inputs.tokens)
        left = ops.layer(lambda p, x: torch.sin(x @ p), params["b"], x)
        right = ops.layer(lambda p, x: torch.cos(x @ p.mT) * p.sum(), params["b"], x)
        bias = ops.layer(lambda p: p["d"], {"d": params["d"]})  # the result is the parameter
        total, logits = ops.layer(lambda p, h, t: ops.loss(h, p, t), params["a"], left * right + bias, inputs.targets)
        return fcp.Output(total / inputs.num_targets, logits)

    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (11, 5), "b": (5, 5), "c": (3,), "d": (5,)}
    params = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    model = fcp.Model(None, fn, lambda seed=0: params, {})
    inputs = batch_of(tokens(4, 7, vocab=11))
    seen: list[Any] = []
    leaf = _regather.Window._leaf
    _regather.Window._leaf = lambda *args: seen.append(leaf(*args)) or seen[-1]  # type: ignore[method-assign]

    def held() -> int:
        return sum(each.flat.untyped_storage().nbytes() for each in seen)

    sizes = {"fsdp": dist.get_world_size()}
    sharded = fcp.transform(model, mesh=init_device_mesh("cpu", (sizes["fsdp"],), mesh_dim_names=("fsdp",)), **sizes)
    shards = pytree.map(lambda x: x.requires_grad_(), sharded.shard(params))
    for what, call in {"shards": sharded.on_shards, "whole": lambda _, batch: sharded(params, batch)}.items():
        out = call(shards, inputs)
        yield f"{what}, forward", fcp.relative_error(model(params, inputs).loss, out.loss), bool(seen) and held() == 0
    seen.clear()
    out = sharded.on_shards(shards, inputs)
    values = [shards[name] for name in "abd"]
    try:
        torch.autograd.grad(out.loss, values, create_graph=True)
        said = ""
    except ValueError as error:
        said = str(error)
    yield "a second derivative", 0.0, "take it with torch.func.grad" in said
    seen.clear()
    out = sharded.on_shards(shards, inputs)
    grads = dict(zip("abd", torch.autograd.grad(out.loss, values, retain_graph=True), strict=True))
    again = dict(zip("abd", torch.autograd.grad(out.loss, values), strict=True))
    expected = gradient(model, params, inputs)
    rest = {"c": torch.zeros_like(shards["c"])}
    error = max(worst_error(expected, sharded.unshard({**each, **rest})) for each in (grads, again))
    yield "backward, twice", error, held() == 0
    _regather.Window._leaf = leaf  # type: ignore[method-assign]


def joined(sharded: fcp.Transformed, shards: Any, params: Any) -> bool:
    """Whether every way back from the shards gives the parameters' own bits, and DTensors the shards'."""
    last = dist.get_world_size() - 1
    to_last = sharded.unshard(shards, to=last)
    dtensors = sharded.to_dtensor(shards)
    mesh = sharded.mesh
    apart = pytree.map(
        lambda x: x.redistribute(placements=[Replicate()] * (mesh.ndim - 1) + [Shard(0)]) if x.dim() else x, dtensors
    )
    return (
        same(params, sharded.unshard(shards))
        and (to_last is None if dist.get_rank() != last else same(params, to_last))
        and all(isinstance(x, DTensor) for x in pytree.leaves(dtensors))
        and same(params, pytree.map(lambda x: x.full_tensor(), dtensors))
        and same(shards, sharded.from_dtensor(dtensors))
        and same(shards, sharded.from_dtensor(apart))
    )


def same(expected: Any, actual: Any) -> bool:
    pairs = zip(pytree.leaves(expected), pytree.leaves(actual), strict=True)
    return pytree.paths(expected) == pytree.paths(actual) and all(torch.equal(a, b) for a, b in pairs)


def checkpoints() -> Iterator[Result]:
    """Saved from one mesh, read slice by slice on others: every bit the same."""
    model, params = model_of("qwen3", "causal", (8, 4))
    sizes: dict[str, int] = {"cp": 2, "tp": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    saved = fcp.transform(model, mesh=mesh, **sizes)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    whole = saved.unshard(saved.shard(params), to=0)
    if whole is not None:
        llama.save(path, model.config, whole)
    dist.barrier()
    for sizes in ({"tp": 4}, {"fsdp": 4}, {"cp": 2, "fsdp": 2}):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model, stored = llama.load(path, lazy=True)
        sharded = fcp.transform(model, mesh=mesh, **sizes)
        shards = sharded.shard(stored)
        yield f"read on {sizes}", 0.0, same(sharded.shard(params), shards) and same(params, sharded.unshard(shards))
    dist.barrier()


def own_rows() -> Iterator[Result]:
    """Each rank reads its own rows, not as many as its neighbour: the loss and gradients of all rows together."""
    model, params = model_of("llama", "packed", (6, 2))
    dynamic, dynamic_params = model_of("qwen2", "causal", (6, 2))
    ids = tokens(5, 9, vocab=61)
    labels = ids.clone()
    labels[0, 3:] = fcp.typing.IGNORED  # no two rows count the same
    world = dist.get_world_size()
    meshes: list[dict[str, int]] = (
        [{"dp": 2}, {"fsdp": 2}] if world == 2 else [{"dp": 2, "cp": 2}, {"dp": 2, "fsdp": 2}]
    )
    for sizes in meshes:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        own = {name: mesh.get_local_rank(name) for name in sizes if name != "cp"}
        reader = own.get("dp", 0) * sizes.get("fsdp", 1) + own.get("fsdp", 0)
        rows = (
            [slice(0, 1), slice(1, 5)]
            if "cp" in sizes or world == 2
            else [slice(i, i + 1 + (i == 3)) for i in range(4)]
        )
        mine = rows[reader]
        for fn, p, length in ((model, params, 9), (dynamic, dynamic_params, 4 + 5 * reader)):
            # A row is as long as its reader pads it; the longest decides what rope scaling sees.
            given = {"input_ids": ids[mine, :length], "labels": labels[mine, :length]}
            all_labels = labels.clone()
            for index, each in enumerate(rows):
                all_labels[each, 4 + 5 * index if fn is dynamic else 9 :] = fcp.typing.IGNORED
            everything = {"input_ids": ids, "labels": all_labels}
            expected, grads = fn(p, everything), gradient(fn, p, everything)
            sharded = fcp.transform(fn, mesh=mesh, rows="own", **sizes)
            out, found = fcp.value_and_grad(sharded)(p, given)
            counted = {**given, "num_items_in_batch": fcp.prepare(everything).num_targets}
            shards = sharded.shard(p)
            on_shards = sharded.unshard(gradient(sharded.on_shards, shards, given))
            error = max(
                fcp.relative_error(expected.loss, out.loss),
                fcp.relative_error(expected.loss, sharded(p, counted).loss),
                fcp.relative_error(expected.logits[mine, :length], out.logits),
                worst_error(grads, found),
                worst_error(grads, on_shards),
            )
            yield f"{sizes}, up to {length} tokens", error, tuple(out.logits.shape) == (*given["labels"].shape, 61)
    if world == 4:
        yield from other_rows(model, params, ids)


def other_rows(model: fcp.Model, params: Any, ids: torch.Tensor) -> Iterator[Result]:
    """Two ranks of a cp group are handed other rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    sharded = fcp.transform(model, mesh=mesh, rows="own", dp=2, cp=2)
    said = ""
    try:
        sharded(params, batch_of(ids[dist.get_rank() :][:1]))
    except ValueError as error:
        said = str(error)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, said)
    right = "the ranks [1, 3] of the mesh were handed another batch than the ranks [0, 2]" in said
    yield "a cp group's ranks with other rows", 0.0 if right else math.inf, len(set(everyone)) == 1

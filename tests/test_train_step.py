"""The training step, simulated and on processes: the same numbers on every mesh."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fcp
from fcp import pytree
from models import mixtral
from tests.tolerances import FLOAT64
from tests.toys import batch_of, randomized, tokens, toy, worst_error

STEPS = 100


def _train(sharded: Any, steps: int, max_norm: float = 1.0) -> tuple[list[float], list[float], Any]:
    """Losses, norms, and the whole parameters after `steps` steps."""
    _, params = toy()
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-3), max_norm=max_norm, donate=True)
    state = step.init(pytree.map(torch.clone, sharded.shard(params)))
    losses, norms = [], []
    for index in range(steps):
        state, metrics = step(state, batch_of(tokens(2, 12, seed=index)))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["norm"]))
    return losses, norms, sharded.unshard(state.params)


def _worst(expected: list[float], actual: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True))


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[float], Any]:
    return _train(fcp.transform(toy()[0]), STEPS)


@pytest.mark.parametrize(
    "sizes", [{"cp": 2}, {"tp": 2}, {"fsdp": 2}, {"dp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "fsdp": 2}], ids=str
)
def test_simulated_meshes_train_alike(sizes: dict[str, int], alone: Any) -> None:
    """An error of a step that is too small to see in one gradient, and grows over a hundred."""
    losses, norms, _ = _train(fcp.transform(toy()[0], **sizes), STEPS)
    assert _worst(alone[0], losses) < 1e-9 and _worst(alone[1], norms) < 1e-9
    assert max(norms) > 1.0  # clipping took part


def _on_mesh(sizes: dict[str, int], steps: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    settings: Any = sizes
    return _train(fcp.transform(toy()[0], mesh=mesh, **settings), steps)


def _on_two(steps: int) -> list[Any]:
    return [_on_mesh({axis: 2}, steps) for axis in ("cp", "tp", "fsdp", "dp")]


def test_processes_train_as_one_does(alone: Any) -> None:
    """A norm of one rank's shards alone clips each rank by another factor; moments that lie otherwise."""
    expected = _train(fcp.transform(toy()[0]), 10)
    for found in fcp.launch(_on_two, 10, num_processes=2):
        for losses, norms, params in found:
            assert _worst(expected[0], losses) < FLOAT64 and _worst(expected[1], norms) < FLOAT64
            assert worst_error(expected[2], params) < 1e-9


def _norms(meshes: list[dict[str, int]]) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    import fcp._shards as shards_module

    model = mixtral.tiny()
    params = randomized(model)
    marked = pytree.map(torch.zeros_like, params)
    _mark(marked)
    spoilt = pytree.map(torch.clone, params)
    found: list[Any] = []
    for sizes in meshes:
        names = {name: size for name, size in sizes.items() if name != "ep"}
        mesh = init_device_mesh("cpu", tuple(names.values()), mesh_dim_names=tuple(names))
        settings: Any = sizes
        sharded = fcp.transform(model, mesh=mesh, **settings)
        values = [float(sharded.norm(sharded.shard(params), order)) for order in (2.0, math.inf)]
        values += [float(sharded.norm(sharded.shard(marked), order)) for order in (2.0, math.inf)]
        shards = sharded.shard(spoilt)
        if torch.distributed.get_rank() == 1:
            pytree.leaves(shards)[0].view(-1)[0] = math.nan
        values += [float(sharded.norm(shards, order)) for order in (2.0, math.inf)]
        copies_count_again = SimpleNamespace(prod=lambda _: 1, inf=math.inf, nan=math.nan)
        with mock.patch.object(shards_module, "math", copies_count_again):
            mutant = float(sharded.norm(sharded.shard(params)))
        found.append((values, mutant))
    return found


def _mark(params: Any) -> None:
    """A replicated parameter with 2 and an expert of the last rank with 4."""
    by_path = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    next(x for path, x in by_path.items() if path.endswith("norm.weight"))[0] = 2.0
    next(x for path, x in by_path.items() if "experts" in path)[-1].view(-1)[-1] = 4.0


def test_the_norm_counts_every_parameter_once() -> None:
    """Case C-24: an expert counted many times, a shard once, a copy on each rank; a NaN that one rank alone sees."""
    meshes = [{"cp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2, "ep": 2}, {"dp": 2, "fsdp": 2, "ep": 2}]
    leaves = torch.cat([x.flatten() for x in pytree.leaves(randomized(mixtral.tiny()))])
    two, largest = float(leaves.norm()), float(leaves.abs().max())
    for rank in fcp.launch(_norms, meshes, num_processes=4):
        for (norm, infinity, marked, marked_infinity, *spoilt), _ in rank:
            assert abs(norm - two) / two < 1e-12 and infinity == largest
            assert abs(marked - 20**0.5) < 1e-12 and marked_infinity == 4.0
            assert all(math.isnan(x) for x in spoilt)
        assert rank[0][1] > two * 1.01 and rank[-1][1] > two * 1.01  # meshes on which some leaf has copies


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}], ids=str)
def test_uneven_micro_batches_are_the_single_batch(sizes: dict[str, int]) -> None:
    """A mean of means: each micro-batch divided by its own count."""
    model, params = toy()
    sharded = fcp.transform(model, **sizes)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=0.1))
    ids = tokens(4, 12)
    labels = ids.clone()
    labels[0, 3:] = -100  # this row has fewer targets than the others
    whole = {"input_ids": ids, "labels": labels}
    parts = [{name: x[rows] for name, x in whole.items()} for rows in (slice(0, 1), slice(1, 4))]
    state = step.init(sharded.shard(params))
    expected, one = step(state, whole)
    actual, two = step(state, parts)
    assert worst_error(expected.params, actual.params) < FLOAT64
    assert fcp.relative_error(one["loss"], two["loss"]) < FLOAT64
    mean_of_means = sum(model(params, each).loss for each in parts) / 2
    assert fcp.relative_error(one["loss"], mean_of_means) > 1e-3
    counted = [{**each, "num_items_in_batch": 35} for each in parts]
    assert fcp.relative_error(one["loss"], step(state, counted)[1]["loss"]) < FLOAT64
    with pytest.raises(ValueError, match="num_items_in_batch"):
        step(state, [counted[0], parts[1]])


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    """One NaN that ends in every moment; a skipped step that still counts as an update."""
    model, params = toy()
    sharded = fcp.transform(model, cp=2)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=0.1), max_norm=1.0)
    pytree.leaves(params)[0].view(-1)[0] = math.inf
    state = step.init(params)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    after, metrics = step(state, batch_of(ids))
    assert bool(metrics["skipped"]) and int(after.skipped) == 1 and int(after.step) == 1
    assert int(after.optimizer["step"]) == 0
    assert all(a is b for a, b in zip(pytree.leaves(state.params), pytree.leaves(after.params), strict=True))


def test_float32_masters_of_a_bfloat16_model() -> None:
    """Masters that are rounded with the model: an update below bfloat16's resolution is lost."""
    model, params = toy()
    params = pytree.map(torch.Tensor.float, params)
    sharded = fcp.transform(model, cp=2)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=1e-5), compute_dtype=torch.bfloat16)
    state, _ = step(step.init(params), batch_of(tokens(2, 12)))
    assert {x.dtype for x in pytree.leaves(state.params)} == {torch.float32}
    pairs = list(zip(pytree.leaves(params), pytree.leaves(state.params), strict=True))
    assert all(not torch.equal(a, b) for a, b in pairs)
    assert any(torch.equal(a.bfloat16(), b.bfloat16()) for a, b in pairs)


def test_an_auxiliary_loss_is_refused_over_micro_batches() -> None:
    """A router's loss that counts once for every micro-batch."""
    model = mixtral.tiny()
    sharded = fcp.transform(model)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=0.1))
    batch = batch_of(tokens(1, 8))
    with pytest.raises(ValueError, match="auxiliary loss"):
        step(step.init(randomized(model)), [batch, batch])


def _whole_leaves() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    model, _ = toy()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    try:
        fcp.optimizer(torch.optim.Muon, lr=0.1, sharded=fcp.transform(model, mesh=mesh, fsdp=2))
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_an_optimizer_of_whole_leaves_is_refused_on_pieces() -> None:
    """Muon orthogonalises half a matrix, and training goes on."""
    assert all("processes hold pieces" in words for words in fcp.launch(_whole_leaves, num_processes=2))
    assert fcp.optimizer(torch.optim.Adafactor, lr=0.1, sharded=fcp.transform(toy()[0], cp=2)).sharded is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_norm": 0.0}, "max_norm"), ({"norm_order": -1.0}, "norm_order"), ({"compute_dtype": torch.int64}, "dtype")],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    """A clip to nothing, or a norm of no order."""
    with pytest.raises(ValueError, match=words):
        fcp.train_step(fcp.transform(toy()[0]), fcp.optimizer(torch.optim.SGD, lr=0.1), **options)

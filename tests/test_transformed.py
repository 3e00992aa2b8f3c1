"""What `fcp.transform` gives, in the simulator: one process holds every rank's shards."""

from pathlib import Path

import pytest
import torch

import fcp
from fcp import pytree
from models import llama
from tests.toys import batch_of, gradient, tokens, toy, worst_error


@pytest.mark.parametrize("sizes", [{}, {"cp": 2, "tp": 2}, {"fsdp": 2}], ids=str)
def test_shards_in_the_simulator_are_the_parameters(sizes: dict[str, int]) -> None:
    """A training step on shards that runs on processes alone."""
    model, params = toy()
    batch = batch_of(tokens(2, 8))
    sharded = fcp.transform(model, **sizes)
    shards = sharded.shard(params)
    assert all(a is b for a, b in zip(pytree.leaves(params), pytree.leaves(shards), strict=True))
    assert fcp.relative_error(model(params, batch).loss, sharded.on_shards(shards, batch).loss) < 1e-10
    assert (
        worst_error(gradient(model, params, batch), sharded.unshard(gradient(sharded.on_shards, shards, batch))) < 1e-10
    )


def test_shards_are_read_from_files(tmp_path: Path) -> None:
    """What stands for a tensor in a file is handed to a model, which cannot compute with it."""
    model, params = toy()
    llama.save(tmp_path, model.config, params)
    again, stored = llama.load(tmp_path, torch.float32, lazy=True)
    assert {x.dtype for x in pytree.leaves(stored)} == {torch.float32}
    read = fcp.transform(again, cp=2).shard(stored)
    assert pytree.paths(read) == pytree.paths(params)
    pairs = zip(pytree.leaves(params), pytree.leaves(read), strict=True)
    assert all(torch.equal(a.float(), b) for a, b in pairs)


def test_a_model_knows_its_shapes() -> None:
    """Shapes that are found by making a model which fits no process."""
    model, params = toy()
    assert model.shapes() == pytree.shapes(params)
    huge = llama.model(llama.Config(hidden_size=16384, num_hidden_layers=200, num_attention_heads=128, head_dim=128))
    assert sum(torch.Size(shape).numel() for shape in huge.shapes().values()) > 1e11


@pytest.mark.parametrize("sizes", [{"dp": 8}, {"fsdp": 8}, {"cp": 8}], ids=str)
def test_gradients_are_summed_in_the_dtype_asked_for(sizes: dict[str, int]) -> None:
    """An option that does not reach the sum; a gradient that comes back in another dtype than its parameter's."""
    model, params = toy()
    params = pytree.map(lambda x: x.bfloat16(), params)
    batch = batch_of(tokens(8, 16))
    wide = fcp.transform(model, reduce_dtype=torch.float32, **sizes)
    with fcp.record() as events:
        _, grads = fcp.value_and_grad(wide)(params, batch)
    assert {x.dtype for x in pytree.leaves(grads)} == {torch.bfloat16}
    sums = {event.dtype for event in events if event.backward and event.name in ("psum", "psum_scatter")}
    assert sums == {torch.float32}

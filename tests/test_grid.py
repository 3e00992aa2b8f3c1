"""The equivalence grid: loss, logits and every gradient of the transformed function are those of the function."""

import itertools
from typing import Any

import pytest
import torch

import fcp
from fcp import pytree
from tests.grid import FAMILIES, LLAMAS, WAYS, Case, basic, batch, cases, model_of, reference, sample
from tests.tolerances import FLOAT64
from tests.toys import batch_of, gradient, randomized, tokens, toy, worst_error

SAMPLE = sample(56)


def check(case: Case, **options: Any) -> None:
    model, params = model_of(case.family, case.mask, case.heads)
    inputs = batch(case.mask)
    expected, expected_grads = reference(case.family, case.mask, case.heads)
    sharded = fcp.transform(model, **dict(case.mesh), **options)

    out = sharded(params, inputs)
    assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
    assert fcp.relative_error(expected.logits, out.logits) < FLOAT64
    # Outside the map: one function of global values. Inside: each rank differentiates its own, as a process does.
    assert worst_error(expected_grads, gradient(sharded, params, inputs)) < FLOAT64
    inside = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)
    out, grads = inside(params, fcp.prepare(inputs))
    assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
    assert worst_error(expected_grads, grads) < FLOAT64


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_sample(case: Case) -> None:
    """A fault of any transform under any mask: a target lost, documents joined, a gradient that misses a sum."""
    check(case)


@pytest.mark.parametrize("case", sample(48, meshes=WAYS), ids=lambda case: case.name)
def test_other_ways_to_attend(case: Case) -> None:
    """Keys merged twice or by the wrong weight, a block that is not sent, a gradient that does not come home; an order
    that labels, positions, logits or the mask do not follow."""
    check(case)


@pytest.mark.parametrize("case", sample(5, seed=1, meshes=WAYS), ids=lambda case: case.name)
def test_other_ways_rematerialised(case: Case) -> None:
    """A ring that is bound wrongly when its layer is computed again in backward."""
    check(case, remat=True)


OTHERS = tuple(family for family in FAMILIES if family not in LLAMAS)


@pytest.mark.parametrize("case", basic(OTHERS), ids=lambda case: case.name)
def test_families_that_break_a_rule(case: Case) -> None:
    """A sink, a norm, a fused matrix, a router or a shared key that a rank reads from elsewhere, or sums twice."""
    check(case)


@pytest.mark.parametrize("family", OTHERS)
def test_bfloat16_stays_bfloat16(family: str) -> None:
    """A router's or a norm's float32 that reaches the residual stream, or the gradients."""
    model = model_of(family, "causal", (8, 4))[0]
    params = randomized(model, dtype=torch.bfloat16)
    for fn in (model, fcp.transform(model, cp=2, tp=2)):
        out, grads = fcp.value_and_grad(fn)(params, batch("left pad"))
        assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all() and out.loss.dtype == torch.float32
        assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in pytree.leaves(grads))


@pytest.mark.parametrize("case", sample(8, seed=1), ids=lambda case: case.name)
def test_rematerialised(case: Case) -> None:
    """A rank that is bound wrongly when a layer is computed again in backward."""
    check(case, remat=True)


@pytest.mark.sweep
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_all(case: Case) -> None:
    """The whole grid."""
    check(case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", cases(WAYS), ids=lambda case: case.name)
def test_all_ways(case: Case) -> None:
    """The whole grid of the other ways to attend."""
    check(case)


STEPS = {
    "shard_seq": lambda fn: fcp.shard_seq(fn, axis="cp", layout="zigzag"),
    "ulysses": lambda fn: fcp.ulysses(fn, axis="cp"),
    "tp": lambda fn: fcp.shard_params(fn, axis="tp"),
    "fsdp": lambda fn: fcp.shard_params(fn, axis=("fsdp", "cp")),
    "shard_batch": lambda fn: fcp.shard_batch(fn, axis="fsdp"),
}
ORDERS = list(itertools.permutations(STEPS))


def check_order(order: tuple[str, ...], across: Any = fcp.ulysses) -> None:
    model, params = toy(model_type="qwen3", vocab_size=61)
    inputs = batch_of(tokens(2, 9, vocab=61))
    fn: Any = model
    for step in order:
        fn = across(fn, axis="cp") if step == "ulysses" else STEPS[step](fn)
    axes = {"fsdp": 2, "cp": 2, "tp": 2}
    assert worst_error(gradient(model, params, inputs), gradient(fcp.simulate(fn, **axes), params, inputs)) < FLOAT64
    out, grads = fcp.simulate(fcp.value_and_grad(fn), **axes)(params, inputs)
    assert fcp.relative_error(model(params, inputs).logits, out.logits) < FLOAT64
    assert worst_error(gradient(model, params, inputs), grads) < FLOAT64


@pytest.mark.parametrize("order", ORDERS[::11], ids="-".join)
def test_any_order_of_transforms(order: tuple[str, ...]) -> None:
    """A transform that works only inside or outside another; a gradient summed twice, or never, in one order."""
    check_order(order)


@pytest.mark.parametrize("order", ORDERS[5::24], ids="-".join)
@pytest.mark.parametrize("across", [fcp.ring, fcp.gather])
def test_any_order_of_transforms_of_other_ways(order: tuple[str, ...], across: Any) -> None:
    """A ring or a gather that works only inside or outside another transform."""
    check_order(order, across)


@pytest.mark.sweep
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("across", [fcp.ulysses, fcp.ring, fcp.gather])
def test_all_orders(order: tuple[str, ...], across: Any) -> None:
    """Every order of the five transforms."""
    check_order(order, across)

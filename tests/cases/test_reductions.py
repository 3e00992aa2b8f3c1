"""Section E of the case collection, as far as one process shows it: norms, means, and equal collectives on all ranks.

A simulated run is one program, so its trace is every rank's. What could make ranks differ is a choice that depends on
what a rank holds; the cases show that the trace depends on shapes alone, and that such a choice is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from fcp.typing import IGNORED
from tests.cases.toy_attention import toy as attention_toy
from tests.cases.witnesses import (
    assert_trips,
    inside,
    mesh_name,
    outside,
    run_inside,
    run_outside,
    trace,
)
from tests.toys import PACK8, batch_of, tokens

# --- C-24 -------------------------------------------------------------------------------------------------------------


def norms(replicated: float, owned: tuple[float, ...], *, psum_of_all: bool = False) -> tuple[float, float]:
    """The 2-norm and the largest entry of a replicated gradient and one that each rank of "ep" owns its own of."""

    def run(same: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        own = fcp.shard(own, "ep", dim=0)
        squares = own.square().sum()
        both = fcp.psum(squares + same.square(), "ep") if psum_of_all else fcp.psum(squares, "ep") + same.square()
        return both.sqrt(), torch.maximum(fcp.pmax(own.abs().amax(), "ep"), same.abs())

    two, largest = fcp.simulate(run, ep=len(owned))(torch.tensor(replicated), torch.tensor(owned))
    return float(two), float(largest)


@pytest.mark.parametrize("owned", [(0.0, 4.0), (4.0, 0.0)], ids=["rank 1", "rank 0"])
def test_c24_norm_of_one_entry_each(owned: tuple[float, ...]) -> None:
    """A norm that counts a replicated parameter once a rank: 2 and 4 make 4.472136, on every rank, and at most 4."""
    assert norms(2.0, owned) == (pytest.approx(4.472136, abs=1e-6), 4.0)


def test_c24_mutant() -> None:
    """The pinned norm notices the sum over ranks of what all hold (4.898979)."""
    wrong, _ = norms(2.0, (0.0, 4.0), psum_of_all=True)
    assert wrong == pytest.approx(4.898979, abs=1e-6)
    assert abs(wrong - 4.472136) > 1e-3


def norm(grads: Any) -> float:
    return float(torch.stack([g.square().sum() for g in pytree.leaves(grads)]).sum().sqrt())


@pytest.mark.parametrize(
    "mesh", [{"cp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"tp": 2}, {"dp": 2}], ids=mesh_name
)
def test_c24_norm_of_a_model(mesh: dict[str, int]) -> None:
    """Sum of squares over logical parameters, each once, and a clip by it: the same number at every mesh."""
    model, params = attention_toy(tied=True, sinks=True, scalars=True)
    batch = batch_of(tokens(2, 8))
    expected = norm(run_outside(model, params, batch)[1])
    sharded = fcp.transform(model, **mesh)
    assert norm(run_outside(sharded, params, batch)[1]) == pytest.approx(expected, rel=1e-10)

    def inside_the_map(params: Any, batch: Any) -> Tensor:
        grads = fcp.value_and_grad(sharded.model_fn)(params, batch)[1]
        return torch.stack([g.square().sum() for g in pytree.leaves(grads)]).sum().sqrt()

    assert float(fcp.simulate(inside_the_map, **mesh)(params, fcp.prepare(batch))) == pytest.approx(expected, rel=1e-10)


# --- C-25 -------------------------------------------------------------------------------------------------------------


def mean_of_ranks(values: Tensor) -> Tensor:
    return fcp.simulate(lambda x: fcp.psum(fcp.shard(x, "dp", dim=0), "dp") / fcp.axis_size("dp"), dp=len(values))(
        values
    )


@pytest.mark.parametrize(
    ("values", "dtype", "mean"),
    [
        ([1.0, 3.0], torch.float32, 2.0),
        ([1.0, 3.0], torch.bfloat16, 2.0),
        ([1.0, 2.0], torch.bfloat16, 1.5),
        ([3.0], torch.float32, 3.0),
        ([3.0], torch.bfloat16, 3.0),
    ],
)
def test_c25_sum_and_one_division(values: list[float], dtype: torch.dtype, mean: float) -> None:
    """An averaging collective that sums (4), zeroes (0) or divides twice; a mean here is a SUM and one division."""
    got = mean_of_ranks(torch.tensor(values, dtype=dtype))
    assert got.dtype == dtype
    assert got.tolist() == [mean]


def test_c25_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned means notice a backend that averages already, and one that does not sum."""
    values = torch.tensor([1.0, 3.0])
    psum = fcp.psum
    monkeypatch.setattr(fcp, "psum", lambda x, axis: psum(x, axis) / fcp.axis_size(axis))
    assert mean_of_ranks(values).tolist() == [1.0]
    monkeypatch.setattr(fcp, "psum", fcp.pmax)
    assert mean_of_ranks(values).tolist() == [1.5]


def test_c25_reductions_are_sums() -> None:
    """No step of any mesh uses a collective that is not in the table; none of its names is an average."""
    model, params = attention_toy()
    names = {
        event.name
        for mesh in TRACE_MESHES
        for event in trace(fcp.transform(model, **mesh), params, batch_of(tokens(2, 8)))
    }
    assert names <= {"shard", "unshard", "pvary", "psum", "all_gather", "psum_scatter", "all_to_all", "pmax"}


# --- C-26 and witness 5 -----------------------------------------------------------------------------------------------

TRACE_MESHES = [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2}, {"fsdp": 2, "tp": 2}]


def batches() -> dict[str, dict[str, Any]]:
    """Batches of one shape whose ranks differ in what they hold: targets, padding, documents, tokens."""
    ids = tokens(2, 8)
    positions = torch.tensor([PACK8, list(range(8))])
    ones = torch.ones_like(ids)
    everything = {"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": ones}
    few = torch.where(torch.arange(8) < 3, ids, IGNORED)
    return {
        "all": everything,
        "targets on rank 0 alone": {**everything, "labels": few},
        "no target": {**everything, "labels": torch.full_like(ids, IGNORED)},
        "tokens of rank 0 alone": {**everything, "input_ids": ids % 32, "labels": ids % 32},
        "a rank of padding": {**everything, "attention_mask": torch.stack([ones[0], (torch.arange(8) < 4).long()])},
        "one document": {**everything, "position_ids": torch.arange(8).expand(2, 8)},
    }


def assert_same_trace(fn: fcp.Transformed, params: Any) -> None:
    """Of all collectives that move something: a shard or pvary is local, and its adjoint is listed by itself."""
    expected = None
    for name, batch in batches().items():
        events = [event for event in trace(fn, params, batch) if event.name not in ("shard", "pvary")]
        expected = expected or events
        assert events == expected, f"{name}: another sequence of collectives"
        assert events


@pytest.mark.parametrize("mesh", TRACE_MESHES, ids=mesh_name)
def test_c26_trace(mesh: dict[str, int]) -> None:
    """Collectives chosen by what a rank holds: hangs on processes. The trace is a function of shapes alone."""
    model, params = attention_toy(windows=(3, None), sinks=True)
    assert_same_trace(fcp.transform(model, **mesh), params)


def test_c26_trace_of_both_ways() -> None:
    """A forward pass that differs between differentiating outside and inside the map."""
    model, params = attention_toy()
    sharded, batch = fcp.transform(model, cp=2, tp=2), batch_of(tokens(2, 8))

    def forward(run: Callable[..., Any]) -> list[fcp.Event]:
        with fcp.record() as events:
            run(sharded, params, batch)
        return [event for event in events if not event.backward]

    whole = forward(lambda fn, *args: fn(*args))
    assert forward(run_inside) == whole
    assert forward(lambda fn, *args: fcp.value_and_grad(fn)(*args)) == whole


def saves_a_sum(model: Any, of_rank: bool) -> Any:
    """A fault: a further reduction, only where there are targets; in this rank's slice, or in the whole batch."""
    seen: list[fcp.Inputs] = []

    def note(inputs: fcp.Inputs) -> fcp.Inputs:
        seen.append(inputs)
        return inputs

    def reduce(out: fcp.Output) -> fcp.Output:
        inputs = seen.pop()
        count = (inputs.targets != IGNORED).sum() if of_rank else inputs.num_targets
        if count > 0:
            fcp.psum(count, "cp")
        return out

    return inside(model, inputs=note, output=reduce)


def test_c26_mutant_of_a_rank() -> None:
    """A choice by what one rank holds cannot be made at all: vmap has no such branch."""
    model, params = attention_toy()
    faulty = fcp.transform(saves_a_sum(model, of_rank=True), cp=2)
    assert_trips(lambda: assert_same_trace(faulty, params), RuntimeError, "data-dependent control flow")


def test_c26_mutant_of_the_batch() -> None:
    """The witness notices a choice by a value of the batch, which every rank would have to agree on."""
    model, params = attention_toy()
    faulty = fcp.transform(saves_a_sum(model, of_rank=False), cp=2)
    assert_trips(lambda: assert_same_trace(faulty, params), match="no target: another sequence")


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"cp": 4, "tp": 2}], ids=mesh_name)
def test_c26_ten_tokens(mesh: dict[str, int]) -> None:
    """S 10 at cp 4: padded alike on all ranks, so that no rank raises while others wait."""
    model, params = attention_toy()
    shapes = [
        e.shape for e in trace(fcp.transform(model, **mesh), params, batch_of(tokens(2, 10))) if e.name == "shard"
    ]
    assert (2, 12) in shapes
    assert (2, 10) not in shapes


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "fsdp": 2}, {"dp": 3, "cp": 2}], ids=mesh_name)
def test_c26_rows_that_do_not_divide(mesh: dict[str, int]) -> None:
    """Rows cannot be padded without changing what a row is: refused with the same message on every rank."""
    model, params = attention_toy()
    for run in (lambda fn, *a: fn(*a), run_inside):
        assert_trips(
            lambda run=run: run(fcp.transform(model, **mesh), params, batch_of(tokens(2, 8))),
            ValueError,
            "does not divide a batch of",
        )


# --- witness 4: memory that nothing should read -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"cp": 4, "tp": 2}, {"fsdp": 4}], ids=mesh_name)
def test_padding_of_parameters_and_heads_is_unread(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> None:
    """Values of padding (rows of a table or piece, padded heads) that reach a result: other ones change nothing."""
    model, params = attention_toy(vocab_size=61, num_attention_heads=6, num_key_value_heads=2, sinks=True)
    batch = batch_of(tokens(4, 8, vocab=61))
    sharded = fcp.transform(model, **mesh)
    expected = run_inside(sharded, params, batch)
    pad_to = fcp.sharded.pad_to

    def filled(x: Tensor, length: int, dim: int, value: Any = 0) -> Tensor:
        return pad_to(x, length, dim, 7.0 if x.is_floating_point() else value)

    monkeypatch.setattr(fcp.sharded, "pad_to", filled)
    monkeypatch.setattr("fcp.transforms._ulysses.pad_to", filled)
    out, grads = run_inside(sharded, params, batch)
    assert fcp.relative_error(expected[0].logits, out.logits) < 1e-10
    for a, b in zip(pytree.leaves(expected[1]), pytree.leaves(grads), strict=True):
        assert fcp.relative_error(a, b) < 1e-10


def test_padding_is_unread_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness notices a normaliser that reads the padded columns."""
    losses = fcp.transforms._shard_params.token_losses
    monkeypatch.setattr(
        "fcp.transforms._shard_params.token_losses",
        lambda logits, targets, **o: losses(logits.nan_to_num(neginf=0.0), targets, **o),
    )
    model, params = attention_toy(vocab_size=61)
    batch = batch_of(tokens(2, 8, vocab=61))
    assert fcp.relative_error(model(params, batch).loss, fcp.transform(model, tp=2)(params, batch).loss) > 1e-6


def test_values_of_padding_tokens_are_unread() -> None:
    """Whatever tokens stand at padding, no real logit and no gradient changes, exactly."""
    model, params = attention_toy()
    ids = tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    other = torch.where(mask == 1, ids, (ids + 5) % 64)
    sharded = fcp.transform(model, cp=4)
    first, second = (sharded(params, batch_of(x, attention_mask=mask)) for x in (ids, other))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.logits[mask == 1], second.logits[mask == 1])

    def forget(inputs: fcp.Inputs) -> fcp.Inputs:
        return replace(inputs, mask=replace(inputs.mask, valid=None))

    blind = outside(sharded, forget)
    first, second = (blind(params, batch_of(x, attention_mask=mask)) for x in (ids, other))
    assert not torch.equal(first.loss, second.loss)

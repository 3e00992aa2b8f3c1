"""Section A of the case collection: which targets there are, and by what the loss is divided."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from fcp.loss import mean_loss
from fcp.typing import IGNORED
from tests.cases.toy_attention import toy as attention_toy
from tests.cases.witnesses import (
    LN64,
    NOTICED,
    add,
    assert_loss,
    assert_matches,
    assert_refused,
    assert_same_function,
    assert_trips,
    constant_loss,
    inside,
    mesh_name,
    of_ranks,
    outside,
    run_outside,
    spy,
)
from tests.toys import PACK8, batch_of, tokens, toy

ONE_TO_EIGHT = torch.arange(1, 9)[None]


def with_targets(change: Callable[[Tensor], Tensor], *, recount: bool) -> Callable[[fcp.Inputs], fcp.Inputs]:
    """A fault: other targets, counted again or not."""

    def changed(inputs: fcp.Inputs) -> fcp.Inputs:
        targets = change(inputs.targets)
        count = (targets != IGNORED).sum() if recount else inputs.num_targets
        return replace(inputs, targets=targets, num_targets=count)

    return changed


# --- C-01 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 4])
def test_c01_target_at_every_shard_edge(cp: int) -> None:
    """Labels shifted after sharding: the last token of each shard loses its target, and n is too small."""
    model, params = toy()
    batch, seen = batch_of(ONE_TO_EIGHT), []
    spied = inside(model, inputs=spy(seen, lambda x: of_ranks(x.targets, "cp")[:, 0].tolist()))
    fcp.transform(spied, cp=cp)(params, batch)
    whole = [2, 3, 4, 5, 6, 7, 8, IGNORED]
    assert seen == [[whole[i : i + 8 // cp] for i in range(0, 8, 8 // cp)]]
    assert int(fcp.prepare(batch).num_targets) == 7
    assert_same_function(model, fcp.transform(model, cp=cp), params, batch)


@pytest.mark.parametrize("recount", [True, False], ids=["counted again", "counted once"])
@pytest.mark.parametrize("cp", [2, 4])
def test_c01_mutant(cp: int, recount: bool) -> None:
    """The witness of C-01 notices targets that are lost at shard edges, counted (n = 6, at cp 4 n = 4) or not."""
    model, params = toy()
    batch = batch_of(ONE_TO_EIGHT)

    def lose(targets: Tensor) -> Tensor:
        local = targets.shape[1] // cp
        return torch.where(torch.arange(8) % local == local - 1, IGNORED, targets)

    fault = with_targets(lose, recount=recount)
    assert int(with_targets(lose, recount=True)(fcp.prepare(batch)).num_targets) == {2: 6, 4: 4}[cp]
    assert_trips(lambda: assert_same_function(model, outside(fcp.transform(model, cp=cp), fault), params, batch))


# --- C-02 -------------------------------------------------------------------------------------------------------------


def packed(padding: int = 0) -> dict[str, Any]:
    """Pack8, all labels valid; with `padding` tokens on the right."""
    ids = torch.nn.functional.pad(ONE_TO_EIGHT, (0, padding))
    positions = torch.tensor([PACK8 + list(range(5, 5 + padding))])
    more = {"attention_mask": (ids != 0).long()} if padding else {}
    return batch_of(ids, position_ids=positions, **more)


def documents_apart(model: Any, params: Any) -> Any:
    """The two documents of Pack8 as rows of their own, their losses divided by the targets of both."""
    return add(
        *(
            run_outside(model, params, batch_of(ids, num_items_in_batch=6))
            for ids in (ONE_TO_EIGHT[:, :3], ONE_TO_EIGHT[:, 3:])
        )
    )


@pytest.mark.parametrize("padding", [0, 2], ids=["packed", "padded packing"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_c02_last_token_of_a_document(cp: int, padding: int) -> None:
    """The last token of a document predicts the first of the next: n is 7 and the loss is biased."""
    model, params = toy()
    assert int(fcp.prepare(packed(padding)).num_targets) == 6
    assert_matches(documents_apart(model, params), fcp.transform(model, cp=cp), params, packed(padding))


@pytest.mark.parametrize("padding", [0, 2], ids=["packed", "padded packing"])
def test_c02_mutant(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """The witness of C-02 notices a shift over the row that knows nothing of documents (n = 7)."""
    model, params = toy()
    expected = documents_apart(model, params)
    shift = fcp._prepare._shift
    monkeypatch.setattr(fcp._prepare, "_shift", lambda labels, documents, valid: shift(labels, None, valid))
    assert int(fcp.prepare(packed(padding)).num_targets) == 7
    assert_trips(lambda: assert_matches(expected, fcp.transform(model, cp=2), params, packed(padding)))


# --- C-03 -------------------------------------------------------------------------------------------------------------

C03_MESHES = [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"fsdp": 2, "cp": 2}, {"cp": 4}]


@pytest.mark.parametrize("mesh", C03_MESHES, ids=mesh_name)
def test_c03_scale(mesh: dict[str, int]) -> None:
    """A loss or gradient off by exactly a number of ranks: U-head for the loss, a random head for the gradients."""
    model, params = toy()
    batch = batch_of(tokens(2, 8))
    sharded = fcp.transform(model, **mesh)
    assert_loss(LN64, sharded, constant_loss(params), batch)
    assert_same_function(model, sharded, params, batch)


def scaled(factor: float) -> Callable[[fcp.Output], fcp.Output]:
    """A fault: each rank's loss times a number (a local count where the global one belongs, or a mean of the ranks)."""
    return lambda out: fcp.Output(out.loss * factor, out.logits)


@pytest.mark.parametrize(
    ("mesh", "factor", "wrong"),
    [
        ({"cp": 2}, 2.0, 8.317766),
        ({"cp": 2, "tp": 2}, 4.0, 16.635532),
        ({"dp": 2, "cp": 2}, 4.0, 16.635532),
        ({"cp": 2}, 0.5, 2.079442),
        ({"tp": 2}, 0.5, 2.079442),
    ],
)
def test_c03_mutant_loss(mesh: dict[str, int], factor: float, wrong: float) -> None:
    """The U-head notices a loss that is a number of ranks too large or too small, and reads the number off."""
    model, params = toy()
    batch = batch_of(tokens(2, 8))
    faulty = fcp.transform(inside(model, output=scaled(factor)), **mesh)
    assert float(faulty(constant_loss(params), batch).loss) == pytest.approx(wrong, abs=1e-6)
    assert_trips(lambda: assert_loss(LN64, faulty, constant_loss(params), batch))


def mean_gradient(x: Tensor, axis: Any) -> Tensor:
    """A fault: forward as `pvary`, its gradient the mean over the ranks and not the sum."""
    x, size = fcp.pvary(x, axis), fcp.axis_size(axis)
    return x / size + (x - x / size).detach()


def one_gradient(x: Tensor, axis: Any) -> Tensor:
    """A fault: forward as `pvary`, each rank's gradient its own (the adjoint of a psum, which sums nothing)."""
    return fcp.psum(x, axis) / fcp.axis_size(axis)


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"dp": 2}, {"cp": 2, "tp": 2}], ids=mesh_name)
@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [(mean_gradient, AssertionError, "weight"), (one_gradient, ValueError, "a gradient differs between the ranks")],
)
def test_c03_mutant_gradient(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], fault: Any, error: type[Exception], match: str
) -> None:
    """R-grad notices gradients that are a number of ranks too small where the loss, and so the U-head, is right."""
    model, params = attention_toy()
    batch = batch_of(tokens(2, 8))
    monkeypatch.setattr(fcp.sharded, "pvary_each", lambda xs, axis, **_: [fault(x, axis) for x in xs])
    sharded = fcp.transform(model, **mesh)
    assert_loss(LN64, sharded, constant_loss(params, "head.weight"), batch)
    assert_trips(lambda: assert_same_function(model, sharded, params, batch), error, match)


# --- a model whose token losses can be chosen -------------------------------------------------------------------------


def priced(params: Any, inputs: Any, ops: fcp.Ops = fcp.LOCAL) -> fcp.Output:
    """Each token looks up two logits; the target is always token 0. No token looks at another."""
    inputs = fcp.prepare(inputs)
    x = ops.layer(lambda p, ids: ops.embed(ids, p), params["prices"], inputs.tokens)
    total, logits = ops.layer(lambda p, x, targets: ops.loss(x, p, targets), params["head"], x, inputs.targets)
    return fcp.Output(mean_loss(total, inputs.num_targets), logits)


def prices(*losses: float) -> dict[str, Tensor]:
    """Token i + 1 costs losses[i]: its logits are 0 and log(exp(loss) - 1). Token 0 is the target, and costs 1."""
    second = torch.log(torch.expm1(torch.tensor([1.0, *losses], dtype=torch.float64)))
    return {
        "prices": torch.stack([torch.zeros_like(second), second], 1),
        "head": torch.eye(2, dtype=torch.float64),
    }


def priced_batch(ids: list[int], valid: list[bool], **more: Any) -> dict[str, Any]:
    """valid[i]: whether token i has a target (the label after it)."""
    labels = torch.where(torch.tensor([False, *valid[:-1]]), 0, IGNORED)[None]
    return {"input_ids": torch.tensor([ids]), "labels": labels, **more}


def over_seq(fn: Any, cp: int) -> fcp.Transformed:
    return fcp.Transformed(fcp.shard_seq(fn, axis="cp"), {"cp": cp})


# --- C-04 -------------------------------------------------------------------------------------------------------------

SIX_AND_TWO = (
    priced_batch([1] * 8, [True] * 6 + [False] * 2),
    priced_batch([2] * 8, [True] * 2 + [False] * 6),
)


@pytest.mark.parametrize("cp", [1, 2])
def test_c04_accumulated_steps(cp: int) -> None:
    """The mean of micro-batch means (2.0 here) in the place of the mean over all targets (1.5)."""
    params = prices(1.0, 3.0)
    fn = over_seq(priced, cp)
    steps = add(*(run_outside(fn, params, {**batch, "num_items_in_batch": 8}) for batch in SIX_AND_TWO))
    assert float(steps[0].loss) == pytest.approx(1.5, rel=1e-10)
    together = {name: torch.cat([batch[name] for batch in SIX_AND_TWO]) for name in ("input_ids", "labels")}
    assert_matches(steps, over_seq(priced, 1), params, together)

    model, params = toy()
    sharded = fcp.transform(model, cp=cp)
    ids = tokens(2, 8)
    labels = torch.where(torch.arange(8) < torch.tensor([[7], [3]]), ids, IGNORED)
    rows = [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1], "num_items_in_batch": 8} for i in range(2)]
    assert_matches(
        add(*(run_outside(sharded, params, row) for row in rows)),
        fcp.transform(model, cp=1),
        params,
        {"input_ids": ids, "labels": labels},
    )


@pytest.mark.parametrize("cp", [1, 2])
def test_c04_mutant(cp: int) -> None:
    """The witness of C-04 notices steps that are each divided by their own count and averaged."""
    params = prices(1.0, 3.0)
    fn = over_seq(priced, cp)
    out, grads = add(*(run_outside(fn, params, batch) for batch in SIX_AND_TWO))
    mean = fcp.Output(out.loss / 2, None), pytree.map(lambda g: g / 2, grads)
    assert float(mean[0].loss) == pytest.approx(2.0, rel=1e-10)
    together = {name: torch.cat([batch[name] for batch in SIX_AND_TWO]) for name in ("input_ids", "labels")}
    assert_trips(lambda: assert_matches(mean, over_seq(priced, 1), params, together), match="loss")


# --- C-05 -------------------------------------------------------------------------------------------------------------

UNEVEN = priced_batch([1, 1, 1, 1, 2] + [1] * 11, [True] * 3 + [False] + [True] + [False] * 11)
"""16 tokens; over 4 shards 3, 1, 0 and 0 targets, with losses 1, 1, 1 and 5."""


def test_c05_ranks_without_targets() -> None:
    """0/0 on a rank whose labels are all ignored: NaN, or, with those ranks skipped, a mean of ranks (3.0)."""
    params = prices(1.0, 5.0)
    seen: list[Any] = []
    count = spy(seen, lambda x: (of_ranks(x.targets, "cp") != IGNORED).sum((1, 2)).tolist())
    assert_loss(2.0, over_seq(inside(priced, inputs=count), 4), params, UNEVEN)
    assert seen == [[3, 1, 0, 0]]
    assert_same_function(priced, over_seq(priced, 4), params, UNEVEN)


def mean_of_ranks(fn: Any, *, skip: bool) -> fcp.Sharded:
    """A faulty shard_seq: every rank divides by its own count, and the ranks (or those without NaN) are averaged."""

    def own_count(inputs: fcp.Inputs) -> fcp.Inputs:
        return replace(inputs, num_targets=(inputs.targets != IGNORED).sum())

    def average(out: fcp.Output) -> fcp.Output:
        good = torch.isfinite(out.loss)
        if not skip:
            return fcp.Output(out.loss / 4, out.logits)
        ranks = fcp.psum(good.to(out.loss.dtype), "cp")
        return fcp.Output(torch.where(good, out.loss, 0.0) / ranks, out.logits)

    return fcp.shard_seq(inside(fn, inputs=own_count, output=average), axis="cp")


@pytest.mark.parametrize("skip", [True, False], ids=["nan-mean", "mean"])
def test_c05_mutant(monkeypatch: pytest.MonkeyPatch, skip: bool) -> None:
    """The witness of C-05 notices a nan-mean over ranks (3.0) and a plain one (NaN)."""
    monkeypatch.setitem(globals(), "mean_loss", lambda total, count: total / count)
    params = prices(1.0, 5.0)
    faulty = fcp.Transformed(mean_of_ranks(priced, skip=skip), {"cp": 4})
    got = float(faulty(params, UNEVEN).loss)
    assert got == pytest.approx(3.0, rel=1e-10) if skip else got != got
    assert_trips(lambda: assert_loss(2.0, faulty, params, UNEVEN))


IGNORED_MESHES = [{}, {"cp": 4}, {"cp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2}]


def all_ignored() -> dict[str, Any]:
    ids = tokens(2, 8)
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}


@pytest.mark.parametrize("mesh", IGNORED_MESHES, ids=mesh_name)
def test_c05_no_target_at_all(mesh: dict[str, int]) -> None:
    """n = 0: the loss is 0 and every gradient exactly zero, never NaN."""
    model, params = attention_toy()
    zeros = pytree.map(torch.zeros_like, params)
    expected = fcp.Output(torch.zeros((), dtype=torch.float64), None), zeros
    assert_matches(expected, fcp.transform(model, **mesh), params, all_ignored())


@pytest.mark.parametrize("mesh", IGNORED_MESHES, ids=mesh_name)
def test_c05_no_target_mutant(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> None:
    """The witness for n = 0 notices a division by the bare count."""
    monkeypatch.setattr("tests.cases.toy_attention.mean_loss", lambda total, count: total / count)
    assert_trips(partial(test_c05_no_target_at_all, mesh))


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"dp": 4}, {"dp": 2, "fsdp": 2, "cp": 2}], ids=mesh_name)
@pytest.mark.parametrize("where", ["first tokens", "one row"])
def test_c05_uneven_targets(mesh: dict[str, int], where: str) -> None:
    """Targets on some ranks alone, of cp or of dp, with a count of the caller's own or without."""
    model, params = attention_toy()
    ids = tokens(4, 8)
    kept = torch.arange(8) < 3 if where == "first tokens" else torch.arange(4)[:, None] == 2
    batch = {"input_ids": ids, "labels": torch.where(kept, ids, IGNORED)}
    assert_same_function(model, fcp.transform(model, **mesh), params, batch)
    assert_same_function(model, fcp.transform(model, **mesh), params, {**batch, "num_items_in_batch": 37})


# --- C-06 -------------------------------------------------------------------------------------------------------------

token_losses = fcp.loss.token_losses


def multiplied(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """A fault: a masked loss that is computed everywhere and multiplied by zero."""
    keep = targets != IGNORED
    return token_losses(logits, torch.where(keep, targets, 0), **options) * keep


def poisoned(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The logits of the tokens that cp 4 adds to 6 are NaN after the head."""

    def call(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        row = fcp.axis_index("cp") * targets.shape[1] + torch.arange(targets.shape[1])
        return losses(logits.masked_fill((row >= 6)[:, None], torch.nan), targets, **options)

    return call


def nan_at_padding(monkeypatch: pytest.MonkeyPatch, losses: Callable[..., Tensor], mesh: dict[str, int]) -> None:
    model, params = attention_toy()
    batch = batch_of(tokens(2, 6))
    expected = run_outside(model, params, batch)
    monkeypatch.setattr("fcp.ops.token_losses", poisoned(losses))
    monkeypatch.setattr("fcp.transforms._shard_params.token_losses", poisoned(losses))
    assert_matches(expected, fcp.transform(model, **mesh), params, batch)


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"cp": 4, "tp": 2}, {"fsdp": 2, "cp": 4}], ids=mesh_name)
def test_c06_nan_at_padding(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> None:
    """NaN logits of padding leak through a multiplication by zero into the loss or a gradient."""
    nan_at_padding(monkeypatch, token_losses, mesh)


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"cp": 4, "tp": 2}], ids=mesh_name)
def test_c06_mutant(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> None:
    """The witness of C-06 notices `loss * mask`."""
    assert_trips(lambda: nan_at_padding(monkeypatch, multiplied, mesh), match="loss outside")


# --- C-07 -------------------------------------------------------------------------------------------------------------

BAND = (torch.ones(6, 6).tril() * torch.ones(6, 6).triu(-2)).bool()[None, None]
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1]])

DENSE = {
    "band": BAND,
    "band, additive": torch.where(BAND, 0.0, -torch.inf),
    "bidirectional": torch.zeros(1, 1, 6, 6),
    "rows that differ": torch.cat([torch.ones(1, 1, 6, 6).tril().bool(), BAND]),
    "causal": torch.ones(1, 1, 6, 6).tril().bool(),
    "three dims": BAND[0],
}


@pytest.mark.parametrize("name", DENSE)
def test_c07_dense_masks_are_refused(name: str) -> None:
    """A dense mask that is taken for causal and then replaced; it is refused, alike on every mesh, and before work."""
    model, params = attention_toy()
    mask = DENSE[name]
    batch = batch_of(tokens(mask.shape[0] if mask.dim() == 4 else 1, 6), attention_mask=mask)
    for mesh in ({}, {"cp": 2}, {"dp": 2, "cp": 2}):
        sharded = fcp.transform(model, **mesh)
        assert_refused(lambda sharded=sharded: sharded(params, batch), "a dense mask is refused")


def test_c07_dense_mask_mutant() -> None:
    """The witness of C-07 notices a function that discards a dense mask."""
    model, params = attention_toy()
    batch = batch_of(tokens(1, 6), attention_mask=DENSE["bidirectional"])

    def discards(params: Any, batch: dict[str, Any]) -> fcp.Output:
        return model(params, {name: x for name, x in batch.items() if name != "attention_mask"})

    assert_trips(
        lambda: assert_refused(lambda: discards(params, batch), "a dense mask is refused"), match="not refused"
    )


def test_c07_pairs() -> None:
    """What a band of 3 and left padding allow; 21 pairs are a mask that was replaced by plain causal."""
    batch = batch_of(tokens(1, 6))
    assert fcp.masks.count_pairs(fcp.prepare(batch).mask) == 21
    assert fcp.masks.count_pairs(fcp.prepare(batch).mask, window=3) == 15
    assert fcp.masks.count_pairs(fcp.prepare({**batch, "attention_mask": LEFT_PADDED}).mask) == 10


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_c07_left_padding(cp: int) -> None:
    """A left-padded mask is honoured: the row equals its four real tokens alone."""
    model, params = attention_toy()
    ids = tokens(1, 6)
    out, grads = run_outside(model, params, batch_of(ids[:, 2:]))
    expected = fcp.Output(out.loss, None), grads
    assert_matches(expected, fcp.transform(model, cp=cp), params, batch_of(ids, attention_mask=LEFT_PADDED))


def test_c07_left_padding_mutant() -> None:
    """The witness of left padding notices a mask that is checked, and then replaced by plain causal."""
    model, params = attention_toy()
    ids = tokens(1, 6)
    out, grads = run_outside(model, params, batch_of(ids[:, 2:]))

    def forget(inputs: fcp.Inputs) -> fcp.Inputs:
        return replace(inputs, mask=replace(inputs.mask, valid=None))

    faulty = outside(fcp.transform(model, cp=2), forget)
    batch = batch_of(ids, attention_mask=LEFT_PADDED)
    assert abs(float(faulty(params, batch).loss - out.loss)) > NOTICED
    assert_trips(lambda: assert_matches((fcp.Output(out.loss, None), grads), faulty, params, batch))

"""compare and its Report: errors as data. What must never pass is a fault that hides in one leaf, or in an absence."""

import dataclasses
import json
import math

import pytest
import torch

import fcp
from fcp import _compare, pytree
from models import llama, mixtral
from tests.toys import batch_of, randomized, tokens, toy

BATCH = batch_of(tokens(2, 8))


def report(expected, actual, *, expected_logits=None, actual_logits=None, title=""):
    """The report of two dicts of gradients, with equal losses."""
    loss = torch.ones((), dtype=torch.float64)
    pairs = (fcp.Output(loss, expected_logits), expected, fcp.Output(loss, actual_logits), actual)
    return _compare.report(*pairs, title=title)


def vector(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_the_same_function_is_equal():
    """A report that finds errors where there are none."""
    model, params = toy()
    found = fcp.compare(model, fcp.transform(model, cp=2, tp=2), params, BATCH)
    found.assert_close()
    assert found.ok()
    assert 0 < found.worst < found.tolerance == 1e-10
    assert found.logits_error is not None
    assert {leaf.path for leaf in found.leaves} == set(pytree.paths(params))


def scaled(model):
    """The loss, and so every gradient, twice too large."""

    def fn(params, inputs, ops=fcp.LOCAL):
        out = model(params, inputs, ops)
        return fcp.Output(out.loss * 2, out.logits)

    return fn


def dropped(model):
    """One leaf has no gradient, everything else is exact."""

    def fn(params, inputs, ops=fcp.LOCAL):
        first, *rest = params["model"]["layers"]
        attention = first["self_attn"]
        cut = {**attention, "k_proj": {"weight": attention["k_proj"]["weight"].detach()}}
        layers = [{**first, "self_attn": cut}, *rest]
        return model({**params, "model": {**params["model"], "layers": layers}}, inputs, ops)

    return fn


def shortened(model):
    """The logits come back without their last token."""

    def fn(params, inputs, ops=fcp.LOCAL):
        out = model(params, inputs, ops)
        return fcp.Output(out.loss, out.logits[:, :-1])

    return fn


@pytest.mark.parametrize(
    ("mutant", "named"),
    [(scaled, "loss"), (dropped, "grad model.layers.0.self_attn.k_proj.weight"), (shortened, "logits")],
)
def test_a_faulty_function_is_noticed_and_named(mutant, named):
    """A fault in the loss, in one leaf alone, or in the shape of the logits passes, or the table does not say where."""
    model, params = toy()
    found = fcp.compare(model, mutant(fcp.transform(model, cp=2)), params, BATCH)
    assert not found.ok()
    assert found.worst > 0.4
    with pytest.raises(AssertionError, match="NOT EQUAL") as error:
        found.assert_close()
    lines = [line for line in str(error.value).splitlines() if f" {named} " in line]
    assert len(lines) == 1
    assert "differs" in lines[0] or "another shape" in lines[0]


def test_the_dropped_leaf_is_the_only_one_and_comes_first():
    """An error that is spread over all leaves, or listed in the order of the parameters."""
    model, params = toy()
    found = fcp.compare(model, dropped(model), params, BATCH)
    assert found.leaves[0].path == "model.layers.0.self_attn.k_proj.weight"
    assert found.leaves[0].error == 1.0
    assert all(leaf.error == 0 for leaf in found.leaves[1:])
    assert found.loss_error == 0


def test_worst_first():
    """Leaves in another order: the table shows the first twelve alone."""
    expected = {name: vector(1.0) for name in "abcd"}
    actual = {"a": vector(1.1), "b": vector(1.3), "c": vector(1.0), "d": vector(1.2)}
    found = report(expected, actual)
    assert [leaf.path for leaf in found.leaves] == ["b", "d", "a", "c"]
    assert found.worst == found.leaves[0].error == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("expected", "actual", "note"),
    [
        ({"a": vector(1.0), "b": vector(0.0)}, {"a": vector(1.0)}, "missing"),
        ({"a": vector(1.0)}, {"a": vector(1.0), "b": vector(0.0)}, "not in the reference"),
        ({"b": vector(1.0, 2.0)}, {"b": vector(1.0)}, "shape (1,), not (2,)"),
        ({"b": vector(1.0, 2.0)}, {"b": vector(1.0, 2.0)[None]}, "shape (1, 2), not (2,)"),
        ({"b": vector(1.0, 2.0)}, {"b": vector(1.0, math.nan)}, "not finite"),
        ({"b": vector(1.0, 2.0)}, {"b": vector(1.0, math.inf)}, "not finite"),
        ({"b": vector(1.0, math.nan)}, {"b": vector(1.0, math.nan)}, "not finite in the reference"),
        ({"b": vector(1.0, math.inf)}, {"b": vector(1.0, math.inf)}, "not finite in the reference"),
        ({"b": vector(1.0, math.inf)}, {"b": vector(1.0, 2.0)}, "not finite in the reference"),
    ],
)
def test_what_is_absent_or_not_finite_is_an_infinite_error(expected, actual, note):
    """A zero standing in for a missing gradient, a broadcast of shapes, inf / inf = NaN that compares as fine."""
    found = report(expected, actual)
    assert found.leaves[0] == _compare.LeafError("b", math.inf, found.leaves[0].scale, note)
    assert found.worst == math.inf
    assert not found.ok(1e9)


def test_an_infinite_gradient_hides_no_other():
    """An infinite scale that makes the error of every other leaf zero."""
    found = report({"a": vector(math.inf), "b": vector(1.0)}, {"a": vector(math.inf), "b": vector(2.0)})
    assert [leaf.error for leaf in found.leaves] == [math.inf, math.inf]


def test_noise_is_measured_against_the_largest_gradient():
    """A leaf whose gradient is zero but for rounding fails against its own noise."""
    expected = {"large": vector(1.0), "zero": vector(3e-17)}
    found = report(expected, {"large": vector(1.0), "zero": vector(-2e-17)})
    assert found.ok()
    assert found.leaves[0].scale == _compare.FLOOR
    # The floor forgives rounding only: what a fault would put there is far above it.
    assert not report(expected, {"large": vector(1.0), "zero": vector(1e-6)}).ok()


def test_a_small_gradient_above_the_floor_keeps_its_own_scale():
    """A floor that hides a small leaf being half of what it should be."""
    found = report({"large": vector(1.0), "small": vector(1e-2)}, {"large": vector(1.0), "small": vector(5e-3)})
    assert found.leaves[0].error == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        ([torch.float64], 1e-10),
        ([torch.float32], 1e-4),
        ([torch.bfloat16], 5e-2),
        ([torch.float64, torch.float32], 1e-4),
    ],
)
def test_tolerance_follows_the_dtype(dtypes, tolerance):
    """float64 parameters judged by float32's bound, which a real fault passes."""
    grads = {str(i): vector(1.0, dtype=dtype) for i, dtype in enumerate(dtypes)}
    assert report(grads, grads).tolerance == tolerance


def test_assert_close_takes_a_tolerance_even_zero():
    """A tolerance of 0 read as 'none given'."""
    found = report({"a": vector(1.0)}, {"a": vector(1.0 + 1e-14)})
    found.assert_close()
    found.assert_close(1e-13)
    with pytest.raises(AssertionError, match=r"tolerance 0\)(.|\n)*grad a (.|\n)*NOT EQUAL within 0:"):
        found.assert_close(0.0)


def test_logits_that_one_function_leaves_out_are_not_compared():
    """Logits that are None counted as equal in the table, or as an error."""
    logits = torch.ones(1, 2, 3)
    found = report({"a": vector(1.0)}, {"a": vector(1.0)}, expected_logits=logits)
    assert found.logits_error is None
    assert found.ok()
    assert "not compared" in str(found)
    assert (
        report({"a": vector(1.0)}, {"a": vector(1.0)}, expected_logits=logits, actual_logits=logits).logits_error == 0
    )


def test_as_dict_is_json():
    """Infinity, which JSON does not have, or tensors in what is to be piped."""
    found = report({"a": vector(1.0), "b": vector(1.0)}, {"a": vector(1.5)}, title="x against y")
    read = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert read["ok"] is False
    assert read["title"] == "x against y"
    assert read["worst_error"] == "inf"
    assert read["gradients"] == [
        {"path": "b", "error": "inf", "scale": 0.0, "note": "missing"},
        {"path": "a", "error": 0.5, "scale": 1.0, "note": ""},
    ]


def test_titles_say_what_was_compared():
    """A title that is the repr of a whole config, or 'Model vs Model' for two families."""
    model, params = toy()
    other = llama.model(dataclasses.replace(model.config, model_type="mistral"))
    by_hand = fcp.ulysses(fcp.shard_seq(model, axis="cp"), axis="cp")
    titles = [
        fcp.compare(model, fn, params, BATCH).title
        for fn in (other, fcp.transform(model, cp=2), fcp.simulate(by_hand, cp=2), scaled(model))
    ]
    assert titles == [
        "Model(mistral) against Model(llama)",
        "Transformed(cp=2: shard_seq(cp) . ulysses(cp)) against Model(llama)",
        "simulated(ulysses(cp) . shard_seq(cp)) against Model(llama)",
        "fn against Model(llama)",
    ]


def test_a_batch_without_labels_is_refused():
    """Two functions compared by their logits alone, gradients forgotten."""
    model, params = toy()
    with pytest.raises(ValueError, match="give the batch labels"):
        fcp.compare(model, model, params, {"input_ids": tokens(1, 4)})


def test_a_report_displays_itself_in_a_notebook():
    """A cell whose last line is a report shows the repr of a dataclass."""
    shown = report({"a": vector(1.0)}, {"a": vector(2.0)})._repr_mimebundle_()
    assert "NOT EQUAL" in shown["text/plain"]
    assert "grad a" in shown["text/html"]


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        (vector(2.0, -4.0), vector(2.0, -3.0), 0.25),
        (vector(0.0), vector(0.0), 0.0),
        (vector(0.0), vector(1e-30), math.inf),
        (vector(1.0), vector(math.nan), math.inf),
        (vector(math.inf), vector(1.0), math.inf),
        (vector(1.0), vector(1.0, 1.0), math.inf),
        (vector(), vector(), 0.0),
    ],
)
def test_relative_error(expected, actual, error):
    """The scale taken from the wrong side, a division by zero, NaN that compares as small."""
    assert fcp.relative_error(expected, actual) == error


def test_relative_error_of_low_precision_is_taken_in_float64():
    """A difference of bfloat16 tensors rounded to bfloat16 itself (here to 255)."""
    expected, actual = (torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0078125))
    assert fcp.relative_error(expected, actual) == (256 - 1.0078125) / 256


def test_statistics_are_compared():
    """A count of tokens that is one rank's, or that is lost, beside a loss and gradients that are right."""
    model = mixtral.tiny()
    params, batch = randomized(model), batch_of(tokens(2, 8))
    fcp.compare(model, fcp.transform(model, cp=2, ep=2), params, batch).assert_close()

    def lost(params, inputs, ops=fcp.LOCAL):
        return fcp.Output(*model(params, inputs, ops))

    def halved(params, inputs, ops=fcp.LOCAL):
        out = model(params, inputs, ops)
        counts = out.statistics["tokens_per_expert"] // 2
        return fcp.Output(out.loss, out.logits, {**out.statistics, "tokens_per_expert": counts})

    pairs = ((model, lost, "missing"), (model, halved, "differs"), (lost, model, "not in the reference"))
    for reference, other, words in pairs:
        report = fcp.compare(reference, other, params, batch)
        assert report.loss_error == 0 and not report.ok()
        assert "statistic tokens_per_expert" in str(report) and words in str(report)
        assert {entry["path"] for entry in report.as_dict()["statistics"]} == {"tokens_per_expert", "auxiliary_loss"}

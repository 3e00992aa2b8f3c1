"""Expert parallelism in the simulator: loss, logits, every gradient and the statistics are those of the function."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import fcp
from fcp import _experts as compute_file
from fcp import pytree
from fcp._ep_view import check_experts, view
from fcp.transforms import _experts as transform_file
from models import llama, mixtral
from tests.experts_grid import BATCH, FAMILIES, SEQ, VOCAB, Case, batch, cases, model_of, reference, sample
from tests.tolerances import FLOAT64
from tests.toys import batch_of, gradient, randomized, tokens, worst_error


def check(case: Case, **options: Any) -> None:
    model, params = model_of(case.family, case.routes, case.auxiliary)
    expected, expected_grads = reference(case.family, case.routes, case.auxiliary, case.mask)
    inputs = batch(case.mask)
    sharded = fcp.transform(model, **dict(case.mesh), **options)
    out = sharded(params, inputs)
    assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
    assert fcp.relative_error(expected.logits, out.logits) < FLOAT64
    assert torch.equal(expected.statistics["tokens_per_expert"], out.statistics["tokens_per_expert"])
    name = "auxiliary_loss"
    assert fcp.relative_error(expected.statistics[name], out.statistics[name]) < FLOAT64
    assert worst_error(expected_grads, gradient(sharded, params, inputs)) < FLOAT64
    _, grads = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, fcp.prepare(inputs))
    assert worst_error(expected_grads, grads) < FLOAT64


@pytest.mark.parametrize("case", sample(24), ids=lambda case: case.name)
def test_sample(case: Case) -> None:
    """C-28. Tokens or gradients that miss a rank, count it twice, or are scaled; an auxiliary loss of one shard."""
    check(case)


@pytest.mark.parametrize("case", sample(4, seed=1), ids=lambda case: case.name)
def test_rematerialised(case: Case) -> None:
    """Other experts chosen when a layer is computed again."""
    check(case, remat=True)


@pytest.mark.sweep
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_all(case: Case) -> None:
    """The whole grid."""
    check(case)


@pytest.mark.parametrize("routes", ["uneven", "all to one", "one unused"])
def test_the_routes_are_what_they_are_called(routes: str) -> None:
    """A grid whose special routes are three times the same; padding that is counted."""
    expected, grads = reference("qwen2_moe", routes, False, "left pad")
    counts = expected.statistics["tokens_per_expert"]
    assert counts.sum(1).tolist() == [27 * (1 if routes == "all to one" else 2)] * 2
    if routes == "all to one":
        assert counts[:, 3].tolist() == [27, 27]
    unused = {"uneven": None, "all to one": 4, "one unused": 5}[routes]
    if unused is None:
        assert counts.max() > 2 * counts.min()
    else:
        assert not counts[:, unused].any()
        assert not grads["model"]["layers"][0]["mlp"]["experts"]["down_proj"][unused].any()


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3}, {"cp": 4}, {"tp": 2}, {"fsdp": 2}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("family", [name for name, module in FAMILIES.items() if module is mixtral])
def test_families_without_ep(family: str, mesh: dict[str, int]) -> None:
    """Experts that another axis splits by mistake; a window, a shared expert or a norm that is not the rank's."""
    more: dict[str, Any] = (
        {"sliding_window": 3}
        if family != "qwen2_moe"
        else {"sliding_window": 3, "layer_types": ("sliding_attention", "full_attention"), "mlp_only_layers": (1,)}
    )
    model = mixtral.tiny(model_type=family, vocab_size=VOCAB, output_router_logits=True, **more)
    params, inputs = randomized(model), batch("packed")
    sharded = fcp.transform(model, **mesh)
    fcp.compare(model, sharded, params, inputs).assert_close()
    _, grads = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, fcp.prepare(inputs))
    assert worst_error(gradient(model, params, inputs), grads) < FLOAT64


def test_by_hand() -> None:
    """C-28. An axis of its own, on one shared batch by either plan, and with other rows a rank."""
    model, params = model_of("mixtral", "uneven", True)
    inputs, expected = batch("plain"), reference("mixtral", "uneven", True, "plain")[1]
    for fn in (
        fcp.experts(model, axis="ep", plan="all_reduce"),
        fcp.experts(model, axis="ep", shared=("ep",)),
        fcp.shard_batch(fcp.experts(model, axis="ep"), axis="ep"),
        fcp.experts(fcp.shard_batch(model, axis="ep"), axis="ep"),
    ):
        assert worst_error(expected, gradient(fcp.simulate(fn, ep=2), params, inputs)) < FLOAT64
        _, grads = fcp.simulate(fcp.value_and_grad(fn), ep=2)(params, inputs)
        assert worst_error(expected, grads) < FLOAT64


STEPS = {
    "shard_seq": lambda fn: fcp.shard_seq(fn, axis="cp"),
    "ulysses": lambda fn: fcp.ulysses(fn, axis="cp"),
    "tp": lambda fn: fcp.shard_params(fn, axis="tp"),
    "fsdp": lambda fn: fcp.shard_params(fn, axis=("fsdp", "cp")),
    "shard_batch": lambda fn: fcp.shard_batch(fn, axis="fsdp"),
    "experts": lambda fn: fcp.experts(fn, axis=("cp", "tp"), shared=("tp",)),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS))[::131], ids="-".join)
def test_any_order_of_transforms(order: tuple[str, ...]) -> None:
    """Experts stored over an axis that already has them apart, or tokens split before they are whole, in one order."""
    model, params = model_of("qwen2_moe", "uneven", True)
    fn: Any = model
    for step in order:
        fn = STEPS[step](fn)
    expected = reference("qwen2_moe", "uneven", True, "packed")[1]
    sizes = {"fsdp": 2, "cp": 2, "tp": 2}
    assert worst_error(expected, gradient(fcp.simulate(fn, **sizes), params, batch("packed"))) < FLOAT64
    _, grads = fcp.simulate(fcp.value_and_grad(fn), **sizes)(params, batch("packed"))
    assert worst_error(expected, grads) < FLOAT64


@pytest.mark.parametrize("first", ["fsdp", "tp"])
def test_names_in_any_order(first: str) -> None:
    """Experts joined in the order in which axes are bound instead of that in which they are named."""
    model, params = model_of("qwen2_moe", "uneven", True)
    fn = fcp.experts(
        fcp.shard_params(fcp.shard_batch(model, axis="fsdp"), axis="tp"), axis=("fsdp", "tp"), shared=("tp",)
    )
    sizes = {"fsdp": 2, "tp": 2} if first == "fsdp" else {"tp": 2, "fsdp": 2}
    expected = reference("qwen2_moe", "uneven", True, "plain")[1]
    assert worst_error(expected, gradient(fcp.simulate(fn, **sizes), params, batch("plain"))) < FLOAT64


def test_an_order_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: experts joined in the order in which the axes are bound."""
    joined = compute_file._joined
    monkeypatch.setattr(compute_file, "_joined", lambda call, x: joined(replace(call, names=call.lead), x))
    with pytest.raises(AssertionError):
        test_names_in_any_order("tp")


def test_the_mean_of_the_shards_auxiliary_losses_is_another_number() -> None:
    """Mutant: each shard's auxiliary loss by its own counts."""
    model, params = model_of("mixtral", "uneven", True)
    out = reference("mixtral", "uneven", True, "plain")[0]
    parts = [model(params, batch_of(tokens(BATCH, SEQ, vocab=61)[rows, None])) for rows in range(4)]
    mean = torch.stack([part.statistics["auxiliary_loss"] for part in parts]).mean()
    assert fcp.relative_error(out.statistics["auxiliary_loss"], mean) > 1e-4


def test_a_sum_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: all-reduce whose ranks each keep what their own experts made."""
    model, params = model_of("mixtral", "uneven", False)
    monkeypatch.setattr(transform_file, "psum", lambda x, axis: x)
    with pytest.raises(ValueError, match=r"varies|differs"):
        fcp.transform(model, tp=2, ep=2, ep_plan="all_reduce")(params, batch("plain"))


def test_gradients_that_are_not_summed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: C-28. All-reduce that leaves each rank its own part of the gradients of tokens and routing weights."""
    model, params = model_of("mixtral", "uneven", False)
    monkeypatch.setattr(transform_file, "pvary", lambda x, axis: x)
    sharded = fcp.transform(model, tp=2, ep=2, ep_plan="all_reduce")
    with pytest.raises(ValueError, match="differs"):
        fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, fcp.prepare(batch("plain")))


def test_gradients_that_are_scaled_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: C-28. Experts that divide their gradient by the ranks whose tokens they saw."""
    model, params = model_of("mixtral", "uneven", False)
    whole = transform_file.experts_over

    def scaled(x: Any, weights: Any, indices: Any, experts: Any, fn: Any, axes: Any) -> torch.Tensor:
        experts = pytree.map(lambda leaf: leaf / 2 + leaf.detach() / 2, experts)
        return whole(x, weights, indices, experts, fn, axes)

    monkeypatch.setattr(transform_file, "experts_over", scaled)
    found = gradient(fcp.transform(model, cp=2, ep=2), params, batch("plain"))
    error = worst_error(reference("mixtral", "uneven", False, "plain")[1], found)
    assert 0.4 < error < 0.6


def test_tokens_that_every_rank_sends_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: tp ranks that all send the tokens that they share, so that experts compute each twice."""
    model, params = model_of("mixtral", "uneven", False)
    fn = fcp.experts(fcp.shard_params(model, axis="tp"), axis="tp", shared=())
    with pytest.raises(ValueError, match="differs"):
        fcp.simulate(fn, tp=2)(params, batch("plain"))


def test_refusals() -> None:
    """What cannot be split is said before anything runs, with what can."""
    model = model_of("mixtral", "uneven", False)[0]
    for sizes, words in (
        ({"fsdp": 3, "ep": 3}, "ep=3 does not divide 8 experts; ep may be 1, 2, 4, 8"),
        ({"cp": 2, "ep": 4}, "covers no whole view of fsdp=1, cp=2, tp=1.*ep may be 1, 2"),
        ({"ep": 2}, "covers no whole view"),
        ({"tp": 2, "cp": 3, "ep": 3}, "covers no whole view.*ep may be 1, 2, 6"),
        ({"cp": 2, "ep": 2, "ep_plan": "all_reduce"}, "only tp ranks share tokens"),
        ({"cp": 2, "tp": 2, "ep": 4, "ep_plan": "all_reduce"}, "only tp ranks share tokens"),
        ({"cp": 2, "ep": 0}, "ep=0 must be a number of ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            fcp.transform(model, **sizes)
    with pytest.raises(ValueError, match="needs a model with experts"):
        fcp.transform(llama.tiny(), cp=2, ep=2)
    with pytest.raises(ValueError, match=r"no rule of .* counts experts"):
        fcp.experts(llama.tiny())
    with pytest.raises(ValueError, match=r"shared=\('tp',\) names an axis"):
        fcp.experts(model, axis="ep", shared=("tp",))
    undecided: Any = "gather"  # annotations are checked in tests, and not where a user runs
    with pytest.raises(ValueError, match="ep_plan='gather'; it is 'dispatch' or 'all_reduce'"):
        check_experts(model, view({"dp": 1, "fsdp": 1, "cp": 2, "tp": 1}, 2), 2, undecided)


def test_experts_that_the_axis_does_not_divide() -> None:
    """C-28. Composed by hand there is no door that checks."""
    model, params = model_of("mixtral", "uneven", False)
    with pytest.raises(ValueError, match=r"3 ranks of .* do not divide 8 experts"):
        fcp.simulate(fcp.experts(model, axis="ep", shared=("ep",)), ep=3)(params, batch("plain"))


def test_storage_holds_each_expert_once() -> None:
    """Experts copied where they should be stored in pieces: over ep by whole experts, over the rest in pieces."""
    model, params = model_of("mixtral", "uneven", False)
    sharded: Any = fcp.transform(model, cp=2, fsdp=4, ep=4)
    found: dict[str, Any] = {}

    def look() -> torch.Tensor:
        found.update(sharded.model_fn.placements(pytree.shapes(params)))
        return fcp.psum(torch.zeros(()), tuple(sharded.axes))

    fcp.simulate(look, **sharded.axes)()
    experts, dense = (found[f"model.layers.0.{name}"] for name in ("mlp.experts.down_proj", "self_attn.q_proj.weight"))
    assert [axes for axes, _ in experts.slices] == [("fsdp_ep", "cp")] and experts.stored == ("fsdp",)
    assert dense.slices == () and dense.stored == ("fsdp", "fsdp_ep", "cp")


def test_the_models_that_have_no_experts_say_nothing() -> None:
    """Statistics where there are none."""
    model = mixtral.tiny(model_type="qwen3_moe", mlp_only_layers=(0, 1))
    assert model(model.init(), batch_of(tokens(1, 5))).statistics is None

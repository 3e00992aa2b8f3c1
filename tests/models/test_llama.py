"""models.llama by itself: its rules, its parameters, what each token can see, and what its config refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from fcp.transforms._shard_params import check_rules
from models import llama
from tests.tolerances import EXACT, FLOAT64
from tests.toys import PACK8, batch_of, gradient, tokens, toy, worst_error

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "smollm": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 3},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


# --- parameters and rules ---------------------------------------------------------------------------------------------


def test_every_leaf_has_one_rule(variant: dict[str, Any]) -> None:
    """Catches a leaf that no rule or two rules match, and a rule left over, for every bias and tie."""
    model = llama.tiny(**variant)
    params = model.init()
    shapes = {path: tuple(x.shape) for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True)}
    assert set(check_rules(model.rules, shapes)) == set(shapes)
    assert shapes == llama.shapes(model.config)


def test_a_missing_or_a_second_rule_is_noticed() -> None:
    """Mutants: q_norm without a rule, and every norm with two."""
    model, params = toy(model_type="qwen3")
    batch = batch_of(tokens(1, 8))
    missing = {pattern: rule for pattern, rule in model.rules.items() if "q_norm" not in pattern}
    for rules in (missing, {**model.rules, "*norm*": fcp.Replicated()}):
        with pytest.raises(ValueError, match="q_norm"):
            fcp.transform(replace(model, rules=rules), tp=2)(params, batch)


def test_init_is_deterministic_and_of_the_dtype(variant: dict[str, Any]) -> None:
    """Catches parameters drawn from the global generator or without the seed, and a leaf of another dtype."""
    model = llama.tiny(**variant)
    first = model.init(seed=3)
    torch.manual_seed(0)
    assert worst_error(first, model.init(seed=3)) == EXACT
    assert worst_error(first, model.init(seed=4)) > 1e-3
    for dtype in (torch.float64, torch.bfloat16):
        assert {x.dtype for x in pytree.leaves(model.init(seed=3, dtype=dtype))} == {dtype}
    assert {x.dtype for x in pytree.leaves(first)} == {torch.float32}


def test_a_tied_model_has_one_leaf_with_both_gradients() -> None:
    """C-22. Catches a head of its own, and a table that gets one half of its gradient; mutants: each half alone."""
    tied, params = toy(tie_word_embeddings=True)
    assert "lm_head" not in params
    untied = llama.model(replace(tied.config, tie_word_embeddings=False))
    copies = {**params, "lm_head": {"weight": params["model"]["embed_tokens"]["weight"].clone()}}
    batch = batch_of(tokens(2, 8))
    table = gradient(tied, params, batch)["model"]["embed_tokens"]["weight"]
    parts = gradient(untied, copies, batch)
    below, above = parts["model"]["embed_tokens"]["weight"], parts["lm_head"]["weight"]
    assert fcp.relative_error(below + above, table) <= FLOAT64
    assert fcp.relative_error(below, table) > 1e-3 and fcp.relative_error(above, table) > 1e-3


@pytest.mark.parametrize("axes", [{"tp": 2}, {"fsdp": 2}, {"fsdp": 2, "cp": 2}], ids=str)
def test_the_tied_leaf_stays_one_under_sharding(axes: dict[str, int]) -> None:
    """C-22. Catches a table whose two uses come apart when it is cut or stored in pieces."""
    model, params = toy(tie_word_embeddings=True)
    fcp.compare(model, fcp.transform(model, **axes), params, batch_of(tokens(2, 8))).assert_close(FLOAT64)


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "3 kv heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"sliding_window": 2, "layer_types": ("sliding_attention",)}, "for 2 layers"),
        ({"sliding_window": 2, "layer_types": ("sliding_attention", "linear_attention")}, "linear_attention"),
        ({"layer_types": ("sliding_attention", "full_attention")}, "sliding_window is None"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    """Catches a config that fails later, in a matrix product, or not at all."""
    with pytest.raises(ValueError, match=said):
        llama.tiny(**fields)


def test_which_layers_slide() -> None:
    """Catches layer_types read the wrong way round, and a window on every layer where only some have it."""
    assert [llama.tiny(sliding_window=3).config.window(i) for i in range(2)] == [3, 3]
    mixed = llama.tiny(sliding_window=3, layer_types=("full_attention", "sliding_attention")).config
    assert [mixed.window(i) for i in range(2)] == [None, 3]
    assert llama.tiny().config.window(0) is None


# --- what a token sees ------------------------------------------------------------------------------------------------


def reach(model: fcp.Model, params: Any, row: int, **more: Any) -> Tensor:
    """[seq]: the largest gradient of logits[row] in each token's embedding."""
    embeds = torch.randn(1, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def logits(x: Tensor) -> Tensor:
        out = model(params, {"inputs_embeds": x, **more})
        assert out.logits is not None
        return out.logits[0, row]

    return torch.func.jacrev(logits)(embeds)[:, 0].abs().amax((0, 2))


def test_a_token_sees_the_past_and_no_future() -> None:
    """Catches a mask that is not causal, or that hides the past."""
    model, params = toy()
    for row in (0, 3, 7):
        seen = reach(model, params, row)
        assert (seen[: row + 1] > 0).all() and (seen[row + 1 :] == 0).all()


def test_a_later_token_changes_no_earlier_logit() -> None:
    """Catches a norm or a loss that mixes positions; exact, since nothing of it may be computed from the change."""
    model, params = toy(model_type="qwen3")
    ids = tokens(2, 8)
    changed = torch.cat([ids[:, :5], (ids[:, 5:] + 1) % 64], 1)
    before, after = (model(params, {"input_ids": x}).logits for x in (ids, changed))
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_window_is_its_number_of_keys() -> None:
    """C-13. Catches a window that is off by one: of W 3, row 5 sees tokens 3, 4 and 5 and nothing else."""
    model, params = toy(num_hidden_layers=1, model_type="mistral", sliding_window=3)
    seen = reach(model, params, 5)
    assert (seen[3:6] > 0).all() and (seen[:3] == 0).all() and (seen[6:] == 0).all()


def test_windows_add_up_over_layers() -> None:
    """Catches a window on the wrong layers: two of W 3 reach back 4 tokens, one of the two everything."""
    both, params = toy(model_type="qwen2", sliding_window=3)
    assert (reach(both, params, 7) > 0).tolist() == [False] * 3 + [True] * 5
    one = llama.model(replace(both.config, layer_types=("full_attention", "sliding_attention")))
    assert (reach(one, params, 7) > 0).all()


def test_a_packed_document_sees_nothing_of_another() -> None:
    """C-08. Catches documents that leak into each other, with a mask of ones given or not."""
    model, params = toy()
    packed = {"position_ids": torch.tensor([PACK8])}
    for more in (packed, {**packed, "attention_mask": torch.ones(1, 8, dtype=torch.int64)}):
        seen = reach(model, params, 7, **more)
        assert (seen[:3] == 0).all() and (seen[3:] > 0).all()


def test_packed_documents_are_their_own_rows() -> None:
    """C-02. Catches a target over a document's end and positions that do not restart."""
    model, params = toy()
    ids = tokens(1, 8)
    packed = model(params, batch_of(ids, position_ids=torch.tensor([PACK8])))
    first, second = (model(params, batch_of(part)) for part in (ids[:, :3], ids[:, 3:]))
    assert fcp.relative_error((first.loss * 2 + second.loss * 4) / 6, packed.loss) <= FLOAT64
    assert fcp.relative_error(torch.cat([first.logits, second.logits], 1), packed.logits) <= FLOAT64


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_embeddings_equal_tokens_through_the_table(variant: dict[str, Any]) -> None:
    """Catches embeddings that take another path than tokens; their loss and logits are the same numbers."""
    model, params = toy(**variant)
    ids = tokens(2, 8)
    by_tokens = model(params, batch_of(ids))
    table = params["model"]["embed_tokens"]["weight"]
    by_embeds = model(params, {"inputs_embeds": table[ids], "labels": ids})
    assert torch.equal(by_tokens.logits, by_embeds.logits) and torch.equal(by_tokens.loss, by_embeds.loss)


def test_no_labels_no_loss() -> None:
    """Catches a loss of 0 where there is nothing to measure, and logits that depend on labels being there."""
    model, params = toy()
    ids = tokens(2, 8)
    out = model(params, {"input_ids": ids})
    assert out.loss is None
    assert torch.equal(out.logits, model(params, batch_of(ids)).logits)


def test_no_targets_give_no_gradient() -> None:
    """C-05. Catches 0/0 where every label is ignored."""
    model, params = toy()
    batch = {"input_ids": tokens(1, 8), "labels": torch.full((1, 8), -100)}
    assert model(params, batch).loss == 0
    assert all((x == 0).all() for x in pytree.leaves(gradient(model, params, batch)))


# --- faults that only a sharded model shows ---------------------------------------------------------------------------


def inside(model: fcp.Model, **axes: int) -> Any:
    """Loss and gradients as processes take them: each simulated rank differentiates its own function."""
    sharded = fcp.shard_params(model, axis="tp")
    return fcp.simulate(fcp.value_and_grad(sharded), **axes)


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied", "qwen3-biases"])
def test_gradients_taken_on_each_rank_are_the_whole_ones(name: str) -> None:
    """C-20. Catches a leaf whose ranks each hold a part of its gradient: biases, per-head norms, tied tables."""
    model, params = toy(**VARIANTS[name])
    inputs = fcp.prepare(batch_of(tokens(2, 8)))
    _, grads = inside(model, tp=2)(params, inputs)
    assert worst_error(gradient(model, params, inputs), grads) <= FLOAT64


@pytest.mark.parametrize("leaf", ["q_norm", "k_norm"])
def test_a_per_head_norm_that_is_not_summed_is_noticed(leaf: str) -> None:
    """C-20, mutant: the norm is Replicated. On each rank its gradient is then a part."""
    model, params = toy(model_type="qwen3")
    rules = {p: fcp.Replicated() if leaf in p else rule for p, rule in model.rules.items()}
    with pytest.raises(ValueError, match=rf"{leaf}.*differs"):
        inside(replace(model, rules=rules), tp=2)(params, fcp.prepare(batch_of(tokens(2, 8))))


def _bias_on_every_rank(ops: fcp.Ops, x: Tensor, params: Any) -> Tensor:
    return ops.leave(fcp.linear(x, params["weight"], params.get("bias")))


def _no_leave(ops: fcp.Ops, x: Tensor, params: Any) -> Tensor:
    x = fcp.linear(x, params["weight"])
    return x + params["bias"] if "bias" in params else x


@pytest.mark.parametrize(
    ("mutant", "noticed"),
    [(_bias_on_every_rank, None), (_no_leave, "differs between the ranks")],
    ids=["bias-on-every-rank", "no-leave"],
)
def test_a_join_that_is_wrong_only_under_tp_is_noticed(
    mutant: Any, noticed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: the bias before the sum (it is added once a rank), and no sum at all."""
    model, params = toy(**VARIANTS["llama-biases"])
    batch = batch_of(tokens(2, 8))
    expected = model(params, batch)
    monkeypatch.setattr(llama, "join", mutant)
    assert fcp.relative_error(expected.logits, model(params, batch).logits) <= FLOAT64  # alone the mutant is right
    sharded = fcp.transform(model, tp=2)
    if noticed is None:
        assert fcp.relative_error(expected.logits, sharded(params, batch).logits) > 1e-6
    else:
        with pytest.raises(ValueError, match=noticed):
            sharded(params, batch)


def test_work_that_is_not_entered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the MLP without `enter`; each rank's gradient of the residual stream is then a part."""
    model, params = toy()

    def mlp(ops: fcp.Ops, params: Any, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(llama.project(x, params["gate_proj"]))
        return llama.join(ops, gate * llama.project(x, params["up_proj"]), params["down_proj"])

    monkeypatch.setattr(llama, "mlp", mlp)
    with pytest.raises(ValueError, match="differs"):
        inside(model, tp=2)(params, fcp.prepare(batch_of(tokens(2, 8))))

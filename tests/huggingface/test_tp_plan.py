"""Tensor parallelism by transformers' plans: the rules they become, what they leave out, and faulty ones refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fcp
from fcp import Replicated, Shared, Split, huggingface, pytree
from fcp.huggingface import _tp_plan
from fcp.testing import wide
from tests.huggingface.modules import module_of, tokens
from tests.tolerances import FLOAT64

IDS = tokens()
BATCH = {"input_ids": IDS, "labels": IDS}


def faulty(monkeypatch: pytest.MonkeyPatch, style: str, **changes: Any) -> None:
    """One style does something else."""
    monkeypatch.setattr(_tp_plan, "STYLES", {**_tp_plan.STYLES, style: replace(_tp_plan.STYLES[style], **changes)})


def test_the_rules_of_a_plan() -> None:
    model, params = huggingface.functional(module_of("qwen3", tie_word_embeddings=True))
    layer, attention = "model.layers.*.", "model.layers.*.self_attn."
    assert model.rules is not None
    assert dict(model.rules) == {
        "model.embed_tokens.weight": Split(0, vocab=96),
        f"{attention}q_proj.weight": Split(0, blocks=4),
        f"{attention}k_proj.weight": Split(0, blocks=2),
        f"{attention}v_proj.weight": Split(0, blocks=2),
        f"{attention}o_proj.weight": Split(1, blocks=4),
        f"{attention}q_norm.weight": Shared(),
        f"{attention}k_norm.weight": Shared(),
        f"{layer}mlp.gate_proj.weight": Split(0),
        f"{layer}mlp.up_proj.weight": Split(0),
        f"{layer}mlp.down_proj.weight": Split(1),
        f"{layer}input_layernorm.weight": Replicated(),
        f"{layer}post_attention_layernorm.weight": Replicated(),
        "model.norm.weight": Replicated(),
    }
    assert "lm_head" not in params


@pytest.mark.parametrize(
    "kind", ["qwen3", "gpt_neox", "olmo2", "phi3", "deepseek_v2", "mixtral", "mimo_v2_flash", "cohere"]
)
def test_each_rank_has_the_modules_gradients(kind: str) -> None:
    """Heads and widths cut, whole values cut and joined, a shared rotary key, experts, sinks, a scaled head.

    The derivative is taken on each rank, as processes do: there a missing enter, or a parameter that split work reads
    whole and whose gradients nobody adds up, is seen.
    """
    with wide():
        model, params = huggingface.functional(module_of(kind))
        expected, wanted = fcp.value_and_grad(model)(params, BATCH)
        for sizes in ({"tp": 2}, {"cp": 2, "tp": 2}):
            sharded = fcp.transform(model, **sizes)
            fcp.compare(model, sharded, params, BATCH).assert_close(FLOAT64)
            out, grads = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sizes)(params, BATCH)
            assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
            errors = _errors(wanted, grads)
            assert max(errors.values()) < FLOAT64, errors


def _errors(expected: Any, actual: Any) -> dict[str, float]:
    pairs = zip(pytree.paths(expected), pytree.leaves(expected), pytree.leaves(actual), strict=True)
    return {path: fcp.relative_error(a, b) for path, a, b in pairs}


def test_what_a_plan_leaves_out_is_found() -> None:
    """A per-head norm that the plan does not name: its gradients differ between the ranks, and add up."""
    module = module_of("qwen3")
    module._tp_plan = {name: style for name, style in module.tp_plan.items() if "norm" not in name}
    assert not any("norm" in name for name in module.tp_plan)
    model, _ = huggingface.functional(module)
    assert model.rules is not None
    assert model.rules["model.layers.*.self_attn.q_norm.weight"] == Shared()
    assert model.rules["model.layers.*.input_layernorm.weight"] == Replicated()


def _unchanged(module: Any, forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


def _bias_on_every_rank(module: Any, forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return _tp_plan._ops().leave(forward(x))


@pytest.mark.parametrize(
    ("kind", "style", "changes", "says"),
    [
        (
            "qwen3",
            "rowwise",
            {"around": _unchanged},
            "takes a value that every rank holds alike, and was given one that differs",
        ),
        ("qwen3", "colwise", {"around": _unchanged}, "a gradient differs between the ranks"),
        ("starcoder2", "rowwise", {"around": _bias_on_every_rank}, "the output would be another one"),
        ("qwen3", "replicated_with_grad_allreduce", {"shared": False, "cut": "in"}, "q_norm.weight would differ"),
        ("mixtral", "moe_tp_experts", {"around": _tp_plan._only_leave}, "a gradient differs between the ranks"),
        ("mixtral", "packed_colwise", {"packed": False}, "the output would be another one"),
        ("deepseek_v2", "mla_kv_a_proj", {"around": None}, "would"),
        ("olmo2", "rowwise_split_input", {"around": _tp_plan._leave}, "does not run on a rank's part"),
    ],
)
def test_a_faulty_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, style: str, changes: dict[str, Any], says: str
) -> None:
    """A sum left out, a bias added once a rank, a gradient that misses a sum, halves of a fused matrix cut as one."""
    faulty(monkeypatch, style, **changes)
    model, _ = huggingface.functional(module_of(kind))
    with pytest.raises(ValueError, match=f"cannot be split over tp by the plan that it carries: .*{says}"):
        fcp.transform(model, tp=2)


def test_an_unknown_style_is_refused_by_name() -> None:
    module = module_of("llama")
    module._tp_plan = {**module.tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    model, params = huggingface.functional(module)
    with pytest.raises(ValueError, match=r"the style 'diagonal' on model.layers.0.mlp.up_proj, which is not known"):
        fcp.transform(model, tp=2)
    fcp.compare(model, fcp.transform(model, cp=2), params, BATCH)  # the rest does not ask for it


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    model, _ = huggingface.functional(module_of("llama"))
    with pytest.raises(ValueError, match=r"tp=4 does not divide 2 blocks .*Below 4, tp may be 1, 2"):
        fcp.transform(model, tp=4)


def test_a_module_without_a_plan_is_refused() -> None:
    model, _ = huggingface.functional(module_of("gpt2"))
    assert model.rules is None
    with pytest.raises(ValueError, match="needs rules"):
        fcp.transform(model, tp=2)

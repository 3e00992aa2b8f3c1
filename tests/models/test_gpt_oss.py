"""models.gpt_oss: transformers' numbers, checkpoints bit for bit, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import fcp
from fcp.typing import Replicated
from models import gpt_oss
from tests.models.parity import BATCHES, assert_checkpoints, assert_equal, assert_noticed
from tests.toys import batch_of, randomized, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"rope_scaling": {**gpt_oss.DEFAULT_ROPE, "original_max_position_embeddings": 4, "factor": 8.0}},
    "one choice": {"num_experts_per_tok": 1, "swiglu_limit": 0.05, "attention_bias": False},
    "auxiliary": {"output_router_logits": True, "router_aux_loss_coef": 0.5, "swiglu_alpha": 1.0},
}

DENSE = {"full_attention": {}, "sliding_attention": {"window": 3}}
"""transformers' gpt-oss builds its masks without position ids, so that packed documents would see each other."""


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, kind: str) -> None:
    """Catches a sink, window, clamp, bias, interleaving or routing weight that is not gpt-oss's."""
    if variant == "auxiliary" and kind == "packed":
        pytest.skip("its auxiliary loss wants a mask of tokens, its attention one of pairs")
    assert_equal(gpt_oss, gpt_oss.tiny(**VARIANTS[variant]), kind, DENSE if kind == "packed" else None)


@pytest.mark.parametrize("change", [{"swiglu_limit": 0.05}, {"layer_types": ("full_attention", "sliding_attention")}])
def test_the_comparison_notices(change: dict[str, Any]) -> None:
    """Mutants: gates that are clamped elsewhere; the other layers slide."""
    assert_noticed(gpt_oss, gpt_oss.tiny(), gpt_oss.tiny(**change))


def test_sinks_that_do_not_follow_their_heads_are_refused() -> None:
    """Mutant: every rank has all sinks, where it has some of the heads."""
    made = gpt_oss.tiny()
    rules = {**made.rules, "model.layers.*.self_attn.sinks": Replicated()}
    wrong = fcp.transform(dataclasses.replace(made, rules=rules), tp=2)
    with pytest.raises(Exception, match="sinks"):
        wrong(randomized(made), batch_of(tokens(1, 8)))


def test_checkpoints_both_ways(tmp_path: Path) -> None:
    """A tensor transposed, renamed or rounded on its way through a file, ours or transformers'."""
    assert_checkpoints(gpt_oss, gpt_oss.tiny(rope_scaling=gpt_oss.DEFAULT_ROPE), tmp_path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 4"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        ({"vocab_size": None}, "vocab_size missing"),
    ],
)
def test_refusals(setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    with pytest.raises(ValueError, match=words):
        gpt_oss.config_from_json({**gpt_oss.config_to_json(gpt_oss.tiny().config), **setting})

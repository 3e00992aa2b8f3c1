"""models.deepseek: transformers' numbers, checkpoints bit for bit, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from fcp import huggingface, pytree
from models import deepseek
from tests.models.parity import BATCHES, assert_checkpoints, assert_equal, assert_noticed
from tests.toys import batch_of, randomized, tokens

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_scaling": YARN, "n_shared_experts": 2, "num_experts_per_tok": 3},
    "without a latent": {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    "one group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    "dense": {"first_k_dense_replace": 2, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, kind: str) -> None:
    """Catches a latent, norm, rotation, scale, group or routing weight that is not DeepSeek's."""
    assert_equal(deepseek, deepseek.tiny(**VARIANTS[variant]), kind)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("plain", {"rope_interleave": False}),
        ("plain", {"n_group": 1, "topk_group": 1}),
        ("plain", {"routed_scaling_factor": 1.0}),
        ("yarn", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}),
    ],
)
def test_the_comparison_notices(variant: str, change: dict[str, Any]) -> None:
    """Mutants: halves rotated in the place of pairs, no groups, no factor, scores that are sharper."""
    settings = VARIANTS[variant]
    assert_noticed(deepseek, deepseek.tiny(**settings), deepseek.tiny(**{**settings, **change}))


def test_a_shared_key_that_is_not_entered_is_noticed() -> None:
    """Mutant: each rank's heads read the shared rotary key, whose gradient is then each rank's part alone."""
    made = deepseek.tiny()
    params, inputs = randomized(made), fcp.prepare(batch_of(tokens(2, 8)))

    def mutant(params: Any, inputs: Any, ops: Any) -> fcp.Output:
        enter = ops.enter  # the shared key alone has a dim for heads, of size 1
        return made.apply(params, inputs, replace(ops, enter=lambda x: x if x.dim() == 4 else enter(x)))

    for apply in (made.apply, mutant):
        sharded = fcp.transform(replace(made, apply=apply), tp=2)
        inside = fcp.simulate(fcp.value_and_grad(sharded.model_fn), tp=2)
        if apply is mutant:
            with pytest.raises(ValueError, match="differs between the ranks"):
                inside(params, inputs)
        else:
            inside(params, inputs)


def test_the_correction_bias_moves_the_choice_and_has_no_gradient() -> None:
    """A bias that is a part of the weights, or that nothing reads."""
    made = deepseek.tiny()
    params, batch = randomized(made), batch_of(tokens(2, 8))
    out, grads = fcp.value_and_grad(made)(params, batch)
    assert not grads["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"].any()
    params["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"][2] = -10.0
    counts = made(params, batch).statistics["tokens_per_expert"]
    assert out.statistics["tokens_per_expert"][0, 2] > 0 == counts[0, 2]


@pytest.mark.parametrize("variant", ["plain", "without a latent", "dense"])
def test_checkpoints_both_ways(variant: str, tmp_path: Path) -> None:
    """A name, an order of gate and up, or an expert that comes back as another, in our files or transformers'."""
    assert_checkpoints(deepseek, deepseek.tiny(**VARIANTS[variant]), tmp_path)


def test_the_module_of_further_tokens_is_passed_over(tmp_path: Path) -> None:
    """The real checkpoint, which has one layer more than the model."""
    made = deepseek.tiny()
    params = randomized(made, dtype=torch.float32)
    deepseek.save(tmp_path, made.config, params)
    values, tensors = huggingface.read(tmp_path)
    more = {f"model.layers.2.{name}.weight": torch.zeros(2, 2) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    huggingface.write(tmp_path, {**values, "num_nextn_predict_layers": 1}, {**tensors, **more})
    again, read = deepseek.load(tmp_path)
    assert again.config == made.config and pytree.paths(read) == pytree.paths(params)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model_type": "deepseek_v2"}, "model_type 'deepseek_v2'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"topk_group": 5}, "topk_group 5 of 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 of the experts in 2 groups"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is odd"),
    ],
)
def test_refusals(setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    with pytest.raises(ValueError, match=words):
        deepseek.config_from_json({**deepseek.config_to_json(deepseek.tiny().config), **setting})

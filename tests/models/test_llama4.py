"""models.llama4: transformers' numbers, checkpoints bit for bit, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from models import llama4
from tests.models.parity import BATCHES, assert_checkpoints, assert_equal, assert_noticed
from tests.toys import batch_of, randomized, tokens

SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two choices": {"num_experts_per_tok": 2, "moe_layers": (0, 1), "use_qk_norm": False, "rope_scaling": SCALING},
    "whole": {
        "attention_chunk_size": None,
        "layer_types": ("full_attention",) * 2,
        "no_rope_layers": (0, 1),
        "moe_layers": (),
    },
    "biases": {"attention_bias": True, "no_rope_layers": (1, 1)},  # without rotation a key's bias has no gradient
    "chunks without rope": {"layer_types": ("chunked_attention",) * 2, "attention_chunk_size": 3},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, kind: str) -> None:
    """Catches a chunk, rotation, norm, temperature, routing weight or shared expert that is not Llama 4's."""
    settings = dict(VARIANTS[variant])
    if kind == "packed":  # the module's note: transformers tunes by the index in the row
        settings["attn_temperature_tuning"] = False
    assert_equal(llama4, llama4.tiny(**settings), kind)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_chunk_size": 5},
        {"attn_temperature_tuning": False},
        {"use_qk_norm": False},
        {"num_experts_per_tok": 2},
    ],
    ids=str,
)
def test_the_comparison_notices(change: dict[str, Any]) -> None:
    """Mutants: another chunk, no temperature, no norms, a second choice."""
    assert_noticed(llama4, llama4.tiny(), llama4.tiny(**change))


def test_packed_documents_are_what_they_are_apart() -> None:
    """A temperature, or a chunk, that follows the place in the row."""
    made = llama4.tiny()
    params, ids = randomized(made), tokens(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = made(params, batch_of(ids, position_ids=positions)).logits
    apart = [made(params, batch_of(each)).logits for each in (ids[:, :5], ids[:, 5:])]
    assert fcp.relative_error(torch.cat(apart, 1), packed) < 1e-12
    sharded = fcp.transform(made, cp=3)(params, batch_of(ids, position_ids=positions)).logits
    assert fcp.relative_error(torch.cat(apart, 1), sharded) < 1e-12


@pytest.mark.parametrize("variant", ["plain", "two choices"])
def test_checkpoints_both_ways(variant: str, tmp_path: Path) -> None:
    """A tensor transposed, renamed or rounded on its way through a file, ours or transformers'."""
    assert_checkpoints(llama4, llama4.tiny(**VARIANTS[variant]), tmp_path)


def test_what_a_file_leaves_out() -> None:
    """Layers of another kind than transformers' defaults."""
    values = llama4.config_to_json(llama4.tiny(num_hidden_layers=8, **EIGHT).config)
    for name in ("no_rope_layers", "layer_types", "moe_layers"):
        del values[name]
    config = llama4.config_from_json({**values, "interleave_moe_layer_step": 2})
    assert config.no_rope_layers == (1, 1, 1, 0) * 2 and config.moe_layers == (1, 3, 5, 7)
    assert [config.chunk(index) for index in range(4)] == [4, 4, 4, None]


EIGHT = {"no_rope_layers": (1,) * 8, "layer_types": ("full_attention",) * 8}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model_type": "llama4"}, "model_type 'llama4'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"moe_layers": [2]}, "moe_layers"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 of 4"),
    ],
)
def test_refusals(setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    with pytest.raises(ValueError, match=words):
        llama4.config_from_json({**llama4.config_to_json(llama4.tiny().config), **setting})

"""Settings of a configuration that change what attention does, away from the defaults that the sweep uses."""

from typing import Any

import pytest

from fcp import huggingface
from tests.huggingface.modules import mixin_of, module_of, passes

pytest.importorskip("transformers")

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

SOUND: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}},
    ),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("granite", {"attention_multiplier": 0.3, "logits_scaling": 3.0}),
    ("llama4_text", {"attn_temperature_tuning": True, "floor_scale": 3, "attn_scale": 0.5}),
    ("gpt_neo", {"window_size": 40}),
]


@pytest.mark.parametrize(("kind", "changes"), SOUND, ids=str)
def test_a_setting_is_honoured(kind: str, changes: dict[str, Any]) -> None:
    """Two kv heads of a fused projection, a scale a layer, rope scaling, a temperature by position, a long window."""
    tests = ("test_function_is_module_eager", "test_packed_is_each_document_alone", "test_cp_packed")
    passes(mixin_of(kind, **changes), *tests)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("falcon", {"alibi": True}, "mask itself"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
        ("bert", {"is_decoder": False}, "not causal"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "rope scaling of kind dynamic"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    """Biases by distance, attention to what comes later, tables that depend on the length of the slice."""
    with pytest.raises(ValueError, match=says):
        huggingface.functional(module_of(kind, **changes))

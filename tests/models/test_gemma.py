"""models.gemma: transformers' numbers for Gemma 2 and Gemma 3, checkpoints bit for bit, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from models import gemma
from tests.models.parity import BATCHES, assert_checkpoints, assert_equal, assert_noticed
from tests.toys import randomized, tokens

LINEAR = {"rope_type": "linear", "factor": 8.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    "gemma3": {"model_type": "gemma3_text"},
    "gemma3-scaled": {"model_type": "gemma3_text", "rope_scaling": LINEAR, "final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, kind: str) -> None:
    """Catches a cap, norm, window, scale or rotary base that is not Gemma's, or another layer's."""
    assert_equal(gemma, gemma.tiny(**VARIANTS[variant]), kind)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"query_pre_attn_scalar": 8}),
        ("gemma3", {"rope_local_base_freq": 1e6}),
    ],
)
def test_the_comparison_notices(variant: str, change: dict[str, Any]) -> None:
    """Mutants: no cap on the head, another on attention, another scale, local layers with the global base."""
    settings = VARIANTS[variant]
    assert_noticed(gemma, gemma.tiny(**settings), gemma.tiny(**{**settings, **change}))


def test_a_cap_that_tp_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the vocabulary-parallel head gives logits without the cap."""
    from fcp.transforms import _shard_params

    made = gemma.tiny()
    params, batch = randomized(made), {"input_ids": tokens(2, 8)}
    expected = made(params, batch).logits
    assert fcp.relative_error(expected, fcp.transform(made, tp=2)(params, batch).logits) < 1e-10
    monkeypatch.setattr(_shard_params, "cap", lambda scores, softcap: scores)
    assert fcp.relative_error(expected, fcp.transform(made, tp=2)(params, batch).logits) > 1e-2


@pytest.mark.parametrize("variant", ["gemma2", "gemma3-scaled"])
def test_checkpoints_both_ways(variant: str, tmp_path: Path) -> None:
    """A tensor transposed, renamed or rounded on its way through a file, ours or transformers'."""
    assert_checkpoints(gemma, gemma.tiny(**VARIANTS[variant]), tmp_path)


def test_old_files_are_read_alike() -> None:
    """A file from before `rope_parameters` and `layer_types`, whose local layers take the global base."""
    made = gemma.tiny(model_type="gemma3_text", rope_scaling=LINEAR, num_hidden_layers=6, layer_types=None)
    values = gemma.config_to_json(made.config)
    del values["rope_parameters"], values["layer_types"]
    values.update(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=LINEAR, sliding_window_pattern=3)
    config = gemma.config_from_json(values)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_scaling) == (5e5, 2e4, LINEAR)
    assert [config.window(index) for index in range(6)] == [3, 3, None] * 2


def test_init_is_a_model_whose_norms_multiply_by_one() -> None:
    """Norm weights drawn as ones, so that a new model's norms multiply by two."""
    params = gemma.tiny().init(seed=0)
    assert not params["model"]["norm"]["weight"].any()
    assert torch.isfinite(gemma.tiny()(params, {"input_ids": tokens(1, 4)}).logits).all()


@pytest.mark.parametrize(
    ("variant", "setting", "words"),
    [
        ("gemma2", {"model_type": "gemma3"}, "model_type 'gemma3'"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping of gemma3_text"),
        ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "a scaling of sliding_attention"),
    ],
)
def test_refusals(variant: str, setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    values = gemma.config_to_json(gemma.tiny(**VARIANTS[variant]).config)
    with pytest.raises(ValueError, match=words):
        gemma.config_from_json({**values, **setting})

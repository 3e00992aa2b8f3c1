"""models.gpt_neox: transformers' numbers, checkpoints bit for bit, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import fcp
from fcp.typing import Split
from models import gpt_neox
from tests.models.parity import BATCHES, assert_checkpoints, assert_equal, assert_noticed
from tests.toys import batch_of, randomized, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_fast"},
    "whole heads": {"partial_rotary_factor": 1.0, "attention_bias": False, "rope_theta": 100.0},
    "tied": {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, kind: str) -> None:
    """Catches a residual, bias, norm, rotated part or order of q, k and v that is not GPT-NeoX's."""
    assert_equal(gpt_neox, gpt_neox.tiny(**VARIANTS[variant]), kind)


@pytest.mark.parametrize("change", [{"use_parallel_residual": False}, {"partial_rotary_factor": 0.25}])
def test_the_comparison_notices(change: dict[str, Any]) -> None:
    """Mutants: the MLP reads what attention gave; less of each head is rotated."""
    assert_noticed(gpt_neox, gpt_neox.tiny(), gpt_neox.tiny(**change))


def test_a_rule_with_gpt2s_pieces_is_noticed() -> None:
    """Mutant: the fused matrix cut as three matrices one after another, as GPT-2's is."""
    made = gpt_neox.tiny()
    params, batch = randomized(made), batch_of(tokens(2, 8))
    pieces = Split(0, blocks=4, pieces=(32,) * 3)
    rules = {path: pieces if "query_key_value" in path else rule for path, rule in made.rules.items()}
    wrong = fcp.transform(dataclasses.replace(made, rules=rules), tp=2)(params, batch)
    assert fcp.relative_error(made(params, batch).logits, wrong.logits) > 1e-2


def test_a_parallel_layer_is_joined_once() -> None:
    """Two sums over tp a layer where their sum could be summed."""
    counts = {}
    for parallel in (True, False):
        made = gpt_neox.tiny(use_parallel_residual=parallel, num_hidden_layers=3)
        with fcp.record() as events:
            fcp.transform(made, tp=2)(randomized(made), batch_of(tokens(1, 8)))
        counts[parallel] = sum(event.name == "psum" for event in events)
    assert counts[False] - counts[True] == 3


@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_checkpoints_both_ways(variant: str, tmp_path: Path) -> None:
    """A tensor transposed, renamed or rounded on its way through a file, ours or transformers'."""
    assert_checkpoints(gpt_neox, gpt_neox.tiny(**VARIANTS[variant]), tmp_path)


def test_old_files_are_read_alike() -> None:
    """A file from before `rope_parameters`, whose heads are rotated whole, or with the default base."""
    values = gpt_neox.config_to_json(gpt_neox.tiny().config)
    del values["rope_parameters"]
    config = gpt_neox.config_from_json({**values, "rotary_pct": 0.5, "rotary_emb_base": 500})
    assert (config.partial_rotary_factor, config.rope_theta) == (0.5, 500.0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"hidden_dropout": 0.1}, "hidden_dropout 0.1"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "rotates 0 of 8 dims"),
    ],
)
def test_refusals(setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    with pytest.raises(ValueError, match=words):
        gpt_neox.config_from_json({**gpt_neox.config_to_json(gpt_neox.tiny().config), **setting})

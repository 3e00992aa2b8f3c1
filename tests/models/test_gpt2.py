"""models.gpt2: transformers' numbers, checkpoints bit for bit, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from fcp import pytree
from fcp.typing import Split
from models import gpt2
from tests.grid import VOCAB, batch
from tests.tolerances import PARITY_GRADIENTS, PARITY_LOGITS
from tests.toys import batch_of, randomized, tokens, worst_error

MASKS = ("causal", "packed", "left pad", "right pad")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner": {"n_inner": None},
    "layer scale": {"scale_attn_by_inverse_layer_idx": True},
    "no scale": {"scale_attn_weights": False},
}


def parity(variant: dict[str, Any], mask: str, ours: fcp.Model | None = None) -> tuple[float, float, float]:
    """Errors of loss, logits and gradients against transformers, float32, on the same targets."""
    transformers = pytest.importorskip("transformers")
    made = gpt2.tiny(vocab_size=VOCAB, **variant)
    params, inputs = randomized(made, dtype=torch.float32), batch(mask)
    module = transformers.GPT2LMHeadModel._from_config(
        transformers.GPT2Config(**gpt2.config_to_json(made.config)), attn_implementation="eager"
    )
    named = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    found = module.load_state_dict(named, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    prepared = fcp.prepare(inputs)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 1:] = prepared.targets[:, :-1]
    expected = module.train(False)(**{**inputs, "labels": labels}, use_cache=False)
    expected.loss.backward()
    grads = pytree.nest({name: x.grad for name, x in module.named_parameters()})
    out, ours_grads = fcp.value_and_grad(ours or made)(params, inputs)
    real = inputs.get("attention_mask", torch.ones_like(labels)) == 1
    return (
        fcp.relative_error(expected.loss.detach(), out.loss),
        fcp.relative_error(expected.logits.detach()[real], out.logits[real]),
        worst_error(grads, ours_grads),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, mask: str) -> None:
    """Catches a norm, bias, scale, activation or order of q, k and v that is not GPT-2's."""
    loss, logits, grads = parity(VARIANTS[variant], mask)
    assert loss <= PARITY_LOGITS and logits <= PARITY_LOGITS and grads <= PARITY_GRADIENTS


@pytest.mark.parametrize("change", [{"layer_norm_epsilon": 1e-2}, {"scale_attn_by_inverse_layer_idx": True}])
def test_the_comparison_notices(change: dict[str, Any]) -> None:
    """Mutants: a setting that is off is outside the tolerance."""
    _, logits, grads = parity({}, "causal", gpt2.tiny(vocab_size=VOCAB, **change))
    assert logits > 10 * PARITY_LOGITS and grads > 10 * PARITY_GRADIENTS


def test_a_rule_without_pieces_is_noticed() -> None:
    """Mutant: the fused matrix cut as one, so that the first rank holds queries and half of the keys."""
    made = gpt2.tiny(vocab_size=VOCAB)
    whole = {
        path: dataclasses.replace(rule, pieces=None) if isinstance(rule, Split) else rule
        for path, rule in gpt2.rules(made.config).items()
    }
    params, inputs = randomized(made), batch("causal")
    wrong = fcp.transform(dataclasses.replace(made, rules=whole), tp=2)(params, inputs)
    assert fcp.relative_error(made(params, inputs).logits, wrong.logits) > 1e-2


def test_positions_past_the_table_are_refused() -> None:
    """A row of another position, read without a word, on one device or on several, by the whole batch or inside it."""
    made = gpt2.tiny(n_positions=7)
    params, sharded = randomized(made), fcp.transform(made, cp=2)
    for given in (batch_of(tokens(1, 8)), batch_of(tokens(1, 4), position_ids=torch.tensor([[0, 1, 7, 8]]))):
        for fn in (made, sharded, fcp.value_and_grad(made), fcp.value_and_grad(sharded)):
            with pytest.raises(ValueError, match=r"position_ids go up to [78], and this model has learned 7 positions"):
                fn(params, given)
    packed = batch_of(tokens(1, 8), position_ids=torch.tensor([[*range(7), 0]]))
    assert torch.isfinite(fcp.transform(made, cp=3)(params, packed).logits).all()
    traced = made.apply(params, fcp.prepare(batch_of(tokens(1, 8))), fcp.LOCAL)  # what a trace would do
    assert traced.logits.isnan().all()


def test_dropout_is_read_written_and_refused_where_it_would_count() -> None:
    """A rate that is lost between files; a training step that leaves dropout out without a word."""
    values = {**gpt2.config_to_json(gpt2.tiny().config), "resid_pdrop": 0.3}
    del values["attn_pdrop"]
    config = gpt2.config_from_json(values)
    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == (0.1, 0.0, 0.3)
    assert gpt2.config_to_json(config)["resid_pdrop"] == 0.3
    with pytest.raises(ValueError, match=r"resid_pdrop.*dropout is not part of a pure function"):
        fcp.transform(gpt2.model(config), cp=2)
    with pytest.raises(ValueError, match=r"embd_pdrop 1\.5 is no rate"):
        gpt2.tiny(embd_pdrop=1.5)


def test_checkpoints_are_bit_equal_both_ways(tmp_path: Path) -> None:
    """A tensor transposed, renamed or rounded on its way through a file, ours or transformers'."""
    transformers = pytest.importorskip("transformers")
    made = gpt2.tiny()
    params = randomized(made, dtype=torch.float32)
    gpt2.save(tmp_path / "ours", made.config, params)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(module, transformers.GPT2LMHeadModel)
    module.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again, read = gpt2.load(tmp_path / folder)
        assert again.config == made.config
        pairs = zip(pytree.leaves(params), pytree.leaves(read), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_head": 5}, "does not divide"),
    ],
)
def test_refusals(setting: dict[str, Any], words: str) -> None:
    """A checkpoint that loads, runs and is wrong."""
    with pytest.raises(ValueError, match=words):
        gpt2.config_from_json({**gpt2.config_to_json(gpt2.tiny().config), **setting})

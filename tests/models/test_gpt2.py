"""models.gpt2: transformers' numbers, checkpoints bit for bit, and the equivalence grid."""

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
from tests.tolerances import FLOAT64, PARITY_GRADIENTS, PARITY_LOGITS
from tests.toys import batch_of, gradient, randomized, tokens, worst_error

MASKS = ("causal", "packed", "left pad", "right pad")
MESHES = ({"cp": 2}, {"cp": 3}, {"cp": 4}, {"tp": 2}, {"fsdp": 2}, {"cp": 2, "tp": 2})
CASES = [(heads, mask, mesh) for heads in (4, 6) for mask in MASKS for mesh in MESHES]
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


def check(heads: int, mask: str, mesh: dict[str, int]) -> None:
    made = gpt2.tiny(vocab_size=VOCAB, n_embd=4 * heads, n_head=heads, n_inner=24, n_positions=11)
    params, inputs = randomized(made), batch(mask)
    expected, expected_grads = made(params, inputs), gradient(made, params, inputs)
    sharded = fcp.transform(made, **mesh)
    out = sharded(params, inputs)
    assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
    assert fcp.relative_error(expected.logits, out.logits) < FLOAT64
    assert worst_error(expected_grads, gradient(sharded, params, inputs)) < FLOAT64
    inside = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)
    assert worst_error(expected_grads, inside(params, fcp.prepare(inputs))[1]) < FLOAT64


@pytest.mark.parametrize(("heads", "mask", "mesh"), CASES[::5], ids=str)
def test_sample_of_the_grid(heads: int, mask: str, mesh: dict[str, int]) -> None:
    """Catches a fused matrix cut through q, k and v, a bias added once a rank, padding past the last position."""
    check(heads, mask, mesh)


@pytest.mark.sweep
@pytest.mark.parametrize(("heads", "mask", "mesh"), CASES, ids=str)
def test_grid(heads: int, mask: str, mesh: dict[str, int]) -> None:
    """The whole grid of this family."""
    check(heads, mask, mesh)


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


def test_positions_past_the_table_are_loud() -> None:
    """A row of another position, read without a word, on one device or on several."""
    made = gpt2.tiny(n_positions=7)
    params, inputs = randomized(made), batch_of(tokens(1, 8))
    assert made(params, inputs).logits.isnan().all()
    assert fcp.transform(made, cp=2)(params, inputs).logits.isnan().all()


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

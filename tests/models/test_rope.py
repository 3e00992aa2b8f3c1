"""models._rope: every scaling equals transformers', under cp too, and what is not computed is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from models import llama
from models._rope import apply_rope, check_rope, rope_tables
from tests.tolerances import FLOAT64, PARITY_LOGITS
from tests.toys import batch_of, gradient, randomized, tokens, toy, worst_error

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-gain": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6},
    "yarn-mscale-alone": {**YARN, "mscale": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-whole": {**YARN, "truncate": False},
    "yarn-factor-1": {**YARN, "factor": 1.0},
    "yarn-short": {**YARN, "original_max_position_embeddings": 4},
    "llama3": LLAMA3,
    "llama3-long": {**LLAMA3, "original_max_position_embeddings": 2000, "low_freq_factor": 2.0},
}
DYNAMIC = {"rope_scaling": SCALINGS["dynamic"], "max_position_embeddings": 6}


def tables(config: llama.Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rope_tables(
        positions,
        positions.max() + 1,
        dim=config.head_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=dtype,
    )


@pytest.fixture
def quiet() -> Iterator[None]:
    """transformers logs a line where a yarn scaling's factor is not the ratio of its lengths; it changes nothing."""
    logging = pytest.importorskip("transformers").utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seq", [5, 64, 150])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, seq: int) -> None:
    """Catches a wrong formula, gain or default of a scaling; 64 is the length that the model was made for."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama.tiny(head_dim=32, rope_theta=500.0, rope_scaling=SCALINGS[name]).config
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**llama.config_to_json(config)))
    positions = torch.stack([torch.arange(seq), torch.arange(seq) % 5])
    expected = rotary(torch.zeros(1), positions)
    for ours, theirs in zip(tables(config, positions, torch.float32), expected, strict=True):
        assert fcp.relative_error(theirs, ours[:, 0]) <= 10 * PARITY_LOGITS  # angles up to 150 carry float32's rounding


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in ("default", "yarn-factor-1")])
def test_every_scaling_scales(name: str) -> None:
    """Mutant: the scaling is dropped. Catches a comparison above in which a scaling would change nothing."""
    config = llama.tiny(head_dim=32, rope_theta=500.0, rope_scaling=SCALINGS[name]).config
    positions = torch.arange(150)[None]
    plain = tables(replace(config, rope_scaling=None), positions, torch.float64)
    scaled = tables(config, positions, torch.float64)
    assert max(fcp.relative_error(a, b) for a, b in zip(plain, scaled, strict=True)) > 1e-2


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3"])
def test_logits_equal_transformers(name: str) -> None:
    """Catches tables that are right and used wrongly (the yarn gain on keys only, say), past the original length."""
    transformers = pytest.importorskip("transformers")
    model = llama.tiny(rope_scaling=SCALINGS[name], max_position_embeddings=64)
    params, ids = randomized(model, dtype=torch.float32), tokens(2, 80)
    values = transformers.AutoConfig.for_model(**llama.config_to_json(model.config))
    module = transformers.AutoModelForCausalLM.from_config(values).eval()
    module.load_state_dict(dict(zip(pytree.paths(params), pytree.leaves(params), strict=True)))
    with torch.no_grad():
        expected = module(input_ids=ids).logits
    assert fcp.relative_error(expected, model(params, {"input_ids": ids}).logits) <= PARITY_LOGITS


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    """Catches a rotation that is none (halves paired wrongly): q.k may depend on the distance of positions alone."""
    config = llama.tiny().config
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))

    def product(first: int, second: int) -> Tensor:
        (cos, sin) = tables(config, torch.tensor([[first, second]]), torch.float64)
        q_turned = apply_rope(q, cos[:, :, :1], sin[:, :, :1])
        assert torch.allclose(q_turned.norm(), q.norm())
        return (q_turned * apply_rope(k, cos[:, :, 1:], sin[:, :, 1:])).sum()

    assert torch.allclose(product(9, 4), product(25, 20), rtol=1e-12)
    assert not torch.allclose(product(9, 4), product(9, 5))


def test_float64_tables_are_float64() -> None:
    """Catches tables computed in float32 and widened, which would end every float64 comparison at 1e-7."""
    config, positions = llama.tiny().config, torch.tensor([[1000]])
    cos, _ = tables(config, positions, torch.float64)
    expected = torch.cos(1000 * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    assert fcp.relative_error(expected.repeat(2), cos[0, 0, 0]) <= 1e-12


# --- dynamic scaling is the whole batch's -----------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2}, {"fsdp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("seq", [5, 13], ids=["shorter", "longer"])
def test_dynamic_scaling_is_that_of_the_whole_sequence(seq: int, axes: dict[str, int]) -> None:
    """Catches a stretch computed from a slice, a padded length or a rank's rows."""
    model, params = toy(**DYNAMIC)
    fcp.compare(model, fcp.transform(model, **axes), params, batch_of(tokens(2, seq))).assert_close(FLOAT64)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"fsdp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_dynamic_scaling_where_one_rank_has_the_longest_row(axes: dict[str, int]) -> None:
    """Catches a stretch per dp rank: row 1 is packed short, so its own rank would not stretch at all."""
    model, params = toy(**DYNAMIC)
    positions = torch.stack([torch.arange(12), torch.arange(12) % 4])
    batch = batch_of(tokens(2, 12), position_ids=positions)
    fcp.compare(model, fcp.transform(model, **axes), params, batch).assert_close(FLOAT64)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 4}, {"dp": 2}], ids=str)
def test_a_stretch_from_the_slice_is_noticed(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: num_positions is recomputed from the positions at hand."""
    model, params = toy(**DYNAMIC)
    positions = torch.stack([torch.arange(12), torch.arange(12) % 4])
    batch = batch_of(tokens(2, 12), position_ids=positions)
    expected, expected_grads = model(params, batch), gradient(model, params, batch)

    def from_the_slice(positions: Tensor, num_positions: Tensor, **more: Any) -> Any:
        return rope_tables(positions, positions.amax() + 1, **more)

    monkeypatch.setattr(llama, "rope_tables", from_the_slice)
    assert fcp.relative_error(expected.logits, model(params, batch).logits) == 0  # alone the mutant is right
    sharded = fcp.transform(model, **axes)
    assert fcp.relative_error(expected.logits, sharded(params, batch).logits) > 1e-6
    assert worst_error(expected_grads, gradient(sharded, params, batch)) > 1e-6


# --- what is not computed is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "su", "factor": 2.0}, "su"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}, "original_max"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"rope_type": "linear", "factor": 0.0}, "positive"),
        ({"rope_type": "linear", "factor": "2"}, "positive"),
        ({"rope_type": "linear", "factor": True}, "positive"),
        ({"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}, "long_factor"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
    ],
    ids=str,
)
def test_a_scaling_that_would_be_passed_over_is_refused(scaling: dict[str, Any], said: str) -> None:
    """Catches a number that is read by nothing: the model would run, and differ from what the file says."""
    with pytest.raises(ValueError, match=said):
        check_rope(scaling)
    with pytest.raises(ValueError, match=said):
        llama.tiny(rope_scaling=scaling)


def test_what_changes_nothing_is_accepted() -> None:
    """Catches a refusal of files as transformers writes them: absent numbers are None, whole heads a factor of 1."""
    check_rope(None)
    check_rope({})
    check_rope({"rope_type": "default", "partial_rotary_factor": 1.0, "factor": None})
    check_rope({"type": "yarn", "factor": 4, "truncate": True, "attention_factor": None})


def test_dynamic_scaling_needs_two_pairs() -> None:
    """Catches a division by zero in the first call, where the config could have said it."""
    with pytest.raises(ValueError, match="head_dim 2"):
        llama.tiny(head_dim=2, rope_scaling=SCALINGS["dynamic"])

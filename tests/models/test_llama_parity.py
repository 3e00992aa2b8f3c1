"""models.llama against transformers' own modules: logits, loss and every gradient, on tiny random models.

float32 is compared as it is. In float64 transformers is not float64 throughout: its norms and rotary tables are
computed in float32 at the widest. So for the tight comparison these two, and only these, are exchanged in the module
for float64 ones written here; attention, masks, projections and the loss stay transformers'.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from models import llama
from tests.tolerances import FLOAT64, PARITY_GRADIENTS, PARITY_LOGITS
from tests.toys import PACK8, randomized, tokens, worst_error

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-ungrouped": {"num_key_value_heads": 4},
    "llama-wide-heads": {"head_dim": 12},
    "smollm": {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24},
    "mistral": {"model_type": "mistral", "sliding_window": 3},
    "mistral-full": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-mixed": {
        "model_type": "qwen2",
        "sliding_window": 3,
        "layer_types": ("full_attention", "sliding_attention"),
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3-mixed": {
        "model_type": "qwen3",
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "tie_word_embeddings": True,
    },
}

BATCHES = ("plain", "right-padded", "left-padded", "packed", "embeds")


def module_of(config: llama.Config, params: Any, attention: str = "sdpa") -> Any:
    """transformers' module of a config, with these parameters."""
    values = llama.config_to_json(config)
    made = transformers.AutoConfig.for_model(**values)
    module = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    named = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    module = module.to(next(iter(named.values())).dtype)
    found = module.load_state_dict(named, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert found.unexpected_keys == [] and found.missing_keys == tied
    return module.train(False)


def batch_of_kind(kind: str, config: llama.Config) -> dict[str, Tensor]:
    """Two rows of 8; windows of 3 and 4 are shorter than every row and than one of the packed documents.

    transformers shifts labels over document starts and padding, where `prepare` gives no target. So that both count the
    same tokens, the first label of each document and each padded row is -100, which changes nothing for `prepare`.
    """
    ids = tokens(2, 8, vocab=config.vocab_size)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.tensor([PACK8, [0, 1, 2, 3, 4, 5, 6, 0]])
        batch["labels"] = ids.masked_fill(batch["position_ids"] == 0, -100)
    elif kind == "embeds":
        generator = torch.Generator().manual_seed(3)
        batch["inputs_embeds"] = torch.randn(2, 8, config.hidden_size, generator=generator)
        del batch["input_ids"]
    elif kind != "plain":
        pads = [0, 0, 0, 1, 1, 1, 1, 1]
        pads = pads if kind == "left-padded" else pads[::-1]
        batch["attention_mask"] = torch.tensor([pads, [1] * 8])
        batch["labels"] = torch.where(batch["attention_mask"].cumsum(-1) * batch["attention_mask"] > 1, ids, -100)
    return batch


def of_module(module: Any, batch: dict[str, Tensor]) -> tuple[fcp.Output, Any]:
    """transformers' loss and logits, and its gradients as a pytree."""
    out = module(**batch, use_cache=False)
    out.loss.backward()
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    return fcp.Output(out.loss.detach(), out.logits.detach()), pytree.nest(gradients)


def real(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """The logits of real tokens; what a padded position holds is nobody's business, and differs."""
    mask = batch.get("attention_mask")
    return logits if mask is None else logits[mask == 1]


def measure(config: llama.Config, kind: str, *, attention: str = "sdpa", model: Any = None) -> dict[str, float]:
    """The relative errors of loss, logits and gradients of `model` (default: that of `config`)."""
    params = randomized(llama.model(config), dtype=torch.float32)
    batch = batch_of_kind(kind, config)
    expected, expected_grads = of_module(module_of(config, params, attention), batch)
    out, grads = fcp.value_and_grad(model or llama.model(config))(params, batch)
    if kind == "embeds" and not config.tie_word_embeddings:  # no part of either function
        del grads["model"]["embed_tokens"]
    return {
        "loss": fcp.relative_error(expected.loss, out.loss),
        "logits": fcp.relative_error(real(batch, expected.logits), real(batch, out.logits)),
        "gradients": worst_error(expected_grads, grads),
    }


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_float32_equals_transformers(name: str, kind: str) -> None:
    """Catches a norm, bias, window, mask, head grouping or tie that is not the family's, in value or gradient."""
    config = llama.tiny(**VARIANTS[name]).config
    found = measure(config, kind)
    assert found["loss"] <= PARITY_LOGITS and found["logits"] <= PARITY_LOGITS, found
    assert found["gradients"] <= PARITY_GRADIENTS, found


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-mixed"])
def test_eager_attention_says_the_same(name: str) -> None:
    """Catches an agreement that rests on one kernel: transformers' eager attention builds its masks otherwise."""
    config = llama.tiny(**VARIANTS[name]).config
    found = measure(config, "packed", attention="eager")
    assert found["logits"] <= PARITY_LOGITS and found["gradients"] <= PARITY_GRADIENTS, found


def test_where_transformers_drops_packing() -> None:
    """C-08. transformers packs by position_ids only without a mask and a cache; here a mask of ones changes nothing.

    Catches both a mask of ones that joins documents, and a comparison of packed rows in which nothing was packed.
    """
    config = llama.tiny().config
    params, batch = randomized(llama.model(config), dtype=torch.float32), batch_of_kind("packed", config)
    module = module_of(config, params)
    with_ones = {**batch, "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    with torch.no_grad():
        packed, joined = (module(**x, use_cache=False).logits for x in (batch, with_ones))
    ours = llama.model(config)(params, with_ones).logits
    assert fcp.relative_error(packed, ours) <= PARITY_LOGITS
    assert fcp.relative_error(joined, ours) > 1e-2


class Rotary64(torch.nn.Module):
    """The plain rotary tables (Su et al. 2021), in float64."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 1 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = position_ids[..., None].double() * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def in_float64(module: Any, config: llama.Config) -> Any:
    """The module with its two float32 islands, the norms and the rotary tables, made float64."""
    module.model.rotary_emb = Rotary64(config.head_dim, config.rope_theta)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape[0], eps=config.rms_norm_eps, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    # The loss too is taken in float32 by transformers; the gradient of the logits starts there.
    module.loss_function = lambda logits, labels, vocab_size, **_: torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    )
    return module


@pytest.mark.parametrize("kind", ["plain", "left-padded", "packed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_float64_equals_transformers(name: str, kind: str) -> None:
    """Catches what float32's rounding hides: an epsilon in the wrong place, a gradient that is almost right."""
    config = llama.tiny(**VARIANTS[name]).config
    params = randomized(llama.model(config))
    batch = batch_of_kind(kind, config)
    expected, expected_grads = of_module(in_float64(module_of(config, params), config), batch)
    out, grads = fcp.value_and_grad(llama.model(config))(params, batch)
    assert fcp.relative_error(expected.loss, out.loss) <= FLOAT64
    assert fcp.relative_error(real(batch, expected.logits), real(batch, out.logits)) <= FLOAT64
    assert worst_error(expected_grads, grads) <= FLOAT64


def _changed(**changes: Any) -> Any:
    return lambda config: llama.model(dataclasses.replace(config, **changes))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("mistral", _changed(sliding_window=4)),
        ("mistral", _changed(sliding_window=2)),
        ("mistral", _changed(sliding_window=None)),
        ("qwen3-mixed", _changed(layer_types=("full_attention", "sliding_attention"))),
        ("llama", _changed(rms_norm_eps=1e-3)),
        ("llama", _changed(rope_theta=20000.0)),
        ("llama", _changed(rope_scaling={"rope_type": "linear", "factor": 2.0})),
    ],
    ids=["window+1", "window-1", "no-window", "layers-swapped", "epsilon", "theta", "scaling"],
)
def test_the_comparison_notices(name: str, mutant: Any) -> None:
    """Mutants: a setting that is off by a little is outside the tolerance, so the comparison is worth something."""
    config = llama.tiny(**VARIANTS[name]).config
    found = measure(config, "plain", model=mutant(config))
    assert found["logits"] > 10 * PARITY_LOGITS and found["gradients"] > 10 * PARITY_GRADIENTS, found

"""models.mixtral against transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, and its checkpoints, on tiny random models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from models import mixtral, qwen_moe
from tests.tolerances import PARITY_GRADIENTS, PARITY_LOGITS
from tests.toys import PACK8, randomized, tokens, worst_error

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral-window": {"sliding_window": 3, "num_experts_per_tok": 3},
    "mixtral-auxiliary": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "qwen2": {"model_type": "qwen2_moe", "norm_topk_prob": False},
    "qwen2-mixed": {
        "model_type": "qwen2_moe",
        "sliding_window": 3,
        "layer_types": ("sliding_attention", "full_attention"),
        "mlp_only_layers": (0,),
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "qwen3": {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": False},
    "qwen3-dense-step": {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "attention_bias": True},
    "qwen3-auxiliary": {"model_type": "qwen3_moe", "output_router_logits": True, "router_aux_loss_coef": 0.5},
}
BATCHES = ("plain", "packed", "left-padded", "right-padded")


def batch_of_kind(kind: str) -> dict[str, Tensor]:
    ids = tokens(2, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.tensor([PACK8, [0, 1, 2, 3, 4, 5, 6, 0]])
        batch["labels"] = ids.masked_fill(batch["position_ids"] == 0, -100)
    elif kind != "plain":
        row = [0, 0, 0, 1, 1, 1, 1, 1]
        batch["attention_mask"] = torch.tensor([row if kind == "left-padded" else row[::-1], [1] * 8])
        batch["labels"] = torch.where(batch["attention_mask"].cumsum(-1) * batch["attention_mask"] > 1, ids, -100)
    return batch


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_float32_equals_transformers(name: str, kind: str) -> None:
    """Catches a router, a shared expert, a gate/up order or an auxiliary loss that is not the family's."""
    config = mixtral.tiny(**VARIANTS[name]).config
    params = randomized(mixtral.model(config), dtype=torch.float32)
    made = transformers.AutoConfig.for_model(**mixtral.config_to_json(config))
    module = transformers.AutoModelForCausalLM.from_config(made)
    named = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    found = module.load_state_dict(named)
    assert not found.unexpected_keys and not found.missing_keys
    batch = batch_of_kind(kind)
    expected = module(**batch, use_cache=False)
    expected.loss.backward()
    wanted = pytree.nest({name: x.grad for name, x in module.named_parameters() if x.grad is not None})
    out, grads = fcp.value_and_grad(mixtral.model(config))(params, batch)
    real = batch.get("attention_mask", torch.ones(2, 8)) == 1
    assert fcp.relative_error(expected.loss.detach(), out.loss) <= PARITY_LOGITS
    assert fcp.relative_error(expected.logits.detach()[real], out.logits[real]) <= PARITY_LOGITS
    assert worst_error(wanted, grads) <= PARITY_GRADIENTS
    if config.output_router_logits:
        assert fcp.relative_error(expected.aux_loss.detach(), out.statistics["auxiliary_loss"]) <= PARITY_LOGITS


def test_statistics_count_real_tokens() -> None:
    """C-11. Padding that counts as tokens, on whichever side."""
    model = mixtral.tiny()
    counts = model(randomized(model), batch_of_kind("left-padded")).statistics["tokens_per_expert"]
    assert counts.sum(1).tolist() == [13 * 2, 13 * 2]


@pytest.mark.parametrize("name", ["mixtral", "qwen2-mixed", "qwen3"])
def test_checkpoints_both_ways(name: str, tmp_path: Path) -> None:
    """A name, an order of gate and up, or an expert that comes back as another; transformers reads what is written."""
    model = mixtral.tiny(**VARIANTS[name])
    params = randomized(model, dtype=torch.float32)
    mixtral.save(tmp_path / "ours", model.config, params)
    again, read = (qwen_moe if "qwen" in name else mixtral).load(tmp_path / "ours")
    assert again.config == model.config and worst_error(params, read) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(tokens(2, 8), use_cache=False).logits
    assert fcp.relative_error(logits, model(params, {"input_ids": tokens(2, 8)}).logits) <= PARITY_LOGITS
    theirs.save_pretrained(tmp_path / "theirs")
    _, read = mixtral.load(tmp_path / "theirs")
    assert worst_error(params, read) == 0
    stored = pytree.leaves(mixtral.load(tmp_path / "theirs", lazy=True)[1])  # a slice of experts, across gate and up
    for x, kept in zip(pytree.leaves(params), stored, strict=True):
        assert not isinstance(kept, Tensor) and tuple(kept.shape) == tuple(x.shape) and torch.equal(kept[:], x)
        assert x.dim() < 3 or torch.equal(kept.to(torch.float64)[1:3, 5:-7, 2:], x[1:3, 5:-7, 2:].double())


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    """A setting passed over; a file that lacks an expert."""
    values = mixtral.config_to_json(mixtral.tiny().config)
    with pytest.raises(ValueError, match="router_jitter_noise"):
        mixtral.config_from_json({**values, "router_jitter_noise": 0.1})
    with pytest.raises(ValueError, match="num_experts_per_tok 5 of 4"):
        mixtral.tiny(num_experts_per_tok=5)
    with pytest.raises(ValueError, match="model_type 'llama'"):
        mixtral.config_from_json({**values, "model_type": "llama"})


def test_the_router_chooses_in_float32() -> None:
    """C-27. Two logits that are one value in bfloat16: the larger of them is chosen, whatever the compute dtype."""
    from models._experts import router_logits, softmax_top_k

    x = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0009765625]], dtype=torch.bfloat16)
    _, _, chosen = softmax_top_k(router_logits(x, weight), 1, normalize=True)
    assert chosen.item() == 1
    rounded = (x @ weight.T).float()  # mutant: logits in bfloat16
    assert softmax_top_k(rounded, 1, normalize=True)[2].item() == 0

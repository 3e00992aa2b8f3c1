"""Mixtral as a pure function, and what makes it also Qwen2-MoE and Qwen3-MoE: Llama whose MLP is a choice of experts.

    Mixtral     Jiang et al. 2024, section 2        every MLP is top-k of experts, the k weights add up to 1
    Qwen2-MoE   Yang et al. 2024, section 2.2.2     + a shared expert behind a gate of its own; q, k and v biases
    Qwen3-MoE   Yang et al. 2025, section 2         no shared expert; an RMS norm on each query and key head

Attention, norms and the plain MLP are `models.llama`'s; the router's part is `models._experts`'. Read from top to
bottom: the config, the function, its sparse layer, the parameters, their rules, the checkpoint.

Parameters have the names of transformers' modules, with the experts of a layer in one tensor (`mlp.experts.down_proj`
[experts, hidden, width]). Checkpoint files hold one tensor an expert; they are read either way and written that way.

Two things differ from transformers by intent: the router computes in float32 or wider in every dtype, and padding
counts in no statistic, whichever side it is on.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fcp import linear, pytree
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Expert, Inputs, Output, Params, Replicated, Rules, Split
from models import llama
from models._checkpoint import ExpertNames, read_params, write_params
from models._config_json import fields_from_json, fields_to_json
from models._experts import gated_expert, route_sums, router_logits, softmax_top_k, with_statistics
from models._rope import rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]

DENSE = {"mixtral": "mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}
"""The family without experts whose attention each has."""


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and settings; fields carry config.json's names (`num_local_experts` is also Qwen's `num_experts`).

    `intermediate_size` is the width of Mixtral's experts and of Qwen's layers without experts; `moe_intermediate_size`
    that of Qwen's experts. `output_router_logits` adds the auxiliary loss to the loss, as it does in transformers.

    Raises:
        ValueError: sizes that do not fit together.
    """

    families: ClassVar[Mapping[str, str]] = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}

    model_type: str = "mixtral"
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            wrong.append(f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_local_experts} experts")
        if self.decoder_sparse_step < 1:
            wrong.append(f"decoder_sparse_step {self.decoder_sparse_step} is below 1")
        if self.model_type == "mixtral":
            if self.mlp_only_layers or self.decoder_sparse_step > 1 or not self.norm_topk_prob:
                wrong.append("mlp_only_layers, decoder_sparse_step or norm_topk_prob of mixtral (qwen2_moe has them)")
        elif self.moe_intermediate_size is None:
            wrong.append(f"moe_intermediate_size of {self.model_type} is None")
        if (self.model_type == "qwen2_moe") != (self.shared_expert_intermediate_size is not None):
            wrong.append("shared_expert_intermediate_size is for qwen2_moe, and qwen2_moe needs it")
        if wrong:
            raise ValueError(f"mixtral.Config: {'; '.join(wrong)}")

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2_moe"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.model_type != "qwen2_moe"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3_moe"

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (4 experts of width 24, top-2; the rest is `llama.tiny`'s)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
    }
    kind = overrides.get("model_type", "mixtral")
    if kind != "mixtral":
        sizes.update(moe_intermediate_size=24, intermediate_size=40)
    if kind == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 20
    return model(Config(**{**sizes, **overrides}))


# --- the function -----------------------------------------------------------------------------------------------------


def apply(config: Config, params: Params, inputs: Inputs, ops: Ops) -> Output:
    """The loss, logits and router statistics of a batch."""
    body = params["model"]
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(llama.embed, ops), body["embed_tokens"], inputs.tokens)
    cos, sin = rope_tables(
        inputs.positions,
        inputs.num_positions,
        dim=config.head_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=x.dtype,
    )
    sums = []
    for index, layer_params in enumerate(body["layers"]):
        x, found = ops.layer(partial(_layer, config, index, ops), layer_params, x, cos, sin, inputs.mask, inputs.real)
        sums += [found] if found is not None else []
    table = body["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    total, logits = ops.layer(
        partial(llama.head, config, ops), {"norm": body["norm"], "table": table}, x, inputs.targets
    )
    coefficient = config.router_aux_loss_coef if config.output_router_logits else None
    return with_statistics(
        ops, mean_loss(total, inputs.num_targets), logits, sums, config.num_experts_per_tok, coefficient
    )


def _layer(
    config: Config,
    index: int,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    real: Tensor | None,
) -> tuple[Float[Tensor, "batch seq hidden"], tuple[Tensor, Tensor] | None]:
    """The layer's output, and what `route_sums` gives where it has experts."""
    y = llama.norm(config, x, params["input_layernorm"]["weight"])
    x = x + llama.attention(config, config.window(index), ops, params["self_attn"], y, cos, sin, mask)
    y = llama.norm(config, x, params["post_attention_layernorm"]["weight"])
    if not config.sparse(index):
        return x + llama.mlp(ops, params["mlp"], y), None
    y, sums = _sparse(config, ops, params["mlp"], y, real)
    return x + y, sums


def _sparse(
    config: Config, ops: Ops, params: Params, x: Tensor, real: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The experts that each token chooses, and the one that all share."""
    logits = router_logits(x, params["gate"]["weight"])
    probabilities, weights, indices = softmax_top_k(logits, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    y = ops.experts(x, weights, indices, params["experts"], gated_expert)
    if "shared_expert" in params:
        gate = torch.sigmoid(linear(x, params["shared_expert_gate"]["weight"]))
        y = y + gate * llama.mlp(ops, params["shared_expert"], x)
    return y, route_sums(probabilities, indices, real)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in transformers' module."""
    hidden, experts, width = config.hidden_size, config.num_local_experts, config.expert_width
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in llama.shapes(config).items():
        layer = re.match(r"(model\.layers\.(\d+)\.mlp)\.gate_proj\.weight", name)
        if ".mlp." not in name or not config.sparse(int(name.split(".")[2])):
            found[name] = shape
        elif layer:
            mlp = layer[1]
            found[f"{mlp}.gate.weight"] = (experts, hidden)
            found[f"{mlp}.experts.gate_up_proj"] = (experts, 2 * width, hidden)
            found[f"{mlp}.experts.down_proj"] = (experts, hidden, width)
            if (shared := config.shared_expert_intermediate_size) is not None:
                found[f"{mlp}.shared_expert.gate_proj.weight"] = (shared, hidden)
                found[f"{mlp}.shared_expert.up_proj.weight"] = (shared, hidden)
                found[f"{mlp}.shared_expert.down_proj.weight"] = (hidden, shared)
                found[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices, unit norms, zero biases."""
    return pytree.nest(llama.draw(shapes(config), seed, config.initializer_range, dtype))


def rules(config: Config) -> Rules:
    """Llama's, and: experts whole and apart, the router whole, the shared expert as an MLP."""
    shared = config.shared_expert_intermediate_size
    sparse = {
        "gate.weight": Replicated(),
        "experts.gate_up_proj": Expert(config.num_local_experts),
        "experts.down_proj": Expert(config.num_local_experts),
        "shared_expert.gate_proj.weight": Split(0, blocks=shared),
        "shared_expert.up_proj.weight": Split(0, blocks=shared),
        "shared_expert.down_proj.weight": Split(1, blocks=shared),
        "shared_expert_gate.weight": Replicated(),
    }
    patterns = {re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in shapes(config)}
    found = {name: rule for name, rule in llama.rules(config).items() if name in patterns}
    found.update({f"model.layers.*.mlp.{k}": r for k, r in sparse.items() if f"model.layers.*.mlp.{k}" in patterns})
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------

SPARSE_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")
SPARSE_KEYS += ("shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "output_router_logits")
SPARSE_KEYS += ("router_aux_loss_coef",)

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"sliding_window": None, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
}
"""What a config.json leaves out is what transformers' configuration class says."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a config.json of one of the three families.

    Raises:
        ValueError: another model type, or a setting that this file does not compute.
    """
    kind = values.get("model_type")
    if kind not in DENSE:
        raise ValueError(f"model_type {kind!r} is none of {', '.join(DENSE)}")
    values = {**DEFAULTS[kind], **values}
    if values.pop("router_jitter_noise", 0) or (kind == "qwen2_moe" and not values.pop("qkv_bias", True)):
        raise ValueError("router_jitter_noise, or qwen2_moe without qkv_bias: not computed here")
    sparse = {name: values.pop(name) for name in SPARSE_KEYS if values.get(name) is not None}
    if "num_experts" in sparse:
        sparse.setdefault("num_local_experts", sparse["num_experts"])
        del sparse["num_experts"]
    sparse["mlp_only_layers"] = tuple(sparse.get("mlp_only_layers", ()))
    dense = {name: x for name, x in values.items() if name not in SPARSE_KEYS}
    if values.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= values.keys():
        dense["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if kind == "mixtral" and not (values.get("rope_theta") or (values.get("rope_parameters") or {}).get("rope_theta")):
        dense["rope_theta"] = 1e6
    if values.get("use_sliding_window") and kind != "mixtral" and values.get("layer_types") is None:
        first = values.get("max_window_layers", 28)
        slides = [kind == "qwen3_moe" or (i % 2 == 0 and i < first) for i in range(values.get("num_hidden_layers", 0))]
        dense["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
    names = [field.name for field in dataclasses.fields(llama.Config)]
    fields = fields_from_json({**dense, "model_type": DENSE[kind]}, names)
    return Config(**{**fields, **sparse, "model_type": kind})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model.

    Raises:
        ValueError: what transformers' class of this family does not compute.
    """
    kind = config.model_type
    windows = [config.window(index) for index in range(config.num_hidden_layers)]
    if kind == "qwen3_moe" and len(set(windows)) > 1:
        raise ValueError("config.json: transformers' qwen3_moe has no layers of different windows; qwen2_moe has")
    if kind == "qwen2_moe" and config.attention_bias:
        raise ValueError("config.json: transformers' qwen2_moe has no attention_bias; its q, k and v have biases")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(llama.Config)}
    values = fields_to_json({**fields, "model_type": DENSE[kind]}, windows)
    values.update(model_type=kind, architectures=[f"{config.families[kind]}ForCausalLM"])
    if kind == "qwen3_moe":
        del values["layer_types"], values["max_window_layers"]
    for name in SPARSE_KEYS[1:]:
        values[name] = getattr(config, name)
    values["mlp_only_layers"] = list(config.mlp_only_layers)
    if kind == "mixtral":
        for name in ("moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"):
            del values[name]
    else:
        values["num_experts"] = values.pop("num_local_experts")
    if kind != "qwen2_moe":
        del values["shared_expert_intermediate_size"]
    return values


def load(path: str | Path, dtype: torch.dtype | None = None, *, lazy: bool = False) -> tuple[Model, Params]:
    """Reads a checkpoint folder with config.json and safetensors; `dtype` None keeps the checkpoint's.

    With `lazy` the parameters stay in their files, for `shard` to read a rank's own slices from.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """

    def stacked(path: str | Path, config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
        return _names(config).stacked(path, tensors)

    config, params = read_params(path, dtype, lazy, config_from_json, shapes, stacked)
    return model(config), params


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, one tensor an expert, as transformers does.

    Raises:
        ValueError: parameters that are not this config's, or a config that transformers has no class for.
    """
    write_params(folder, config, params, config_to_json, shapes, lambda config, tensors: _names(config).apart(tensors))


def _names(config: Config) -> ExpertNames:
    if config.model_type == "mixtral":
        return ExpertNames(config.num_local_experts, "block_sparse_moe", "w1", "w3", "w2")
    return ExpertNames(config.num_local_experts)

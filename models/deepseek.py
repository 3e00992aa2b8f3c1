"""DeepSeek V3 (and R1) as a pure function (DeepSeek-AI 2024, section 2.1).

Against Mixtral:

    latent attention  queries, and keys with values, come from narrow latents of the token, each with an RMS norm. A
                      head's key is a part of its own beside a rotary part that all heads share, so queries and keys are
                      longer than values
    router            scores are sigmoids; a bias, which no gradient reaches, corrects them for the choice alone;
                      experts are chosen from the best `topk_group` of `n_group` groups, one being worth its best two
    experts           beside those chosen, shared ones that are one wide MLP; the first layers have a plain MLP

The latents are the same on every tensor-parallel rank: split work begins (`enter`) after their norms, and at the shared
rotary key, which each rank's heads read whole.

The correction bias is a leaf of the parameters as it is a tensor of the checkpoint; its gradient is zero. Training
moves it by `tokens_per_expert` (section 2.1.2). There is no auxiliary loss in the loss, as in transformers; the
statistic is that of the scores made to add up to 1.

Left out: the modules that predict further tokens (`num_nextn_predict_layers`; their tensors are passed over), and
weights in eight bits, which are refused.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fcp import pytree, rms_norm
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Expert, Inputs, Output, Params, Replicated, Rules, Split
from models import llama
from models._checkpoint import ExpertNames, read_params, write_params
from models._config_json import own_fields, rope_fields, rope_to_json
from models._experts import gated_expert, route_sums, router_logits, top_k_of_groups, with_statistics
from models._mlp import mlp_rules, mlp_shapes
from models._rope import apply_rope, apply_rope_to_pairs, check_rope, rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings; fields carry config.json's names.

    `intermediate_size` is the width of layers without experts, `moe_intermediate_size` that of an expert. `q_lora_rank`
    None: queries come from the token itself.

    Raises:
        ValueError: sizes that do not fit together.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_interleave: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
        counts += ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        counts += ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "max_position_embeddings")
        wrong = [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            wrong.append(f"q_lora_rank {self.q_lora_rank} is below 1 (None for queries without a latent)")
        if self.qk_rope_head_dim % 2:
            wrong.append(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, and rotary positions rotate pairs")
        if not wrong and (self.n_routed_experts % self.n_group or self.n_routed_experts < 2 * self.n_group):
            wrong.append(f"{self.n_routed_experts} experts in {self.n_group} groups: equal ones, of 2 or more")
        elif not wrong and not self.topk_group <= self.n_group:
            wrong.append(f"topk_group {self.topk_group} of {self.n_group} groups")
        elif not wrong and not 1 <= self.num_experts_per_tok <= self.topk_group * self.n_routed_experts // self.n_group:
            wrong.append(f"num_experts_per_tok {self.num_experts_per_tok} of the experts in {self.topk_group} groups")
        if wrong:
            raise ValueError(f"deepseek.Config: {'; '.join(wrong)}")
        check_rope(self.rope_scaling)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by; a rope scaling with `mscale_all_dim` sharpens them."""
        scaling = self.rope_scaling or {}
        factor, mscale = float(scaling.get("factor") or 1.0), scaling.get("mscale_all_dim")
        gain = 0.1 * float(mscale) * math.log(factor) + 1.0 if mscale and factor > 1 else 1.0
        return self.qk_head_dim**-0.5 * gain * gain


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (width 32, 4 heads; a plain layer, then one with 2 of 8 experts a token,
    chosen from 2 of 4 groups)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
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
        dim=config.qk_rope_head_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=x.dtype,
    )
    sums = []
    for index, layer_params in enumerate(body["layers"]):
        layer = partial(_layer, config, index >= config.first_k_dense_replace, ops)
        x, found = ops.layer(layer, layer_params, x, cos, sin, inputs.mask, inputs.real)
        sums += [found] if found is not None else []
    table = body["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    head = partial(_head, config, ops)
    total, logits = ops.layer(head, {"norm": body["norm"], "table": table}, x, inputs.targets)
    loss = mean_loss(total, inputs.num_targets)
    return with_statistics(ops, loss, logits, sums, config.num_experts_per_tok, None)


def _head(config: Config, ops: Ops, params: Params, x: Tensor, targets: Tensor | None) -> Any:
    return ops.loss(_norm(config, x, params["norm"]), params["table"]["weight"], targets)


def _norm(config: Config, x: Tensor, params: Params) -> Tensor:
    return rms_norm(x, params["weight"], config.rms_norm_eps)


def _layer(
    config: Config,
    sparse: bool,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    real: Tensor | None,
) -> tuple[Float[Tensor, "batch seq hidden"], tuple[Tensor, Tensor] | None]:
    """The layer's output, and what `route_sums` gives where it has experts."""
    y = _norm(config, x, params["input_layernorm"])
    x = x + _attention(config, ops, params["self_attn"], y, cos, sin, mask)
    y = _norm(config, x, params["post_attention_layernorm"])
    if not sparse:
        return x + llama.mlp(ops, params["mlp"], y), None
    y, sums = _sparse(config, ops, params["mlp"], y, real)
    return x + y, sums


def _attention(
    config: Config, ops: Ops, params: Params, x: Float[Tensor, "batch seq hidden"], cos: Tensor, sin: Tensor, mask: Mask
) -> Float[Tensor, "batch seq hidden"]:
    def heads(latent: Tensor, name: str) -> Float[Tensor, "batch heads seq dim"]:
        return llama.project(ops.enter(latent), params[name]).unflatten(-1, (-1, dims[name])).transpose(1, 2)

    keys_and_values = config.qk_nope_head_dim + config.v_head_dim
    dims = {"q_proj": config.qk_head_dim, "q_b_proj": config.qk_head_dim, "kv_b_proj": keys_and_values}
    rotate = apply_rope_to_pairs if config.rope_interleave else apply_rope
    if config.q_lora_rank is None:
        q = heads(x, "q_proj")
    else:
        latent = llama.project(x, params["q_a_proj"])
        q = heads(rms_norm(latent, params["q_a_layernorm"]["weight"], LATENT_EPS), "q_b_proj")
    own, turned = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    q = torch.cat([own, rotate(turned, cos, sin)], -1)

    latent, shared = llama.project(x, params["kv_a_proj_with_mqa"]).split(
        [config.kv_lora_rank, config.qk_rope_head_dim], -1
    )
    kv = heads(rms_norm(latent, params["kv_a_layernorm"]["weight"], LATENT_EPS), "kv_b_proj")
    own, v = kv.split([config.qk_nope_head_dim, config.v_head_dim], -1)
    shared = ops.enter(rotate(shared[:, None], cos, sin))
    k = torch.cat([own, shared.expand(-1, own.shape[1], -1, -1)], -1)
    out = ops.attention(q, k, v, mask, scale=config.scale)
    return llama.join(ops, out.transpose(1, 2).flatten(2), params["o_proj"])


def _sparse(
    config: Config, ops: Ops, params: Params, x: Tensor, real: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The experts that each token chooses, and those that all share."""
    gate = params["gate"]
    scores = router_logits(x, gate["weight"]).sigmoid()
    corrected = scores + gate["e_score_correction_bias"].detach().to(scores.dtype)
    indices = top_k_of_groups(corrected, config.num_experts_per_tok, groups=config.n_group, kept=config.topk_group)
    weights = scores.gather(-1, indices)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    y = ops.experts(x, weights * config.routed_scaling_factor, indices, params["experts"], gated_expert)
    sums = route_sums(scores / scores.sum(-1, keepdim=True), indices, real)
    return y + llama.mlp(ops, params["shared_experts"], x), sums


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in transformers' module."""
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    heads, rank = config.num_attention_heads, config.q_lora_rank
    queries = heads * config.qk_head_dim
    bias = config.attention_bias
    attention: dict[str, tuple[tuple[int, ...], bool]] = {
        "kv_a_proj_with_mqa": ((config.kv_lora_rank + config.qk_rope_head_dim, hidden), bias),
        "kv_a_layernorm": ((config.kv_lora_rank,), False),
        "kv_b_proj": ((heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), False),
        "o_proj": ((hidden, heads * config.v_head_dim), bias),
    }
    if rank is None:
        attention["q_proj"] = ((queries, hidden), False)
    else:
        attention["q_a_proj"] = ((rank, hidden), bias)
        attention["q_a_layernorm"] = ((rank,), False)
        attention["q_b_proj"] = ((queries, rank), False)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name, (shape, biased) in attention.items():
            found[f"{layer}.self_attn.{name}.weight"] = shape
            if biased:
                found[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        if index < config.first_k_dense_replace:
            found.update(mlp_shapes(f"{layer}.mlp", hidden, config.intermediate_size))
        else:
            found[f"{layer}.mlp.gate.weight"] = (experts, hidden)
            found[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
            found[f"{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
            found[f"{layer}.mlp.experts.down_proj"] = (experts, hidden, width)
            found.update(mlp_shapes(f"{layer}.mlp.shared_experts", hidden, config.n_shared_experts * width))
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices, unit norms, zero biases."""
    return pytree.nest(llama.draw(shapes(config), seed, config.initializer_range, dtype))


def rules(config: Config) -> Rules:
    """Heads and MLPs by output, what follows them by input, the vocabulary; latents, router and experts whole."""
    heads = config.num_attention_heads
    layer: dict[str, Any] = {
        "self_attn.kv_a_*": Replicated(),
        "self_attn.kv_b_proj.weight": Split(0, blocks=heads),
        "self_attn.o_proj.weight": Split(1, blocks=heads),
        "input_layernorm.weight": Replicated(),
        "post_attention_layernorm.weight": Replicated(),
    }
    if config.q_lora_rank is None:
        layer["self_attn.q_proj.weight"] = Split(0, blocks=heads)
    else:
        layer["self_attn.q_a_*"] = Replicated()
        layer["self_attn.q_b_proj.weight"] = Split(0, blocks=heads)
    if config.attention_bias:
        layer["self_attn.o_proj.bias"] = Replicated()
    if config.first_k_dense_replace > 0:
        layer.update(mlp_rules("mlp", config.intermediate_size))
    if config.first_k_dense_replace < config.num_hidden_layers:
        layer["mlp.gate.*"] = Replicated()
        layer["mlp.experts.*"] = Expert(config.n_routed_experts)
        layer.update(mlp_rules("mlp.shared_experts", config.n_shared_experts * config.moe_intermediate_size))
    tables = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not config.tie_word_embeddings)
    return {
        **{f"model.layers.*.{name}": rule for name, rule in layer.items()},
        **dict.fromkeys(tables, Split(0, vocab=config.vocab_size)),
        "model.norm.weight": Replicated(),
    }


# --- checkpoints ------------------------------------------------------------------------------------------------------

COMPUTED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Settings that are no field of the Config, with the values that are computed."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a DeepSeek V3's config.json; what it leaves out has transformers' default.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    values = dict(values)
    latent = "q_lora_rank" in values and values["q_lora_rank"] is None
    heads = values.get("num_key_value_heads")
    if heads not in (None, values.get("num_attention_heads")):
        raise ValueError(f"num_key_value_heads {heads}: every head has a key of its own here; not computed here")
    if values.get("n_routed_experts") is None and values.get("num_local_experts") is not None:
        values["n_routed_experts"] = values.pop("num_local_experts")
    fields = own_fields(values, "deepseek_v3", [field.name for field in dataclasses.fields(Config)], COMPUTED)
    if latent:
        fields["q_lora_rank"] = None
    return Config(**{**fields, **rope_fields(values)})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["rope_parameters"] = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    return {
        **values,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def load(path: str | Path, dtype: torch.dtype | None = None, *, lazy: bool = False) -> tuple[Model, Params]:
    """Reads a checkpoint folder with config.json and safetensors; `dtype` None keeps the checkpoint's.

    With `lazy` the parameters stay in their files, for `shard` to read a rank's own slices from.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """

    def arrange(path: str | Path, config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
        further = f"model.layers.{config.num_hidden_layers}."  # the module that predicts the token after the next
        tensors = {name: x for name, x in tensors.items() if not name.startswith(further)}
        return ExpertNames(config.n_routed_experts).stacked(path, tensors)

    config, params = read_params(path, dtype, lazy, config_from_json, shapes, arrange)
    return model(config), params


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, one tensor an expert, as transformers does.

    Raises:
        ValueError: parameters that are not this config's.
    """
    names = ExpertNames(config.n_routed_experts)
    write_params(folder, config, params, config_to_json, shapes, lambda config, tensors: names.apart(tensors))

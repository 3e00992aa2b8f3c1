"""Llama 4 (text) as a pure function (Meta 2025).

Against Llama:

    chunks        most layers see their own chunk of positions alone (`layer_types`, `attention_chunk_size`)
    no rope       every few layers have no rotary positions and see everything (`no_rope_layers`); there a query is
                  scaled by its position, 1 + attn_scale * log(1 + floor((position + 1) / floor_scale)), so that
                  attention stays as sharp over long texts (Nakanishi 2025)
    rotary pairs  are neighbours; with `use_qk_norm` queries and keys are divided by their rms after the rotation
    experts       on some layers (`moe_layers`): a token's input to an expert is scaled by the sigmoid of its logit, not
                  the expert's output; one expert that all tokens share is added

A scaled input is another row for each choice, so `ops.experts` is handed a token once a choice, with the weight 1.

Three things differ from transformers by intent: the router computes in float32 or wider; padding counts in no
statistic; and a query's position, by which it is scaled, is its position id, so that packed documents are scaled as
they are apart (transformers takes the index in the row). There is no auxiliary loss in the loss, as there.

Left out: pictures (`model_type` "llama4"), which are refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import silu

from fcp import pytree, rms_norm
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Expert, Inputs, Output, Params, Replicated, Rules, Split
from models import llama
from models._checkpoint import read_params, write_params
from models._config_json import own_fields, rope_fields, rope_to_json
from models._experts import route_sums, router_logits, with_statistics
from models._mlp import mlp_rules, mlp_shapes
from models._rope import apply_rope_to_pairs, check_rope, rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]


@dataclass(frozen=True)
class Config:
    """Sizes and settings; fields carry config.json's names.

    `intermediate_size` is the width of an expert, `intermediate_size_mlp` that of layers without. `no_rope_layers` has
    a 1 for each layer with rotary positions and a 0 for one without (transformers' names are what they are);
    `layer_types` says "chunked_attention" or "full_attention"; `moe_layers` lists the layers with experts.

    Raises:
        ValueError: sizes that do not fit together.
    """

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: Mapping[str, Any] | None = None
    no_rope_layers: tuple[int, ...] = (1, 1, 1, 0) * 12
    attention_chunk_size: int | None = 8192
    layer_types: tuple[str, ...] = (*("chunked_attention",) * 3, "full_attention") * 12
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    use_qk_norm: bool = True
    attention_bias: bool = False
    moe_layers: tuple[int, ...] = tuple(range(48))
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_hidden_layers")
        counts += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "floor_scale")
        wrong = [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong.append(f"{self.num_key_value_heads} kv heads do not divide {self.num_attention_heads} query heads")
        if self.head_dim % 2:
            wrong.append(f"head_dim {self.head_dim} is odd, and rotary positions rotate pairs")
        layers = self.num_hidden_layers
        if len(self.no_rope_layers) != layers or not set(self.no_rope_layers) <= {0, 1}:
            wrong.append(f"no_rope_layers {self.no_rope_layers} for {layers} layers: a 0 or 1 for each")
        if len(self.layer_types) != layers or not set(self.layer_types) <= {"chunked_attention", "full_attention"}:
            wrong.append(f"layer_types {self.layer_types} for {layers} layers")
        if self.attention_chunk_size is None and "chunked_attention" in self.layer_types:
            wrong.append("layer_types has chunked_attention, and attention_chunk_size is None")
        elif self.attention_chunk_size is not None and self.attention_chunk_size < 1:
            wrong.append(f"attention_chunk_size {self.attention_chunk_size} is below 1 (None for no chunks)")
        if not set(self.moe_layers) <= set(range(layers)):
            wrong.append(f"moe_layers {self.moe_layers} of {layers} layers")
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            wrong.append(f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_local_experts} experts")
        if wrong:
            raise ValueError(f"llama4.Config: {'; '.join(wrong)}")
        check_rope(self.rope_scaling)

    def chunk(self, layer: int) -> int | None:
        """The chunk of one layer, None for full attention."""
        return self.attention_chunk_size if self.layer_types[layer] == "chunked_attention" else None


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (width 32, 4 query and 2 kv heads of 8): a layer in chunks of 4 with
    rotary positions and a plain MLP, then one with neither and with one of 4 experts a token."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "no_rope_layers": (1, 0),
        "attention_chunk_size": 4,
        "layer_types": ("chunked_attention", "full_attention"),
        "floor_scale": 4,
        "attn_scale": 0.5,
        "moe_layers": (1,),
        "num_local_experts": 4,
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
        dim=config.head_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=x.dtype,
    )
    sums = []
    for index, layer_params in enumerate(body["layers"]):
        layer = partial(_layer, config, index, ops)
        x, found = ops.layer(layer, layer_params, x, cos, sin, inputs.positions, inputs.mask, inputs.real)
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
    index: int,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    mask: Mask,
    real: Tensor | None,
) -> tuple[Float[Tensor, "batch seq hidden"], tuple[Tensor, Tensor] | None]:
    """The layer's output, and what `route_sums` gives where it has experts."""
    y = _norm(config, x, params["input_layernorm"])
    x = x + _attention(config, index, ops, params["self_attn"], y, cos, sin, positions, mask)
    y = _norm(config, x, params["post_attention_layernorm"])
    if index not in config.moe_layers:
        return x + llama.mlp(ops, params["feed_forward"], y), None
    y, sums = _sparse(config, ops, params["feed_forward"], y, real)
    return x + y, sums


def _attention(
    config: Config,
    index: int,
    ops: Ops,
    params: Params,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    mask: Mask,
) -> Tensor:
    x = ops.enter(x)
    q, k, v = (
        llama.project(x, params[name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.no_rope_layers[index]:
        q, k = apply_rope_to_pairs(q, cos, sin), apply_rope_to_pairs(k, cos, sin)
        if config.use_qk_norm:
            ones = q.new_ones(config.head_dim)
            q, k = rms_norm(q, ones, config.rms_norm_eps), rms_norm(k, ones, config.rms_norm_eps)
    elif config.attn_temperature_tuning:
        q = q * _temperature(config, positions, q.dtype)
    out = ops.attention(q, k, v, mask, chunk=config.chunk(index))
    return llama.join(ops, out.transpose(1, 2).flatten(2), params["o_proj"])


def _temperature(
    config: Config, positions: Int[Tensor, "batch seq"], dtype: torch.dtype
) -> Float[Tensor, "batch 1 seq 1"]:
    """1 + attn_scale * log(1 + floor((position + 1) / floor_scale)), in float32 or wider before it is rounded."""
    wide = positions.to(torch.promote_types(dtype, torch.float32))
    scale = torch.log1p(torch.floor((wide + 1) / config.floor_scale)) * config.attn_scale + 1
    return scale[:, None, :, None].to(dtype)


def _sparse(
    config: Config, ops: Ops, params: Params, x: Float[Tensor, "batch seq hidden"], real: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The experts that each token chooses, and the one that all share."""
    logits = router_logits(x, params["router"]["weight"])
    largest, indices = logits.topk(config.num_experts_per_tok, dim=-1)
    rows = (x[..., None, :] * torch.sigmoid(largest)[..., None].to(x.dtype)).flatten(1, 2)  # a token once a choice
    choices = indices.flatten(1, 2)[..., None]
    y = ops.experts(rows, torch.ones_like(choices, dtype=x.dtype), choices, params["experts"], _expert)
    y = y.unflatten(1, (-1, config.num_experts_per_tok)).sum(2)
    return y + llama.mlp(ops, params["shared_expert"], x), route_sums(logits.softmax(-1), indices, real)


def _expert(rows: Float[Tensor, "rows hidden"], params: Params, project: Any) -> Tensor:
    """down(silu(gate x) * up x); its matrices are [experts, in, out], gate and up side by side."""
    gate, up = project(rows, params["gate_up_proj"].mT).chunk(2, -1)
    return project(silu(gate) * up, params["down_proj"].mT)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    hidden, experts, width = config.hidden_size, config.num_local_experts, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    matrices = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name, (rows, columns) in matrices.items():
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                found[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        if index in config.moe_layers:
            found[f"{layer}.feed_forward.router.weight"] = (experts, hidden)
            found[f"{layer}.feed_forward.experts.gate_up_proj"] = (experts, hidden, 2 * width)
            found[f"{layer}.feed_forward.experts.down_proj"] = (experts, width, hidden)
            found.update(mlp_shapes(f"{layer}.feed_forward.shared_expert", hidden, width))
        else:
            found.update(mlp_shapes(f"{layer}.feed_forward", hidden, config.intermediate_size_mlp))
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
    """Queries, keys and MLPs by output, what follows them by input, the vocabulary; experts and router whole."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer: dict[str, Any] = {
        "self_attn.q_proj.*": Split(0, blocks=heads),
        "self_attn.k_proj.*": Split(0, blocks=kv_heads),
        "self_attn.v_proj.*": Split(0, blocks=kv_heads),
        "self_attn.o_proj.weight": Split(1, blocks=heads),
        "*_layernorm.weight": Replicated(),
    }
    if config.attention_bias:
        layer["self_attn.o_proj.bias"] = Replicated()
    if config.moe_layers:
        layer["feed_forward.router.weight"] = Replicated()
        layer["feed_forward.experts.*"] = Expert(config.num_local_experts)
        layer.update(mlp_rules("feed_forward.shared_expert", config.intermediate_size))
    if len(set(config.moe_layers)) < config.num_hidden_layers:
        layer.update(mlp_rules("feed_forward", config.intermediate_size_mlp))
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
    "router_jitter_noise": (0, 0.0),
    "interleave_moe_layer_step": tuple(range(1, 1000)),
    "no_rope_layer_interval": tuple(range(1, 1000)),
}
"""Settings that are no field of the Config, with the values that are computed."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a config.json of a Llama 4 text model; what it leaves out has transformers' default.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    values = {"attention_chunk_size": 8192, "num_key_value_heads": 8, "head_dim": 128, **values}
    names = [field.name for field in dataclasses.fields(Config)]
    fields = own_fields(values, "llama4_text", names, COMPUTED)
    layers = range(fields["num_hidden_layers"])
    fields.setdefault("attention_chunk_size", None)
    if not fields.get("no_rope_layers"):
        interval = values.get("no_rope_layer_interval") or 4
        fields["no_rope_layers"] = tuple(int((index + 1) % interval != 0) for index in layers)
    fields["no_rope_layers"] = fields["no_rope_layers"][: len(layers)]
    if "layer_types" not in fields:
        chunked = fields["attention_chunk_size"] is not None
        kinds = ("full_attention", "chunked_attention")
        fields["layer_types"] = tuple(kinds[bool(rope and chunked)] for rope in fields["no_rope_layers"])
    if "moe_layers" not in fields:
        step = values.get("interleave_moe_layer_step") or 1
        fields["moe_layers"] = tuple(layers)[step - 1 :: step]
    return Config(**{**fields, **rope_fields(values, theta=500000.0)})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["rope_parameters"] = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    values.update({name: list(values[name]) for name in ("no_rope_layers", "layer_types", "moe_layers")})
    return {
        **values,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
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
    config, params = read_params(path, dtype, lazy, config_from_json, shapes)
    return model(config), params


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, tensor for tensor, so that `load` and transformers read them back.

    Raises:
        ValueError: parameters that are not this config's.
    """
    write_params(folder, config, params, config_to_json, shapes)

"""Gemma 2 and Gemma 3 (text) as pure functions.

    Gemma 2   Gemma Team 2024, section 2            soft caps on attention's and on the head's logits
    Gemma 3   Gemma Team 2025, section 2            RMS norms on each query and key head; rotary bases by kind of layer

Both against Llama: local layers (a window) and global ones in turn, by `layer_types`; a norm after each half of a layer
as well as before it; norms that multiply by 1 + weight; tokens' embeddings times sqrt(hidden_size); an MLP gated by
GELU; attention scaled by `query_pre_attn_scalar`; the embedding table is also the head's.

Gemma 3's global layers have the base `rope_theta` (and its scaling), its local ones `rope_local_base_freq`; so there
are two pairs of rotary tables, and each layer is handed its own. Embeddings that come in the place of tokens are taken
as they are, as transformers does.

Left out: pictures (the text model of a Gemma 3 alone), and bidirectional attention. Both are refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu

from fcp import pytree, rms_norm
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params, Replicated, Rules
from models import llama
from models._checkpoint import read_params, write_params
from models._config_json import own_fields, rope_fields, rope_to_json
from models._rope import apply_rope, rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and settings; fields carry config.json's names. `rope_local_base_freq` is Gemma 3's alone.

    Raises:
        ValueError: sizes that do not fit together, or a setting that the family does not have.
    """

    families: ClassVar[Mapping[str, str]] = {"gemma2": "Gemma2", "gemma3_text": "Gemma3"}

    model_type: str = "gemma2"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        positive = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        for name in (*positive, "rope_local_base_freq"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                wrong.append(f"{name} {value} is not above 0")
        if self.model_type == "gemma3_text" and self.attn_logit_softcapping is not None:
            wrong.append("attn_logit_softcapping of gemma3_text (gemma2 has it)")
        if (self.model_type == "gemma3_text") != (self.rope_local_base_freq is not None):
            wrong.append("rope_local_base_freq is for gemma3_text, and gemma3_text needs it")
        if self.mlp_bias or not self.tie_word_embeddings:
            wrong.append("mlp_bias, or tie_word_embeddings False")
        if wrong:
            raise ValueError(f"gemma.Config: {'; '.join(wrong)}")

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "gemma3_text"


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small Gemma 2, or Gemma 3 with `model_type="gemma3_text"` (width 32, a local and a global layer)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 3,
        "layer_types": ("sliding_attention", "full_attention"),
        "query_pre_attn_scalar": 16,
    }
    if overrides.get("model_type") == "gemma3_text":
        sizes.update(rope_theta=1e6, rope_local_base_freq=1e4)
    else:
        sizes.update(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    return model(Config(**{**sizes, **overrides}))


# --- the function -----------------------------------------------------------------------------------------------------


def apply(config: Config, params: Params, inputs: Inputs, ops: Ops) -> Output:
    """The loss and logits of a batch."""
    body = params["model"]
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(_embed, config, ops), body["embed_tokens"], inputs.tokens)
    tables = partial(
        rope_tables,
        inputs.positions,
        inputs.num_positions,
        dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        dtype=x.dtype,
    )
    rope = tables(theta=config.rope_theta, scaling=config.rope_scaling)
    local = config.rope_local_base_freq
    local_rope = rope if local is None else tables(theta=local, scaling=None)
    for index, layer_params in enumerate(body["layers"]):
        window = config.window(index)
        cos, sin = rope if window is None else local_rope
        x = ops.layer(partial(_layer, config, window, ops), layer_params, x, cos, sin, inputs.mask)
    head = partial(_head, config, ops)
    total, logits = ops.layer(head, {"norm": body["norm"], "table": body["embed_tokens"]}, x, inputs.targets)
    return Output(mean_loss(total, inputs.num_targets), logits)


def _embed(config: Config, ops: Ops, params: Params, tokens: Tensor) -> Tensor:
    x = ops.embed(tokens, params["weight"])
    return x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype, device=x.device)  # rounded to x's dtype first


def _head(config: Config, ops: Ops, params: Params, x: Tensor, targets: Tensor | None) -> Any:
    x = _norm(config, x, params["norm"]["weight"])
    return ops.loss(x, params["table"]["weight"], targets, softcap=config.final_logit_softcapping)


def _layer(
    config: Config,
    window: int | None,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
) -> Float[Tensor, "batch seq hidden"]:
    def norm(name: str, x: Tensor) -> Tensor:
        return _norm(config, x, params[name]["weight"])

    y = _attention(config, window, ops, params["self_attn"], norm("input_layernorm", x), cos, sin, mask)
    x = x + norm("post_attention_layernorm", y)
    y = _mlp(ops, params["mlp"], norm("pre_feedforward_layernorm", x))
    return x + norm("post_feedforward_layernorm", y)


def _attention(
    config: Config, window: int | None, ops: Ops, params: Params, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask
) -> Tensor:
    x = ops.enter(x)
    q, k, v = (
        llama.project(x, params[name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
        q, k = _norm(config, q, params["q_norm"]["weight"]), _norm(config, k, params["k_norm"]["weight"])
    out = ops.attention(
        apply_rope(q, cos, sin),
        apply_rope(k, cos, sin),
        v,
        mask,
        window=window,
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping,
    )
    return llama.join(ops, out.transpose(1, 2).flatten(2), params["o_proj"])


def _mlp(ops: Ops, params: Params, x: Tensor) -> Tensor:
    return ops.leave(ops.tokenwise(_gated, params, ops.enter(x)))


def _gated(params: Params, x: Tensor) -> Tensor:
    gate = gelu(llama.project(x, params["gate_proj"]), approximate="tanh")
    return llama.project(gate * llama.project(x, params["up_proj"]), params["down_proj"])


def _norm(
    config: Config, x: Float[Tensor, "*lead width"], weight: Float[Tensor, " width"]
) -> Float[Tensor, "*lead width"]:
    """x / rms(x) * (1 + weight) over the last dim, all of it in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), 1 + weight.to(wide), config.rms_norm_eps).to(x.dtype)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in llama.shapes(config).items():
        found[name] = shape
        if name.endswith(".post_attention_layernorm.weight"):
            for half in ("pre", "post"):
                found[name.replace("post_attention", f"{half}_feedforward")] = shape
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices; norms' weights are zero, which multiplies by 1."""
    drawn = llama.draw(shapes(config), seed, config.initializer_range, dtype)
    return pytree.nest({name: torch.zeros_like(x) if "norm" in name else x for name, x in drawn.items()})


def rules(config: Config) -> Rules:
    """Llama's; the norms after each half are whole."""
    return {
        **llama.rules(config),
        "model.layers.*.pre_feedforward_layernorm.weight": Replicated(),
        "model.layers.*.post_feedforward_layernorm.weight": Replicated(),
    }


# --- checkpoints ------------------------------------------------------------------------------------------------------

COMPUTED = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
    "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
    "attention_dropout": (0, 0.0),
    "use_bidirectional_attention": (False,),
}
"""Settings that are no field of the Config, with the values that are computed."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"sliding_window": 4096},
}
"""What a config.json leaves out is what transformers' configuration class says."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a config.json of Gemma 2 or of a Gemma 3 text model.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    kind = str(values.get("model_type"))
    if kind not in DEFAULTS:
        raise ValueError(f"model_type {kind!r} is none of {', '.join(DEFAULTS)}")
    values = {"num_key_value_heads": 4, "head_dim": 256, **DEFAULTS[kind], **values}
    names = [field.name for field in dataclasses.fields(Config)]
    every = values.pop("sliding_window_pattern", None) or (2 if kind == "gemma2" else 6)
    fields = own_fields(values, kind, names, COMPUTED)
    if "layer_types" not in fields:
        full = [(index + 1) % every == 0 for index in range(fields["num_hidden_layers"])]
        fields["layer_types"] = tuple("full_attention" if each else "sliding_attention" for each in full)
    if kind == "gemma2":
        return Config(**{**fields, **rope_fields(values)})
    ropes = values.pop("rope_parameters", None) or {}
    theta, scaling = values.get("rope_theta"), values.get("rope_scaling")
    whole = ropes.get("full_attention") or {"rope_theta": theta, **(scaling or {})}
    local = ropes.get("sliding_attention") or {"rope_theta": values.get("rope_local_base_freq")}
    near = rope_fields({"rope_parameters": local}, theta=1e4)
    if near["rope_scaling"] is not None:
        raise ValueError("rope_parameters: a scaling of sliding_attention: not computed here")
    fields.update(rope_fields({"rope_parameters": whole}, theta=1e6))
    return Config(**{**fields, "rope_local_base_freq": near["rope_theta"]})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    rope = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    local = values.pop("rope_local_base_freq")
    if local is not None:
        rope = {"full_attention": rope, "sliding_attention": rope_to_json(local, None)}
    windows = [config.window(index) for index in range(config.num_hidden_layers)]
    values["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    del values["mlp_bias"]
    return {
        **values,
        "architectures": [f"{config.families[config.model_type]}ForCausalLM"],
        "rope_parameters": rope,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "use_bidirectional_attention": False,
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

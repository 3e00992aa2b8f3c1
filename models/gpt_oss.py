"""gpt-oss as a pure function (OpenAI 2025, section 2): experts in every layer, sinks, alternating windows.

Against Mixtral:

    sinks     each query head has a logit that takes weight and gives no value, so a head may look at nothing
    windows   every second layer slides (`layer_types`)
    router    a bias; the weights are the softmax of the k largest logits alone
    experts   biases; gate and up interleaved column by column, both clamped at `swiglu_limit`; up + 1 multiplies
              gate * sigmoid(swiglu_alpha * gate)

A sink belongs to its head, so its rule cuts it with the heads, and under context parallelism a rank takes those of the
heads it attends with. Expert matrices are stored [experts, in, out].

Two things differ from transformers by intent: the router computes in float32 or wider in every dtype, and padding
counts in no statistic.

Left out: checkpoints whose experts are packed in four bits (`quantization_config`), which are refused.
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

from fcp import pytree
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Expert, Inputs, Output, Params, Replicated, Rules, Split
from models import llama
from models._checkpoint import read_params, write_params
from models._config_json import own_fields, rope_fields, rope_to_json
from models._experts import route_sums, router_logits, with_statistics
from models._rope import apply_rope, rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and settings; fields carry config.json's names. `intermediate_size` is the width of an expert.

    `output_router_logits` adds the auxiliary loss to the loss, as it does in transformers.

    Raises:
        ValueError: sizes that do not fit together.
    """

    families: ClassVar[Mapping[str, str]] = {"gpt_oss": "GptOss"}

    model_type: str = "gpt_oss"
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            wrong.append(f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_local_experts} experts")
        if self.swiglu_limit <= 0:
            wrong.append(f"swiglu_limit {self.swiglu_limit} is not above 0")
        if self.mlp_bias:
            wrong.append("mlp_bias (experts have their biases)")
        if wrong:
            raise ValueError(f"gpt_oss.Config: {'; '.join(wrong)}")


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (width 32, a sliding and a full layer, 4 query and 2 kv heads of 8,
    top-2 of 4 experts of width 16)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 3,
        "layer_types": ("sliding_attention", "full_attention"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
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
        layer = partial(_layer, config, config.window(index), ops)
        x, found = ops.layer(layer, layer_params, x, cos, sin, inputs.mask, inputs.real)
        sums.append(found)
    table = body["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    head = partial(llama.head, config, ops)
    total, logits = ops.layer(head, {"norm": body["norm"], "table": table}, x, inputs.targets)
    coefficient = config.router_aux_loss_coef if config.output_router_logits else None
    loss = mean_loss(total, inputs.num_targets)
    return with_statistics(ops, loss, logits, sums, config.num_experts_per_tok, coefficient)


def _layer(
    config: Config,
    window: int | None,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    real: Tensor | None,
) -> tuple[Float[Tensor, "batch seq hidden"], tuple[Tensor, Tensor]]:
    """The layer's output, and what `route_sums` gives."""
    y = llama.norm(config, x, params["input_layernorm"]["weight"])
    x = x + _attention(config, window, ops, params["self_attn"], y, cos, sin, mask)
    y = llama.norm(config, x, params["post_attention_layernorm"]["weight"])
    y, sums = _sparse(config, ops, params["mlp"], y, real)
    return x + y, sums


def _attention(
    config: Config, window: int | None, ops: Ops, params: Params, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask
) -> Tensor:
    x = ops.enter(x)
    q, k, v = (
        llama.project(x, params[name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = ops.attention(q, k, v, mask, window=window, sinks=params["sinks"])
    return llama.join(ops, out.transpose(1, 2).flatten(2), params["o_proj"])


def _sparse(
    config: Config, ops: Ops, params: Params, x: Tensor, real: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    logits = router_logits(x, params["router"]["weight"], params["router"]["bias"])
    largest, indices = logits.topk(config.num_experts_per_tok, dim=-1)
    y = ops.experts(x, largest.softmax(-1), indices, params["experts"], partial(_expert, config))
    return y, route_sums(logits.softmax(-1), indices, real)


def _expert(config: Config, rows: Float[Tensor, "rows hidden"], params: Params, project: Any) -> Tensor:
    y = project(rows, params["gate_up_proj"].mT, params["gate_up_proj_bias"])
    gate = y[..., ::2].clamp(max=config.swiglu_limit)
    up = y[..., 1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
    y = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
    return project(y, params["down_proj"].mT, params["down_proj_bias"])


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    hidden, experts, width = config.hidden_size, config.num_local_experts, config.intermediate_size
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in llama.shapes(config).items():
        if name.endswith(".mlp.gate_proj.weight"):  # the first of a layer's MLP
            layer = name.removesuffix(".mlp.gate_proj.weight")
            found[f"{layer}.self_attn.sinks"] = (config.num_attention_heads,)
            found[f"{layer}.mlp.router.weight"] = (experts, hidden)
            found[f"{layer}.mlp.router.bias"] = (experts,)
            found[f"{layer}.mlp.experts.gate_up_proj"] = (experts, hidden, 2 * width)
            found[f"{layer}.mlp.experts.gate_up_proj_bias"] = (experts, 2 * width)
            found[f"{layer}.mlp.experts.down_proj"] = (experts, width, hidden)
            found[f"{layer}.mlp.experts.down_proj_bias"] = (experts, hidden)
        elif ".mlp." not in name:
            found[name] = shape
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices and sinks, unit norms, zero biases."""
    return pytree.nest(llama.draw(shapes(config), seed, config.initializer_range, dtype))


def rules(config: Config) -> Rules:
    """Llama's, and: sinks with their heads, experts whole and apart, the router whole."""
    patterns = {re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in shapes(config)}
    found = {name: rule for name, rule in llama.rules(config).items() if name in patterns}
    return {
        **found,
        "model.layers.*.self_attn.sinks": Split(0, blocks=config.num_attention_heads),
        "model.layers.*.mlp.router.*": Replicated(),
        "model.layers.*.mlp.experts.*": Expert(config.num_local_experts),
    }


# --- checkpoints ------------------------------------------------------------------------------------------------------

COMPUTED = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0), "mlp_bias": (False,)}
"""Settings that are no field of the Config, with the values that are computed."""

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers' class takes where a config.json says nothing of rotary positions."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a gpt-oss's config.json; what it leaves out has transformers' default.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    values = {"sliding_window": 128, "num_key_value_heads": 8, "head_dim": 64, **values}
    if values.get("num_local_experts") is None and values.get("num_experts") is not None:
        values["num_local_experts"] = values.pop("num_experts")
    names = [field.name for field in dataclasses.fields(Config)]
    fields = own_fields(values, "gpt_oss", names, COMPUTED)
    if values.get("rope_parameters") is None and values.get("rope_scaling") is None:
        values["rope_scaling"] = DEFAULT_ROPE
    if "layer_types" not in fields:
        kinds = ("sliding_attention", "full_attention")
        fields["layer_types"] = tuple(kinds[index % 2] for index in range(fields["num_hidden_layers"]))
    return Config(**{**fields, **rope_fields(values, theta=150000.0)})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["rope_parameters"] = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    windows = [config.window(index) for index in range(config.num_hidden_layers)]
    values["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    del values["mlp_bias"]
    return {**values, "architectures": ["GptOssForCausalLM"], "hidden_act": "silu", "attention_dropout": 0.0}


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

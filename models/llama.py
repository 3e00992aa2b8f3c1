"""Llama as a pure function, and what makes it also Mistral, Qwen2, Qwen3 and SmolLM.

    Llama     Touvron et al. 2023, section 2.2      rotary positions, RMS norms, gated MLP, grouped heads
    Mistral   Jiang et al. 2023, section 2          + a sliding window on every layer
    Qwen2     Yang et al. 2024, section 2.2         + biases on q, k and v; windows on some layers
    Qwen3     Yang et al. 2025, section 2           + an RMS norm on each query and key head
    SmolLM    Allal et al. 2025                     Llama with tied embeddings

Read from top to bottom: the config, the function (`apply`), its layer, how parameters are made and named, how they may
be split, and how a checkpoint is read and written. Parameters are nested as the checkpoint names them, so a leaf's path
is its tensor's name.

Nothing here knows an axis. Sizes that a transform may make local (heads, the MLP's width) are read off the weights.

Equal to transformers' modules in float32. Two things differ by intent: with float64 parameters everything is
float64 (their norms and rotary tables are float32 at the widest), and the pad token's row is a row like any other
(their embedding gives it no gradient).
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
from torch.nn.functional import silu

from fcp import linear, pytree, rms_norm
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params, Replicated, Rules, Shared, Split
from models._checkpoint import read_params, write_params
from models._config_json import FAMILIES, fields_from_json, fields_to_json
from models._rope import apply_rope, check_rope, rope_tables, rope_type

__all__ = [
    "Config",
    "attention",
    "config_from_json",
    "config_to_json",
    "draw",
    "embed",
    "head",
    "join",
    "load",
    "mlp",
    "model",
    "norm",
    "project",
    "save",
    "tiny",
]


@dataclass(frozen=True)
class Config:
    """The sizes of a model; fields carry config.json's names.

    `layer_types` says for each layer "full_attention" or "sliding_attention"; None: every layer slides where
    `sliding_window` is set. A window of W means W keys, the query itself included.

    Raises:
        ValueError: sizes that do not fit together, an unknown layer type or rope scaling.
    """

    families: ClassVar[Mapping[str, str]] = FAMILIES

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        wrong = []
        if self.model_type not in self.families:
            wrong.append(f"model_type {self.model_type!r} is none of {', '.join(self.families)}")
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        counts += ("num_key_value_heads", "head_dim", "max_position_embeddings")
        wrong += [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong.append(f"{self.num_key_value_heads} kv heads do not divide {self.num_attention_heads} query heads")
        if self.head_dim % 2:
            wrong.append(f"head_dim {self.head_dim} is odd, and rotary positions rotate pairs")
        if self.head_dim == 2 and rope_type(self.rope_scaling) == "dynamic":
            wrong.append("head_dim 2 has one rotary pair, and dynamic scaling stretches all but the first")
        if self.sliding_window is not None and self.sliding_window < 1:
            wrong.append(f"sliding_window {self.sliding_window} is below 1 (None for no window)")
        if self.layer_types is not None:
            unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
            if unknown or len(self.layer_types) != self.num_hidden_layers:
                wrong.append(f"layer_types {self.layer_types} for {self.num_hidden_layers} layers")
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                wrong.append("layer_types has sliding_attention, and sliding_window is None")
        if wrong:
            raise ValueError(f"llama.Config: {'; '.join(wrong)}")
        check_rope(self.rope_scaling)

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, None for full attention."""
        slides = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (vocab 64, width 32, 2 layers, 4 query and 2 kv heads of 8)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return model(Config(**{**sizes, **overrides}))


# --- the function -----------------------------------------------------------------------------------------------------


def apply(config: Config, params: Params, inputs: Inputs, ops: Ops) -> Output:
    """The loss and logits of a batch."""
    body = params["model"]
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(embed, ops), body["embed_tokens"], inputs.tokens)
    cos, sin = rope_tables(
        inputs.positions,
        inputs.num_positions,
        dim=config.head_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=x.dtype,
    )
    for index, layer_params in enumerate(body["layers"]):
        x = ops.layer(partial(_layer, config, config.window(index), ops), layer_params, x, cos, sin, inputs.mask)
    table = body["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    total, logits = ops.layer(partial(head, config, ops), {"norm": body["norm"], "table": table}, x, inputs.targets)
    return Output(mean_loss(total, inputs.num_targets), logits)


def embed(ops: Ops, params: Params, tokens: Tensor) -> Tensor:
    return ops.embed(tokens, params["weight"])


def head(config: Config, ops: Ops, params: Params, x: Tensor, targets: Tensor | None) -> Any:
    return ops.loss(norm(config, x, params["norm"]["weight"]), params["table"]["weight"], targets)


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
    x = x + attention(
        config, window, ops, params["self_attn"], norm(config, x, params["input_layernorm"]["weight"]), cos, sin, mask
    )
    return x + mlp(ops, params["mlp"], norm(config, x, params["post_attention_layernorm"]["weight"]))


def attention(
    config: Config,
    window: int | None,
    ops: Ops,
    params: Params,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
) -> Tensor:
    def heads(name: str) -> Float[Tensor, "batch heads seq dim"]:
        return project(x, params[name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    x = ops.enter(x)
    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    if config.qk_norm:
        q, k = norm(config, q, params["q_norm"]["weight"]), norm(config, k, params["k_norm"]["weight"])
    out = ops.attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask, window=window)
    return join(ops, out.transpose(1, 2).flatten(2), params["o_proj"])


def mlp(ops: Ops, params: Params, x: Tensor) -> Tensor:
    return _with_bias(ops.leave(ops.tokenwise(_gated, params, ops.enter(x))), params["down_proj"])


def _gated(params: Params, x: Tensor) -> Tensor:
    """What the columns here add; its sum over the ranks lacks the bias."""
    x = silu(project(x, params["gate_proj"])) * project(x, params["up_proj"])
    return linear(x, params["down_proj"]["weight"])


def project(x: Tensor, params: Params) -> Tensor:
    return linear(x, params["weight"], params.get("bias"))


def join(ops: Ops, x: Tensor, params: Params) -> Tensor:
    """The projection that ends split work: the ranks' parts are summed, then the bias is added once."""
    return _with_bias(ops.leave(linear(x, params["weight"])), params)


def _with_bias(x: Tensor, params: Params) -> Tensor:
    return x + params["bias"] if "bias" in params else x


def norm(
    config: Config, x: Float[Tensor, "*lead width"], weight: Float[Tensor, " width"]
) -> Float[Tensor, "*lead width"]:
    """x / rms(x) * weight over the last dim, the mean in float32 or wider (Zhang and Sennrich 2019)."""
    return rms_norm(x, weight, config.rms_norm_eps)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    hidden, width = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        matrices = {
            "self_attn.q_proj": (queries, hidden, config.qkv_bias),
            "self_attn.k_proj": (keys, hidden, config.qkv_bias),
            "self_attn.v_proj": (keys, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, queries, config.output_bias),
            "mlp.gate_proj": (width, hidden, config.mlp_bias),
            "mlp.up_proj": (width, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, width, config.mlp_bias),
        }
        for name, (rows, columns, bias) in matrices.items():
            found[f"model.layers.{index}.{name}.weight"] = (rows, columns)
            if bias:
                found[f"model.layers.{index}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{index}.{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                found[f"model.layers.{index}.self_attn.{name}.weight"] = (config.head_dim,)
    found["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices, unit norms, zero biases."""
    return pytree.nest(draw(shapes(config), seed, config.initializer_range, dtype))


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int, std: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Each tensor by name: normal matrices, unit norms, zero biases."""
    generator = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype)
        if "norm" in name:
            return torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)

    return {name: one(name, shape) for name, shape in shapes.items()}


def rules(config: Config) -> Rules:
    """How each tensor may be split: queries, keys and the MLP by output, what follows them by input, the vocabulary."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    by_module = {
        "self_attn.q_proj": Split(0, blocks=heads),
        "self_attn.k_proj": Split(0, blocks=kv_heads),
        "self_attn.v_proj": Split(0, blocks=kv_heads),
        "self_attn.o_proj": Split(1, blocks=heads),
        "self_attn.q_norm": Shared(),
        "self_attn.k_norm": Shared(),
        "mlp.gate_proj": Split(0, blocks=width),
        "mlp.up_proj": Split(0, blocks=width),
        "mlp.down_proj": Split(1, blocks=width),
        "input_layernorm": Replicated(),
        "post_attention_layernorm": Replicated(),
    }
    found: dict[str, Any] = {}
    for name in shapes(config):
        if ".layers." not in name:
            found[name] = Replicated() if "norm" in name else Split(0, vocab=config.vocab_size)
            continue
        module, _, kind = name.split(".", 3)[3].rpartition(".")
        rule = by_module[module]
        if kind == "bias" and isinstance(rule, Split):  # the bias of an output split is split; that of a sum is not
            rule = Split(0, blocks=rule.blocks) if rule.dim == 0 else Replicated()
        found[f"model.layers.*.{module}.{kind}"] = rule
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a config.json of one of `FAMILIES`.

    Raises:
        ValueError: another model type, or a setting that this file does not compute.
    """
    return Config(**fields_from_json(values, [field.name for field in dataclasses.fields(Config)]))


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model.

    Raises:
        ValueError: what transformers' class of this family does not compute (a window on llama, biases on mistral).
    """
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return fields_to_json(fields, [config.window(index) for index in range(config.num_hidden_layers)])


def load(path: str | Path, dtype: torch.dtype | None = None, *, lazy: bool = False) -> tuple[Model, Params]:
    """Reads a checkpoint: a folder with config.json and safetensors, or a GGUF file.

    Args:
        path: the folder or the file.
        dtype: of the parameters; None keeps the checkpoint's.
        lazy: leave the parameters in their files, for `shard` to read a rank's own slices from.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """
    config, params = read_params(path, dtype, lazy, config_from_json, shapes, _without_tables)
    return model(config), params


def _without_tables(path: str | Path, config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """Early Llama checkpoints store a table that is computed here."""
    return {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, tensor for tensor, so that `load` and transformers read them back.

    Raises:
        ValueError: parameters that are not this config's, or a config that transformers has no class for.
    """
    write_params(folder, config, params, config_to_json, shapes)

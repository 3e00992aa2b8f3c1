"""GPT-NeoX as a pure function (Black et al. 2022, section 2.1), and so Pythia (Biderman et al. 2023).

Against Llama: norms are layer norms with a bias, every projection has a bias, and the MLP is one up-projection, GELU
and one down-projection. And what is its own:

    parallel residual   attention and MLP read the same stream, x + attention(norm x) + mlp(norm x); both end split
                        work, so under tensor parallelism their sum is joined once
    partial rotary      the first `partial_rotary_factor` of each head is rotated, the rest is not
    fused projection    q, k and v come from one matrix whose rows lie head by head, [q0 k0 v0 q1 k1 v1 ...], so heads
                        are blocks of it and a plain cut keeps each head whole (GPT-2's has all of q first)

Left out: dropout (a config with a rate above 0 is refused), other activations than GELU and its tanh form.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from fcp import linear, pytree
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params, Replicated, Rules, Split
from models._checkpoint import read_params, write_params
from models._config_json import own_fields, rope_fields, rope_to_json
from models._rope import apply_partial_rope, check_rope, rope_tables

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]

APPROXIMATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
"""Activations by the name of config.json: how GELU is computed."""


@dataclass(frozen=True)
class Config:
    """The sizes of a model; fields carry config.json's names (`rope_theta` and `partial_rotary_factor` were
    `rotary_emb_base` and `rotary_pct` once).

    Raises:
        ValueError: sizes that do not fit together.
    """

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        counts += ("max_position_embeddings",)
        wrong = [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if not wrong and self.hidden_size % self.num_attention_heads:
            wrong.append(f"num_attention_heads {self.num_attention_heads} does not divide {self.hidden_size}")
        elif not wrong and (self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            wrong.append(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {self.rotary_dim} of {self.head_dim} dims "
                f"(an even number, 2 or more, can be)"
            )
        if self.hidden_act not in APPROXIMATIONS:
            wrong.append(f"hidden_act {self.hidden_act!r} is none of {', '.join(APPROXIMATIONS)}")
        if wrong:
            raise ValueError(f"gpt_neox.Config: {'; '.join(wrong)}")
        check_rope(self.rope_scaling)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(config=config, apply=partial(apply, config), init=partial(init, config), rules=rules(config))


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (vocab 64, width 32, 2 layers, 4 heads of 8, half of each rotated)."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return model(Config(**{**sizes, **overrides}))


# --- the function -----------------------------------------------------------------------------------------------------


def apply(config: Config, params: Params, inputs: Inputs, ops: Ops) -> Output:
    """The loss and logits of a batch."""
    body = params["gpt_neox"]
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(_embed, ops), body["embed_in"], inputs.tokens)
    cos, sin = rope_tables(
        inputs.positions,
        inputs.num_positions,
        dim=config.rotary_dim,
        theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=config.rope_scaling,
        dtype=x.dtype,
    )
    for layer_params in body["layers"]:
        x = ops.layer(partial(_layer, config, ops), layer_params, x, cos, sin, inputs.mask)
    table = body["embed_in"] if config.tie_word_embeddings else params["embed_out"]
    head = partial(_head, config, ops)
    total, logits = ops.layer(head, {"norm": body["final_layer_norm"], "table": table}, x, inputs.targets)
    return Output(mean_loss(total, inputs.num_targets), logits)


def _embed(ops: Ops, params: Params, tokens: Tensor) -> Tensor:
    return ops.embed(tokens, params["weight"])


def _head(config: Config, ops: Ops, params: Params, x: Tensor, targets: Tensor | None) -> Any:
    return ops.loss(_norm(config, x, params["norm"]), params["table"]["weight"], targets)


def _layer(
    config: Config,
    ops: Ops,
    params: Params,
    x: Float[Tensor, "batch seq hidden"],
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
) -> Float[Tensor, "batch seq hidden"]:
    dense, down = params["attention"]["dense"], params["mlp"]["dense_4h_to_h"]
    part = _attention(config, ops, params["attention"], _norm(config, x, params["input_layernorm"]), cos, sin, mask)
    if config.use_parallel_residual:
        part = part + _mlp(config, ops, params["mlp"], _norm(config, x, params["post_attention_layernorm"]))
        return x + _with_bias(_with_bias(ops.leave(part), dense), down)
    x = x + _with_bias(ops.leave(part), dense)
    part = _mlp(config, ops, params["mlp"], _norm(config, x, params["post_attention_layernorm"]))
    return x + _with_bias(ops.leave(part), down)


def _attention(config: Config, ops: Ops, params: Params, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
    """What the heads here add; its sum over the ranks lacks the bias."""
    fused = params["query_key_value"]
    qkv = linear(ops.enter(x), fused["weight"], fused.get("bias")).unflatten(-1, (-1, 3 * config.head_dim))
    q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, -1))
    out = ops.attention(apply_partial_rope(q, cos, sin), apply_partial_rope(k, cos, sin), v, mask)
    return linear(out.transpose(1, 2).flatten(2), params["dense"]["weight"])


def _mlp(config: Config, ops: Ops, params: Params, x: Tensor) -> Tensor:
    """What the columns here add; its sum over the ranks lacks the bias."""
    return ops.tokenwise(partial(_up_and_down, config), params, ops.enter(x))


def _up_and_down(config: Config, params: Params, x: Tensor) -> Tensor:
    up = params["dense_h_to_4h"]
    x = gelu(linear(x, up["weight"], up["bias"]), approximate=APPROXIMATIONS[config.hidden_act])
    return linear(x, params["dense_4h_to_h"]["weight"])


def _with_bias(x: Tensor, params: Params) -> Tensor:
    return x + params["bias"] if "bias" in params else x


def _norm(config: Config, x: Float[Tensor, "*lead width"], params: Params) -> Float[Tensor, "*lead width"]:
    """(x - mean) / deviation * weight + bias over the last dim (Ba et al. 2016)."""
    return layer_norm(x, x.shape[-1:], params["weight"], params["bias"], config.layer_norm_eps)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    hidden, width = config.hidden_size, config.intermediate_size
    layer: dict[str, tuple[tuple[int, ...], bool]] = {
        "input_layernorm": ((hidden,), True),
        "post_attention_layernorm": ((hidden,), True),
        "attention.query_key_value": ((3 * hidden, hidden), config.attention_bias),
        "attention.dense": ((hidden, hidden), config.attention_bias),
        "mlp.dense_h_to_4h": ((width, hidden), True),
        "mlp.dense_4h_to_h": ((hidden, width), True),
    }
    found: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        for name, (shape, bias) in layer.items():
            found[f"gpt_neox.layers.{index}.{name}.weight"] = shape
            if bias:
                found[f"gpt_neox.layers.{index}.{name}.bias"] = shape[:1]
    found.update({f"gpt_neox.final_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")})
    if not config.tie_word_embeddings:
        found["embed_out.weight"] = (config.vocab_size, hidden)
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices, unit norms, zero biases."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * config.initializer_range).to(dtype)

    return pytree.nest({name: draw(name, shape) for name, shape in shapes(config).items()})


def rules(config: Config) -> Rules:
    """How each tensor may be split: heads, the MLP by its width, the vocabulary."""
    heads, width = config.num_attention_heads, config.intermediate_size
    layer = "gpt_neox.layers.*"
    found: dict[str, Any] = {
        "gpt_neox.embed_in.weight": Split(0, vocab=config.vocab_size),
        "gpt_neox.final_layer_norm.*": Replicated(),
        f"{layer}.input_layernorm.*": Replicated(),
        f"{layer}.post_attention_layernorm.*": Replicated(),
        f"{layer}.attention.query_key_value.*": Split(0, blocks=heads),
        f"{layer}.attention.dense.weight": Split(1, blocks=heads),
        f"{layer}.mlp.dense_h_to_4h.*": Split(0, blocks=width),
        f"{layer}.mlp.dense_4h_to_h.weight": Split(1, blocks=width),
        f"{layer}.mlp.dense_4h_to_h.bias": Replicated(),
    }
    if config.attention_bias:
        found[f"{layer}.attention.dense.bias"] = Replicated()
    if not config.tie_word_embeddings:
        found["embed_out.weight"] = Split(0, vocab=config.vocab_size)
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------

COMPUTED = {"attention_dropout": (0, 0.0), "hidden_dropout": (0, 0.0)}
"""Settings that are no field of the Config, with the values that are computed."""


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a GPT-NeoX's config.json; what it leaves out has transformers' default.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    values = dict(values)
    base, share = values.pop("rotary_emb_base", None), values.pop("rotary_pct", None)
    rope = dict(values.pop("rope_scaling", None) or values.pop("rope_parameters", None) or {})
    share = rope.pop("partial_rotary_factor", None) or values.pop("partial_rotary_factor", None) or share
    names = [field.name for field in dataclasses.fields(Config)]
    fields = own_fields(values, "gpt_neox", names, COMPUTED)
    fields.update(rope_fields({**values, "rope_parameters": rope}, theta=float(base or 10000)))
    return Config(**{**fields, "partial_rotary_factor": 0.25 if share is None else float(share)})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    values = dataclasses.asdict(config)
    rope = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    return {
        **values,
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "rope_parameters": rope,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def load(path: str | Path, dtype: torch.dtype | None = None, *, lazy: bool = False) -> tuple[Model, Params]:
    """Reads a checkpoint folder with config.json and safetensors; `dtype` None keeps the checkpoint's.

    With `lazy` the parameters stay in their files, for `shard` to read a rank's own slices from.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """
    config, params = read_params(path, dtype, lazy, config_from_json, shapes, _without_buffers)
    return model(config), params


def _without_buffers(path: str | Path, config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """Old files hold causal masks and rotary tables as buffers; newer ones may call the head `lm_head`."""
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    found = {name: x for name, x in tensors.items() if not name.endswith(buffers)}
    return {name.replace("lm_head.", "embed_out."): x for name, x in found.items()}


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, tensor for tensor, so that `load` and transformers read them back.

    Raises:
        ValueError: parameters that are not this config's.
    """
    write_params(folder, config, params, config_to_json, shapes)

"""GPT-2 as a pure function (Radford et al. 2019, section 2.3).

Against Llama: positions are learned, and added to the tokens' embeddings; norms are layer norms with a bias; q, k and v
come from one matrix; the MLP is one up-projection, GELU and one down-projection; every projection has a bias; the
embedding table is also the head's.

Its matrices are stored as [in, out]. The fused one is three matrices side by side, [q | k | v], so its rule cuts each
of the three pieces by heads; a cut of the whole would give the first rank queries alone.

Learned positions need a row each. Padding that a transform appends is kept within the table (by `n_positions`). A
batch that itself goes past it is refused by the model; where values cannot be asked for (a trace), all becomes NaN.

Left out: dropout, cross-attention, untied heads and activations other than GELU's tanh form. The last three are
refused. A checkpoint's dropout rates are read and written, and the function computes what transformers' module does
with them in evaluation; `fcp.transform` refuses rates above 0, which training would have to honour.
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
from torch.nn.functional import embedding, gelu, layer_norm

from fcp import linear, pytree
from fcp.loss import mean_loss
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params, Replicated, Rule, Rules, Split
from models._checkpoint import read_params, write_params

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
"""Two names of one function."""

DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


@dataclass(frozen=True)
class Config:
    """The sizes of a model; fields carry config.json's names. `n_inner` None is four times `n_embd`.

    Raises:
        ValueError: sizes that do not fit together.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    attn_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    initializer_range: float = 0.02
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        counts = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        wrong = [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if self.n_inner is not None and self.n_inner < 1:
            wrong.append(f"n_inner {self.n_inner} is below 1 (None for 4 * n_embd)")
        if not wrong and self.n_embd % self.n_head:
            wrong.append(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        wrong += [f"{name} {getattr(self, name)} is no rate" for name in DROPOUT if not 0 <= getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"gpt2.Config: {'; '.join(wrong)}")

    @property
    def width(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def scale(self, layer: int) -> float:
        """What a layer's attention scores are multiplied by."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


def model(config: Config) -> Model:
    """The model of a config."""
    return Model(
        config=config,
        apply=partial(apply, config),
        init=partial(init, config),
        rules=rules(config),
        num_positions=config.n_positions,
    )


def tiny(**overrides: Any) -> Model:
    """A small model in the real architecture (vocab 64, width 32, 2 layers, 4 heads of 8)."""
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return model(Config(**{**sizes, "n_inner": 48, "bos_token_id": None, "eos_token_id": None, **overrides}))


# --- the function -----------------------------------------------------------------------------------------------------


def apply(config: Config, params: Params, inputs: Inputs, ops: Ops) -> Output:
    """The loss and logits of a batch."""
    body = params["transformer"]
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(_embed, ops), body["wte"], inputs.tokens)
    x = ops.layer(partial(_place, config), body["wpe"], x, inputs.positions, inputs.num_positions)
    for index, layer_params in enumerate(body["h"]):
        x = ops.layer(partial(_layer, config, config.scale(index), ops), layer_params, x, inputs.mask)
    total, logits = ops.layer(
        partial(_head, config, ops), {"norm": body["ln_f"], "table": body["wte"]}, x, inputs.targets
    )
    return Output(mean_loss(total, inputs.num_targets), logits)


def _embed(ops: Ops, params: Params, tokens: Tensor) -> Tensor:
    return ops.embed(tokens, params["weight"])


def _place(config: Config, params: Params, x: Tensor, positions: Tensor, num_positions: Tensor) -> Tensor:
    """Adds each position's row (see the module's note for positions past the table)."""
    rows = embedding(torch.where(positions < config.n_positions, positions, 0), params["weight"])
    return torch.where(num_positions <= config.n_positions, x + rows, float("nan"))


def _head(config: Config, ops: Ops, params: Params, x: Tensor, targets: Tensor | None) -> Any:
    return ops.loss(_norm(config, x, params["norm"]), params["table"]["weight"], targets)


def _layer(
    config: Config, scale: float, ops: Ops, params: Params, x: Float[Tensor, "batch seq hidden"], mask: Mask
) -> Float[Tensor, "batch seq hidden"]:
    x = x + _attention(config, scale, ops, params["attn"], _norm(config, x, params["ln_1"]), mask)
    return x + _mlp(ops, params["mlp"], _norm(config, x, params["ln_2"]))


def _attention(config: Config, scale: float, ops: Ops, params: Params, x: Tensor, mask: Mask) -> Tensor:
    fused = linear(ops.enter(x), params["c_attn"]["weight"].T, params["c_attn"]["bias"])
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in fused.chunk(3, -1))
    return _join(ops, ops.attention(q, k, v, mask, scale=scale).transpose(1, 2).flatten(2), params["c_proj"])


def _mlp(ops: Ops, params: Params, x: Tensor) -> Tensor:
    return ops.leave(ops.tokenwise(_up_and_down, params, ops.enter(x))) + params["c_proj"]["bias"]


def _up_and_down(params: Params, x: Tensor) -> Tensor:
    """What the columns here add; its sum over the ranks lacks the bias."""
    x = gelu(linear(x, params["c_fc"]["weight"].T, params["c_fc"]["bias"]), approximate="tanh")
    return linear(x, params["c_proj"]["weight"].T)


def _join(ops: Ops, x: Tensor, params: Params) -> Tensor:
    """The projection that ends split work: the ranks' parts are summed, then the bias is added once."""
    return ops.leave(linear(x, params["weight"].T)) + params["bias"]


def _norm(config: Config, x: Float[Tensor, "*lead width"], params: Params) -> Float[Tensor, "*lead width"]:
    """(x - mean) / deviation * weight + bias over the last dim (Ba et al. 2016)."""
    return layer_norm(x, x.shape[-1:], params["weight"], params["bias"], config.layer_norm_epsilon)


# --- its parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a checkpoint."""
    hidden, width = config.n_embd, config.width
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config.vocab_size, hidden),
        "transformer.wpe.weight": (config.n_positions, hidden),
    }
    for index in range(config.n_layer):
        layer: dict[str, tuple[int, ...]] = {
            "ln_1": (hidden,),
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "ln_2": (hidden,),
            "mlp.c_fc": (hidden, width),
            "mlp.c_proj": (width, hidden),
        }
        for name, shape in layer.items():
            found[f"transformer.h.{index}.{name}.weight"] = shape
            found[f"transformer.h.{index}.{name}.bias"] = shape[-1:]
    return {**found, "transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters drawn from `seed`: normal matrices and tables, unit norms, zero biases."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * config.initializer_range).to(dtype)

    return pytree.nest({name: draw(name, shape) for name, shape in shapes(config).items()})


def rules(config: Config) -> Rules:
    """How each tensor may be split: q, k and v each by heads, the MLP by its width, the vocabulary."""
    qkv, heads, width = (config.n_embd,) * 3, config.n_head, config.width
    found: dict[str, Rule] = {
        "transformer.wte.weight": Split(0, vocab=config.vocab_size),
        "transformer.wpe.weight": Replicated(),
        "transformer.ln_f.*": Replicated(),
        "transformer.h.*.ln_[12].*": Replicated(),
        "transformer.h.*.attn.c_attn.weight": Split(1, blocks=heads, pieces=qkv),
        "transformer.h.*.attn.c_attn.bias": Split(0, blocks=heads, pieces=qkv),
        "transformer.h.*.attn.c_proj.weight": Split(0, blocks=heads),
        "transformer.h.*.mlp.c_fc.weight": Split(1, blocks=width),
        "transformer.h.*.mlp.c_fc.bias": Split(0, blocks=width),
        "transformer.h.*.mlp.c_proj.weight": Split(0, blocks=width),
        "transformer.h.*.c_proj.bias": Replicated(),
    }
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------


def config_from_json(values: Mapping[str, Any]) -> Config:
    """The Config of a GPT-2's config.json; what it leaves out has transformers' default.

    Raises:
        ValueError: another model type, or a setting that this file does not compute; all of them named.
    """
    if values.get("model_type") != "gpt2":
        raise ValueError(f"model_type {values.get('model_type')!r} is not 'gpt2'")
    wrong = []
    if values.get("activation_function", "gelu_new") not in ACTIVATIONS:
        wrong.append(f"activation_function {values['activation_function']!r} ({', '.join(ACTIVATIONS)} are)")
    if values.get("tie_word_embeddings") is False:
        wrong.append("tie_word_embeddings False")
    wrong += [name for name in ("add_cross_attention", "quantization_config") if values.get(name)]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: not computed here")
    values = {**dict.fromkeys(DROPOUT, 0.1), **values}
    return Config(**{f.name: values[f.name] for f in dataclasses.fields(Config) if f.name in values})


def config_to_json(config: Config) -> dict[str, Any]:
    """A config.json that transformers reads as the same model."""
    return {
        **dataclasses.asdict(config),
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def load(path: str | Path, dtype: torch.dtype | None = None, *, lazy: bool = False) -> tuple[Model, Params]:
    """Reads a checkpoint folder with config.json and safetensors; `dtype` None keeps the checkpoint's.

    With `lazy` the parameters stay in their files, for `shard` to read a rank's own slices from. To train without the
    file's dropout: `model(dataclasses.replace(config, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))`.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """
    config, params = read_params(path, dtype, lazy, config_from_json, shapes, _renamed)
    return model(config), params


def _renamed(path: str | Path, config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """Files of the bare body lack the prefix; old files hold causal masks as buffers."""
    tensors = {n if n.startswith(("transformer.", "lm_head.")) else f"transformer.{n}": x for n, x in tensors.items()}
    return {n: x for n, x in tensors.items() if not n.endswith((".attn.bias", ".attn.masked_bias"))}


def save(folder: str | Path, config: Config, params: Params) -> None:
    """Writes config.json and model.safetensors, tensor for tensor, so that `load` and transformers read them back.

    Raises:
        ValueError: parameters that are not this config's.
    """
    write_params(folder, config, params, config_to_json, shapes)

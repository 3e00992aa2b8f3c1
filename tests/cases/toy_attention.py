"""A small attention-only language model with everything that the cases need and the Llama family lacks.

Per-layer windows, chunks, a scale, a soft cap, sinks, a fused query-key-value matrix, a norm shared by all heads, a
rotary key shared by all heads (as in multi-head latent attention), scalar parameters, tied embeddings. Rules say how
each leaf splits. Faults are put in by the tests, never here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fcp
from fcp import Replicated, Shared, Split, pytree
from fcp.loss import mean_loss


@dataclass(frozen=True)
class Config:
    """`windows` has one entry a layer. `rotary_key` is the width of a rotary key that all heads share (0: none)."""

    vocab_size: int = 64
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    windows: tuple[int | None, ...] = (None,)
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    fused: bool = False
    qk_norm: bool = False
    rotary_key: int = 0
    scalars: bool = False
    tied: bool = False
    pad_token_id: int | None = None
    attention_dropout: float = 0.0

    @property
    def pieces(self) -> tuple[int, int, int]:
        keys = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, keys, keys


def toy(seed: int = 0, **fields: Any) -> tuple[fcp.Model, Any]:
    """The model of these fields and random float64 parameters."""
    config = Config(**fields)
    model = fcp.Model(config, partial(apply, config), partial(init, config), rules(config))
    return model, model.init(seed)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, dim, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    found: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for index in range(len(config.windows)):
        leaves: dict[str, tuple[int, ...]] = {"norm": (hidden,), "o": (hidden, heads * dim)}
        if config.fused:
            leaves["qkv"] = (sum(config.pieces), hidden)
        else:
            leaves["q"] = (heads * (dim + config.rotary_key), hidden)
            leaves["k"] = leaves["v"] = (kv_heads * dim, hidden)
        if config.rotary_key:
            leaves["rotary_key"] = (config.rotary_key, hidden)
        if config.qk_norm:
            leaves["q_norm"] = leaves["k_norm"] = (dim,)
        if config.sinks:
            leaves["sinks"] = (heads,)
        if config.scalars:
            leaves["gain"], leaves["skip"] = (), ()
        found.update({f"layers.{index}.{name}": shape for name, shape in leaves.items()})
    found["norm"] = (hidden,)
    if not config.tied:
        found["head.weight"] = (config.vocab_size, hidden)
    return found


def rules(config: Config) -> fcp.Rules:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    by_name: dict[str, fcp.Rule] = {
        "norm": Replicated(),
        "o": Split(1, blocks=heads),
        "qkv": Split(0, blocks=kv_heads, pieces=config.pieces),
        "q": Split(0, blocks=heads),
        "k": Split(0, blocks=kv_heads),
        "v": Split(0, blocks=kv_heads),
        "rotary_key": Shared(),
        "q_norm": Shared(),
        "k_norm": Shared(),
        "sinks": Split(0, blocks=heads),
        "gain": Shared(),
        "skip": Replicated(),
    }
    found: dict[str, fcp.Rule] = {}
    for path in shapes(config):
        if path.endswith("weight"):
            found[path] = Split(0, vocab=config.vocab_size)
        elif path.startswith("layers"):
            name = path.split(".")[2]
            found[f"layers.*.{name}"] = by_name[name]
        else:
            found[path] = Replicated()
    return found


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(path: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_matrix = len(shape) == 2
        return (0.3 * x if is_matrix else 1 + 0.3 * x).to(dtype)

    return pytree.nest({path: draw(path, shape) for path, shape in shapes(config).items()})


def apply(config: Config, params: Any, inputs: fcp.Inputs, ops: fcp.Ops) -> fcp.Output:
    x = inputs.embeds
    if x is None:
        x = ops.layer(partial(_embed, ops), params["embed"], inputs.tokens)
    for window, layer_params in zip(config.windows, params["layers"], strict=True):
        x = ops.layer(partial(_layer, config, window, ops), layer_params, x, inputs.positions, inputs.mask)
    table = params["embed" if config.tied else "head"]
    total, logits = ops.layer(partial(_head, ops), {"norm": params["norm"], "table": table}, x, inputs.targets)
    return fcp.Output(mean_loss(total, inputs.num_targets), logits)


def _embed(ops: fcp.Ops, params: Any, ids: Tensor) -> Tensor:
    return ops.embed(ids, params["weight"])


def _head(ops: fcp.Ops, params: Any, x: Tensor, targets: Tensor | None) -> Any:
    return ops.loss(_norm(x) * params["norm"], params["table"]["weight"], targets)


def _layer(
    config: Config, window: int | None, ops: fcp.Ops, params: Any, x: Tensor, positions: Tensor, mask: fcp.Mask
) -> Tensor:
    inside = ops.enter(_norm(x) * params["norm"])
    q, k, v = _queries_keys_values(config, params, inside, positions)
    out = ops.attention(
        q,
        k,
        v,
        mask,
        window=window,
        chunk=config.chunk,
        scale=config.scale,
        softcap=config.softcap,
        sinks=params.get("sinks"),
    )
    if config.scalars:
        out = out * params["gain"]
    out = ops.leave(linear(out.transpose(1, 2).flatten(2), params["o"]))
    return x + (out * params["skip"] if config.scalars else out)


def _queries_keys_values(config: Config, params: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def heads(y: Tensor, dim: int) -> Tensor:
        return y.unflatten(-1, (-1, dim)).transpose(1, 2)

    dim, extra = config.head_dim, config.rotary_key
    if config.fused:
        sizes = [piece * params["qkv"].shape[0] // sum(config.pieces) for piece in config.pieces]
        q, k, v = (heads(y, dim) for y in linear(x, params["qkv"]).split(sizes, -1))
    else:
        q = heads(linear(x, params["q"]), dim + extra)
        k, v = heads(linear(x, params["k"]), dim), heads(linear(x, params["v"]), dim)
    if config.qk_norm:
        q, k = _norm(q) * params["q_norm"], _norm(k) * params["k_norm"]
    if not extra:
        return _rotate(q, positions), _rotate(k, positions), v
    shared = _rotate(linear(x, params["rotary_key"]).unsqueeze(1), positions).expand(-1, k.shape[1], -1, -1)
    q = torch.cat([q[..., :dim], _rotate(q[..., dim:], positions)], -1)
    return q, torch.cat([k, shared], -1), v


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions on [batch, heads, seq, dim]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].to(x.dtype) * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

"""Ops: the few steps of a model that a transform may replace.

A model calls its parallelisable steps through this record and is otherwise plain PyTorch. `LOCAL`, the default, is one
device with everything on it, so a model alone is an ordinary function. A transform hands the model a record in which it
replaced some fields; each replacement wraps or stands in for the one it was given, so transforms compose in any order.

No field takes `**kwargs`: an argument that a replacement does not know must be an error, never swallowed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fcp._attention import attention
from fcp._experts import experts
from fcp._grouped import ExpertFn
from fcp._linear import linear
from fcp._tiled_loss import in_tiles, tiled_total
from fcp.loss import cap, token_losses
from fcp.masks import Mask
from fcp.typing import Params

__all__ = ["LOCAL", "Attention", "Experts", "Loss", "Ops"]


def _same(x: Tensor) -> Tensor:
    return x


@runtime_checkable
class Attention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        *,
        window: int | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@runtime_checkable
class Loss(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        table: Tensor | None,
        targets: Tensor | None,
        *,
        logits: bool = True,
        softcap: float | None = None,
        tile: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]: ...


@runtime_checkable
class Experts(Protocol):
    def __call__(self, x: Tensor, weights: Tensor, indices: Tensor, params: Params, fn: ExpertFn) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """The operations that a model asks for.

    Attributes:
        attention: as `fcp.attention`: q [batch, heads, seq, dim], k and v [batch, kv_heads, seq, dim], the mask of the
            whole sequence; gives [batch, heads, seq, dim].
        enter: marks where split (tensor-parallel) work begins; the identity alone.
        leave: joins what split work gave; the identity alone. Add a bias that all ranks share after it.
        split: takes part in split work with this rank's slice of the last dim of a value that all ranks hold; the
            identity alone.
        join: puts the last dim of what split work gave together, so that all ranks hold it; the identity alone.
        embed: (ids [batch, seq], table [vocab, hidden]) -> [batch, seq, hidden].
        loss: (hidden [batch, seq, hidden], table [vocab, hidden], targets [batch, seq] or None) -> (the sum of the
            token losses, a scalar; the logits [batch, seq, vocab]). No targets: the sum is None. `logits=False`: the
            logits are None. No table: `hidden` are the logits already, over the whole vocabulary. `softcap`: each
            logit x becomes softcap * tanh(x / softcap) before the loss. Where no logits are asked for and those of all
            tokens would be many, the loss is made in tiles of tokens, `tile` of them or as many as are worth it.
        tokenwise: (fn, params, x [batch, seq, width]) -> fn(params, x), of an `fn` for which each token stands for
            itself (an MLP between `enter` and `leave`); what it closes over must be no tensor.
        layer: (fn, layer_params, *args) -> fn(layer_params, *args), with every parameter of the model consumed in one
            of these calls: it is where sharded parameters are gathered and where a layer is rematerialised. `args` are
            pytrees; what `fn` closes over must be no tensor.
        experts: as `fcp._experts.experts`: x [batch, seq, hidden], weights and indices [batch, seq, k], a pytree of
            expert parameters [experts, ...], and what an expert does to a row; gives [batch, seq, hidden]. `indices`
            count all experts, whichever rank holds them. Call it outside `enter` and `leave`.
        total: the sum, over all ranks that hold other tokens, of a quantity that was summed over the tokens here (how
            many chose an expert, say); the identity alone.
    """

    attention: Attention
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    split: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor, Tensor], Tensor]
    loss: Loss
    tokenwise: Callable[[Callable[[Params, Tensor], Tensor], Params, Tensor], Tensor]
    layer: Callable[..., Any]
    experts: Experts
    total: Callable[[Tensor], Tensor]


def _embed(ids: Int[Tensor, "batch seq"], table: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "batch seq hidden"]:
    return torch.nn.functional.embedding(ids, table)


def _loss(
    hidden: Float[Tensor, "batch seq hidden"],
    table: Float[Tensor, "vocab hidden"] | None,
    targets: Int[Tensor, "batch seq"] | None,
    *,
    logits: bool = True,
    softcap: float | None = None,
    tile: int | None = None,
) -> tuple[Float[Tensor, ""] | None, Float[Tensor, "batch seq vocab"] | None]:
    if in_tiles(hidden, table, logits, tile) and table is not None and targets is not None:
        return tiled_total(hidden, table, targets, tile=tile, softcap=softcap), None
    scores = cap(hidden if table is None else linear(hidden, table), softcap)
    total = None if targets is None else token_losses(scores, targets).sum()
    return total, (scores if logits else None)


def _tokenwise(fn: Callable[[Params, Tensor], Tensor], params: Params, x: Tensor) -> Tensor:
    return fn(params, x)


def _layer(fn: Callable[..., Any], layer_params: Params, *args: Any) -> Any:
    return fn(layer_params, *args)


LOCAL = Ops(
    attention=attention,
    enter=_same,
    leave=_same,
    split=_same,
    join=_same,
    embed=_embed,
    loss=_loss,
    tokenwise=_tokenwise,
    layer=_layer,
    experts=experts,
    total=_same,
)
"""Everything on one device."""

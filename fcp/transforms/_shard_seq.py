"""shard_seq: each rank computes one slice of the sequence (context parallelism).

What is split: tokens, positions, targets. What is not: the description of the mask, which is a fact about the whole
sequence. Targets were shifted and counted before (`prepare`), so a slice's last token keeps the next slice's first
token as its target, and the ranks' losses add up.

A sequence that the ranks do not divide is padded here, and all of it together: tokens with the pad token, embeddings
with zeros, positions going on (up to the model's last), targets ignored, and the mask's description by as many
invisible tokens. The logits come back at the caller's length.

Ranks may hold the sequence in another order than its own (`_order.py`), so that each has as much attention to do as the
others. All that is split follows, the mask's description says where each token is from, and the logits come back in the
caller's order.

Attention still has to bring the slices together: compose with `ulysses` over the same axis. Alone, on a model with
attention, this raises; a model whose every step acts on each token by itself needs no more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fcp import pytree
from fcp._order import check_layout, multiple_of, order_of
from fcp.axes import Axes, axis_size, names_of
from fcp.collectives import psum, shard, unshard
from fcp.masks import Mask
from fcp.ops import Ops
from fcp.sharded import Sharded, add_varying, base_model, pad_to_multiple
from fcp.typing import IGNORED, Inputs, ModelFn, Output, Params

__all__ = ["shard_seq"]


def shard_seq(
    model_fn: ModelFn, *, axis: Axes = "cp", layout: Literal["contiguous", "zigzag", "balanced"] = "contiguous"
) -> Sharded:
    """Splits the sequence over `axis`: [batch, seq] to [batch, seq_local] (Li et al. 2021, section 3).

    Args:
        model_fn: any model function.
        axis: the axis whose ranks get different slices.
        layout: the order in which the ranks hold the sequence. "contiguous": its own. "zigzag": rank r has the r-th of
            2 * size pieces from the front and the r-th from the back, which under a causal mask is equal work where
            ranks keep their own queries (`ring`, `gather`). "balanced": blocks dealt out by the number of keys they
            see, for packed and padded rows. Padding is to a multiple of size, of 2 * size, and of size times a block
            (a sixteenth of a rank's share, rounded down).

    Returns:
        The same function of whole sequences of any length; lengths that the axis does not divide are padded.

    Raises:
        ValueError: an unknown layout; the model is to prove that each position outside attention stands for itself, and
            cannot; or, when called, it attends and no transform brings the slices together (see `ulysses`).
    """
    check_layout("shard_seq", layout)
    config = getattr(base_model(model_fn), "config", None)
    prove = getattr(base_model(model_fn), "prove", None)
    if prove is not None:
        prove()

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        seq, size = inputs.positions.shape[1], axis_size(axis)
        multiple = multiple_of(layout, seq, size)
        whole = _pad(inputs, multiple, _pad_token(config), _positions_in(config))
        order = order_of(layout, whole.mask, size, multiple // size)
        if order is not None:
            whole = replace(_each(whole, lambda x: _gather(x, order)), mask=whole.mask.take(order))
        local = _each(whole, lambda x: shard(x, axis, dim=1))
        out = inner(params, local, replace(ops, total=lambda x: psum(ops.total(x), axis)))
        logits = None if out.logits is None else unshard(out.logits, axis, dim=1)
        if logits is not None and order is not None:
            logits = _gather(logits, order.argsort(1))
        return Output(
            loss=None if out.loss is None else psum(out.loss, axis),
            logits=None if logits is None else logits[:, :seq],
            statistics=out.statistics,
        )

    told = "" if layout == "contiguous" else f", {layout}"
    return Sharded(model_fn, f"shard_seq({' x '.join(names_of(axis))}{told})", run, add_varying(axis))


def _each(inputs: Inputs, fn: Callable[[Tensor], Tensor]) -> Inputs:
    """`fn` of all that is split along the sequence."""
    names = ("tokens", "embeds", "positions", "targets", "real")
    return replace(inputs, **{name: pytree.map(fn, getattr(inputs, name)) for name in names})


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of x [batch, seq, ...] in another order [batch, seq]."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _pad_token(config: Any) -> int:
    """The config's pad token, or 0 where it names none of the vocabulary (configs say -1 or one past the end)."""
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and 0 <= token < getattr(config, "vocab_size", token + 1) else 0


def _positions_in(config: Any) -> int | None:
    """How many positions the model has (learned positions end there), if the config says."""
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((n for n in found if isinstance(n, int)), None)


def _pad(inputs: Inputs, size: int, pad_token: int, num_positions: int | None) -> Inputs:
    short = -inputs.positions.shape[1] % size
    if not short:
        return inputs
    mask = inputs.mask

    def pad(x: Tensor | None, value: int | bool) -> Tensor | None:
        return None if x is None else pad_to_multiple(x, size, 1, value)

    positions = _continue(inputs.positions, short)
    if num_positions is not None:  # a table of learned positions has no row past its end; real tokens keep theirs
        positions = torch.minimum(positions, inputs.num_positions.clamp(min=num_positions) - 1)
    # A pad key comes after every real query, so causality hides it; where validity is kept, it says so too.
    return replace(
        inputs,
        tokens=pad(inputs.tokens, pad_token),
        embeds=pad(inputs.embeds, 0),
        positions=positions,
        targets=pad(inputs.targets, IGNORED),
        mask=Mask(
            positions=_continue(mask.positions, short),
            documents=None
            if mask.documents is None
            else torch.cat([mask.documents, mask.documents[:, -1:].expand(-1, short)], 1),
            valid=pad(mask.valid, False),
            consecutive=mask.consecutive,
        ),
        real=pad(torch.ones_like(inputs.positions, dtype=torch.bool) if inputs.real is None else inputs.real, False),
    )


def _continue(positions: Tensor, short: int) -> Tensor:
    steps = torch.arange(1, short + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + steps], 1)

"""Attention on one device: the description goes in, one kernel runs, and vmap does not loop.

Problem. torch's fused attention has no batching rule on CPU, so a vmapped rank dimension would run it once a rank; and
a mask that is repeated for every rank, or built where plain causal would do, costs more than the attention.

Idea. Attention is a Function of its own. Its vmap rule folds the vmapped dim away and calls itself one level below, and
so does its backward, which is a Function too. At the bottom nothing is batched, and one kernel (`fcp.kernels`) runs
once, on plain tensors. Ranks that share the mask are folded into the heads, so that the mask is not repeated: grouped
heads stay in order, so each query head still meets its own key-value head. Ranks whose masks differ go into the batch.

Sinks need no kernel of their own. A sink is one more term in each row's normaliser: output and log-sum-exp are
corrected, and the kernel's backward, given the corrected ones, is exact (gpt-oss; Xiao et al. 2023, section 3.3).

Which kernel it is, is decided at the bottom, where the mask can be read. One that was asked for by name and cannot
serve the call is an error before that, as far as its options, devices and dtypes tell.

The gradient's own gradient differentiates the plain formula (`kernels.differentiable`), so any order is available.

Queries may meet the keys of another part of the sequence (`Mask.against`). What they find there is no attention yet,
but `part` gives it with its log-sum-exp, by which two of them are merged (`kernels.merge`), and `part_gradient` is the
part's share of the gradient, given the whole's output and log-sum-exp.

Left out: forward-mode derivatives.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from fcp import _flex, _planned, _varlen  # noqa: F401 - they register their kernels
from fcp._function import Function
from fcp._kept import once
from fcp._kernel_check import serving
from fcp.kernels import Spec, check_kernel, differentiable, weight_of
from fcp.masks import Mask, describe

__all__ = [
    "attention",
    "check_operands",
    "kernel_of",
    "part",
    "part_gradient",
    "row_sinks",
    "sinks_gradient",
    "spec_of",
    "with_sinks",
]


def attention(
    q: Float[Tensor, "batch heads seq dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys v_dim"],
    mask: Mask | None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    kernel: str = "auto",
) -> Float[Tensor, "batch heads seq v_dim"]:
    """softmax(scale q k^T + mask) v, with query head h on key and value head h // (heads / kv_heads).

    float64, float32, bfloat16 or float16; logits and their normaliser are in float32 or wider. (Vaswani et al. 2017,
    section 3.2.1; grouped heads: Ainslie et al. 2023, section 2.2; soft cap: Gemma 2, section 2.)

    Args:
        mask: the description of the whole sequence; None for plain causal. Where it has keys of its own (the whole
            sequence's, met by some of its queries), k and v are theirs.
        window: the number of keys a query sees, itself included.
        chunk: queries see keys of their own chunk of positions only.
        scale: default 1 / sqrt(dim).
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: one logit a query head that takes weight and gives no value.
        kernel: a registered kernel's name; "auto" takes the best of the device that serves the call
            (`fcp.kernels.AUTO`).

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown kernel, or one that cannot serve the call.
    """
    check_operands(q, k, v, window=window, chunk=chunk, softcap=softcap, sinks=sinks)
    _check_mask(q, k, v, mask)
    if mask is None:
        mask = describe(torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1))
    spec = spec_of(q, v, mask, window=window, chunk=chunk, scale=scale, softcap=softcap, kernel=kernel)
    out, _ = _Attention.apply(q, k, v, row_sinks(q, sinks), *mask.tensors(), mask.consecutive, spec)
    return out


def spec_of(
    q: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None,
    chunk: int | None,
    scale: float | None,
    softcap: float | None,
    kernel: str,
) -> Spec:
    """What is fixed about a call.

    Raises:
        ValueError: an unknown kernel, or one that cannot serve the call, whatever the numbers of its mask.
    """
    spec = Spec(float(q.shape[-1] ** -0.5 if scale is None else scale), window, chunk, softcap, kernel)
    check_kernel(spec, q, v, parts=not mask.whole)
    return spec


def kernel_of(attention_of: Any) -> str | None:
    """The kernel that an `Ops.attention` asks for, where it is this file's; None where it is something else."""
    if attention_of is attention:
        return "auto"
    if (
        isinstance(attention_of, partial)
        and attention_of.func is attention
        and set(attention_of.keywords) == {"kernel"}
    ):
        return attention_of.keywords["kernel"]
    return None


def row_sinks(q: Tensor, sinks: Tensor | None) -> Tensor | None:
    """One sink a row and head: it folds as the heads do, and expand's adjoint sums over the rows."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return None if sinks is None else sinks.to(wide).expand(q.shape[0], -1)


# --- parts of the keys ------------------------------------------------------------------------------------------------


def part(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    """What the queries find among some keys: (output, log-sum-exp [batch, heads, seq]), without a graph."""
    return _Attention.apply(q, k, v, None, *mask.tensors(), mask.consecutive, spec)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one more term in each row's normaliser; sinks [batch, heads]."""
    both = torch.logaddexp(lse, sinks.unsqueeze(-1))
    return (out * weight_of(lse, both)).to(out.dtype), both


def sinks_gradient(g: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's weight multiplies no value, so of the softmax's gradient only the row correction is left."""
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(sinks.unsqueeze(-1) - lse))
    return -(weight * (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(-1)


def part_gradient(
    g: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by these keys, where `out` and `lse` are those over all keys; without a graph."""
    return _AttentionGradient.apply(g, out, lse, q, k, v, None, *mask.tensors(), mask.consecutive, spec)[:3]


def check_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raises ValueError where q, k, v and the options are no attention, whatever the mask."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention: {_shapes(q, k, v)}; each must be [batch, heads, seq, dim]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: {_shapes(q, k, v)}; batch, seq and (of q and k) dim must agree")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q {q.dtype}, k {k.dtype}, v {v.dtype}; they must share one dtype")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: {q.shape[1]} query heads over {k.shape[1]} key and value heads do not divide")
    for name, value in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"attention: {name}={value} must be above 0 (None for no {name})")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"attention: sinks {tuple(sinks.shape)}; one logit for each of {q.shape[1]} query heads")


def _check_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> None:
    keys = q.shape[2] if mask is None or mask.keys is None else mask.keys.seq
    if keys != k.shape[2]:
        raise ValueError(f"attention: {_shapes(q, k, v)}; batch, seq and (of q and k) dim must agree")
    if mask is not None and mask.seq != q.shape[2]:
        raise ValueError(
            f"attention: {q.shape[2]} tokens of a sequence of {mask.seq}: the sequence is split and nothing brings it "
            f"together for attention. Compose shard_seq with fcp.ulysses, fcp.ring or fcp.gather over the same axis."
        )
    if mask is not None and mask.positions.shape[0] != q.shape[0]:
        raise ValueError(f"attention: a mask of {mask.positions.shape[0]} rows for a batch of {q.shape[0]}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


# --- the Function and its gradient ------------------------------------------------------------------------------------
#
# Both take their operands in the order: tensors [batch, heads, ...] (`sinks` is [batch, heads] or None), then the
# tensors of the mask [batch, seq] (or None), then what is fixed.

MASKS = 8
"""The tensors of a mask: four of its queries, four of its keys."""


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    return serving(spec, q, v, mask).forward(q, k, v, mask, spec)


class _Attention(Function):
    """(q, k, v, sinks, mask, spec) -> (out [batch, heads, seq, v_dim], log-sum-exp [batch, heads, seq])."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *described: Any,
    ) -> tuple[Tensor, Tensor]:
        *mask, consecutive, spec = described
        out, lse = once("attention", _forward, q, k, v, Mask.of(mask, consecutive), spec)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.consecutive, ctx.spec = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, lse, *tensors = ctx.saved_tensors
        dq, dk, dv, d_sinks = _AttentionGradient.apply(g, out, lse, *tensors, ctx.consecutive, ctx.spec)
        return dq, dk, dv, (None if tensors[3] is None else d_sinks), *([None] * (MASKS + 2))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        return _one_level_below(_Attention, info.batch_size, in_dims, operands)


class _AttentionGradient(Function):
    """(g, out, lse, q, k, v, sinks, mask, spec) -> (dq, dk, dv, d_sinks); without sinks, zeros in the last place."""

    @staticmethod
    def forward(g: Tensor, out: Tensor, lse: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        q, k, v, sinks, *mask, consecutive, spec = operands
        described = Mask.of(mask, consecutive)
        dq, dk, dv = serving(spec, q, v, described).backward(g, q, k, v, out, lse, described, spec)
        return dq, dk, dv, (lse.new_zeros(lse.shape[:2]) if sinks is None else sinks_gradient(g, out, lse, sinks))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        g, _, _, *tensors, ctx.consecutive, ctx.spec = inputs
        ctx.save_for_backward(g, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # `out` and `lse` are functions of q, k, v and sinks, whose cotangents hold what flows through them.
        g, q, k, v, sinks, *mask = ctx.saved_tensors
        described = Mask.of(mask, ctx.consecutive)
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)

        def gradient(g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            plain: Any = partial(differentiable, mask=described, spec=ctx.spec)
            return torch.func.vjp(plain, *inputs)[1](g)

        _, vjp = cast(Any, torch.func.vjp)(gradient, g, *inputs)
        seconds = vjp(tuple(cotangents[: len(inputs)]))
        dg, dq, dk, dv, *d_sinks = seconds
        return dg, None, None, dq, dk, dv, *(d_sinks or [None]), *([None] * (MASKS + 2))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        return _one_level_below(_AttentionGradient, info.batch_size, in_dims, operands)


def _one_level_below(
    function: type[Function], size: int, in_dims: tuple[Any, ...], operands: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The vmap rule of both: folds the vmapped dim of `size` away, calls `function`, and unfolds what it gives.

    Into the heads where no tensor of the mask has the dim, else into the batch, which the mask has too.
    """
    *tensors, consecutive, spec = operands
    into_batch = any(dim is not None for dim in in_dims[-2 - MASKS : -2])

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1) if into_batch else x.movedim(0, 1).flatten(1, 2)

    def unfold(x: Tensor) -> Tensor:
        return x.unflatten(0, (size, -1)) if into_batch else x.unflatten(1, (size, -1)).movedim(1, 0)

    folded = [fold(x, dim) for x, dim in zip(tensors, in_dims[:-2], strict=True)]
    if not into_batch:
        folded[-MASKS:] = tensors[-MASKS:]
    results = function.apply(*folded, consecutive, spec)
    return tuple(unfold(x) for x in results), (0,) * len(results)

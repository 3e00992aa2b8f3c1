"""Attention on one device: the description goes in, a fast kernel runs, and vmap does not loop.

Problem. torch's fused attention has no batching rule on CPU, so a vmapped rank dimension would run it once a rank;
and most of its callers build a sequence x sequence mask that they then hand to every layer.

Idea. Attention is a Function of its own. Its vmap rule folds a rank dimension into the heads where the mask is the
same for all ranks (so the mask is not repeated), into the batch where it is not, and calls itself one level below;
so does its backward. At the bottom nothing is batched, operands are plain tensors, and one kernel runs once.

A kernel is a pair of functions on plain tensors (`Kernel`): forward gives the output and the log-sum-exp of each row,
backward takes both. Two are here: "fused", torch's flash kernel, which knows no soft cap, and "reference", a plain
softmax that serves every description. `register_kernel` adds one. Sinks need no kernel of their own: a sink is one
more term in each row's normaliser, so output and log-sum-exp are corrected, and the same backward, given the corrected
ones, is exact (gpt-oss; Xiao et al. 2023, section 3.3).

A query that sees no key gives zero output and zero gradient.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fcp.masks import Mask, describe, materialize

__all__ = ["Kernel", "Spec", "attention", "kernels", "register_kernel"]


@dataclass(frozen=True)
class Spec:
    """What is fixed about one attention call before any tensor is seen.

    Attributes:
        scale: the factor on q k^T.
        window, chunk: as in `fcp.masks`.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        kernel: the name of the kernel that computes it.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    kernel: str = "reference"


@dataclass(frozen=True)
class Kernel:
    """An attention kernel on plain tensors (no vmap level, no graph).

    Attributes:
        forward: (q, k, v, mask, spec) -> (out [batch, heads, seq, dim], lse [batch, heads, seq]); lse is the natural
            log-sum-exp of each row's logits, in float32 or wider, -inf for a row that sees no key.
        backward: (g, q, k, v, out, lse, mask, spec) -> (dq, dk, dv). It must take `out` and `lse` as given, not compute
            its own: p = exp(logits - lse), and the row correction is sum(g * out).
        refuses: spec -> why this kernel cannot serve it, or None.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Mask, Spec], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Mask, Spec], tuple[Tensor, Tensor, Tensor]]
    refuses: Callable[[Spec], str | None] = lambda spec: None


# --- the reference ----------------------------------------------------------------------------------------------------


def _logits(q: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Grouped logits [batch, kv_heads, group, seq, seq] in float32 or wider, capped; and the raw ones."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (k.shape[1], -1)).to(wide)
    raw = (q @ k.to(wide).transpose(-1, -2).unsqueeze(2)) * spec.scale
    return (raw if spec.softcap is None else spec.softcap * torch.tanh(raw / spec.softcap)), raw


def _allowed(mask: Mask, spec: Spec) -> Tensor:
    allowed = materialize(mask, window=spec.window, chunk=spec.chunk)
    if allowed is None:
        seq = mask.seq
        allowed = torch.ones(seq, seq, dtype=torch.bool, device=mask.positions.device).tril()[None, None]
    return allowed.unsqueeze(2)


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    logits, _ = _logits(q, k, spec)
    logits = logits.masked_fill(~_allowed(mask, spec), -math.inf)
    lse = logits.logsumexp(-1)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out = p @ v.to(p.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _reference_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (k.shape[1], -1)
    logits, raw = _logits(q, k, spec)
    wide = logits.dtype
    lse = lse.masked_fill(lse == -math.inf, 0.0).unflatten(1, groups).unsqueeze(-1)
    p = torch.exp(logits - lse).masked_fill(~_allowed(mask, spec), 0.0)
    g = g.unflatten(1, groups).to(wide)
    dv = (p.transpose(-1, -2) @ g).sum(2)
    row = (g * out.unflatten(1, groups).to(wide)).sum(-1, keepdim=True)
    ds = p * (g @ v.to(wide).transpose(-1, -2).unsqueeze(2) - row)
    if spec.softcap is not None:
        ds = ds * (1 - torch.tanh(raw / spec.softcap) ** 2)
    dq = (ds @ k.to(wide).unsqueeze(2)) * spec.scale
    dk = (ds.transpose(-1, -2) @ q.unflatten(1, groups).to(wide)).sum(2) * spec.scale
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# --- torch's flash kernel ---------------------------------------------------------------------------------------------


def _additive(mask: Mask, spec: Spec, dtype: torch.dtype) -> Tensor | None:
    allowed = materialize(mask, window=spec.window, chunk=spec.chunk)
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def _rows(dim: int, *tensors: Tensor) -> list[Tensor]:
    """What the flash kernel wants: one head size (zeros in q, k or v change nothing), and rows that lie dense."""
    padded = (torch.nn.functional.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    additive = _additive(mask, spec, q.dtype)
    v_dim = v.shape[-1]
    q, k, v = _rows(max(q.shape[-1], v_dim), q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, additive is None, attn_mask=additive, scale=spec.scale
    )
    if additive is not None:  # the kernel says 0 for a row without a key
        lse = lse.masked_fill((additive == -math.inf).all(-1), -math.inf)
    return out[..., :v_dim], lse


def _fused_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    additive = _additive(mask, spec, q.dtype)
    q_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v, g, out = _rows(max(q_dim, v_dim), q, k, v, g, out)
    if additive is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, additive is None, attn_mask=additive, scale=spec.scale
    )
    return dq[..., :q_dim], dk[..., :q_dim], dv[..., :v_dim]


_registry: dict[str, Kernel] = {
    "reference": Kernel(_reference_forward, _reference_backward),
    "fused": Kernel(
        _fused_forward,
        _fused_backward,
        refuses=lambda spec: None if spec.softcap is None else "torch's flash kernel has no soft cap",
    ),
}
kernels: Mapping[str, Kernel] = MappingProxyType(_registry)
"""The registered attention kernels by name."""


def register_kernel(name: str, kernel: Kernel) -> None:
    """Adds an attention kernel under `name`, to be asked for as `fcp.attention(..., kernel=name)`.

    Raises:
        ValueError: the name is taken.
    """
    if name in _registry or name == "auto":
        raise ValueError(f"register_kernel: {name!r} is taken; registered are {', '.join(_registry)}")
    _registry[name] = kernel


def _pick(spec: Spec, device: torch.device) -> Spec:
    if spec.kernel == "auto":
        fused = device.type == "cpu" and _registry["fused"].refuses(spec) is None
        return replace(spec, kernel="fused" if fused else "reference")
    if spec.kernel not in _registry:
        raise ValueError(f"attention: no kernel {spec.kernel!r}; registered are {', '.join(_registry)}")
    why = _registry[spec.kernel].refuses(spec)
    if why is not None:
        raise ValueError(f"attention: kernel {spec.kernel!r} cannot serve {spec}: {why}; use kernel='auto'")
    return spec


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    q: Float[Tensor, "batch heads seq dim"],
    k: Float[Tensor, "batch kv_heads seq dim"],
    v: Float[Tensor, "batch kv_heads seq v_dim"],
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

    float64, float32 or bfloat16; logits and their normaliser are in float32 or wider. (Vaswani et al. 2017, section
    3.2.1; grouped heads: Ainslie et al. 2023, section 2.2; soft cap: Gemma 2, section 2.)

    Args:
        mask: the description of the whole sequence; None for plain causal.
        window: the number of keys a query sees, itself included.
        chunk: queries see keys of their own chunk of positions only.
        scale: default 1 / sqrt(dim).
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: one logit a query head that takes weight and gives no value.
        kernel: a registered kernel's name; "auto" takes the fused one wherever it serves the call.

    Raises:
        ValueError: shapes that do not fit, an unknown kernel, or one that cannot serve the call.
    """
    _check(q, k, v, mask, window, chunk, softcap, sinks)
    if mask is None:
        mask = describe(torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1))
    spec = Spec(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        window=window,
        chunk=chunk,
        softcap=softcap,
        kernel=kernel,
    )
    row_sinks = None if sinks is None else sinks.unsqueeze(0)
    out, _ = _Attention.apply(q, k, v, row_sinks, *_tensors(mask), mask.consecutive, _pick(spec, q.device))
    return out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention: {shapes}; each must be [batch, heads, seq, dim]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: {shapes}; batch, seq and (of q and k) dim must agree")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: {q.shape[1]} query heads over {k.shape[1]} key and value heads do not divide")
    if mask is not None and mask.seq != q.shape[2]:
        raise ValueError(
            f"attention: {q.shape[2]} tokens of a sequence of {mask.seq}: the sequence is split and nothing brings it "
            f"together for attention. Compose shard_seq with fcp.ulysses over the same axis."
        )
    if mask is not None and mask.positions.shape[0] != q.shape[0]:
        raise ValueError(f"attention: a mask of {mask.positions.shape[0]} rows for a batch of {q.shape[0]}")
    for name, value in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"attention: {name}={value} must be above 0 (None for no {name})")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"attention: sinks {tuple(sinks.shape)}; one logit for each of {q.shape[1]} query heads")


def _tensors(mask: Mask) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return mask.positions, mask.documents, mask.valid


class _Attention(torch.autograd.Function):
    """(q, k, v, sinks [1 or batch, heads], positions, documents, valid) -> (out, log-sum-exp)."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        positions: Tensor,
        documents: Tensor | None,
        valid: Tensor | None,
        consecutive: bool,
        spec: Spec,
    ) -> tuple[Tensor, Tensor]:
        mask = Mask(positions, documents, valid, consecutive)
        out, lse = _registry[spec.kernel].forward(q, k, v, mask, spec)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
            kept = torch.exp(lse - with_sink).nan_to_num(0.0)  # no key and a sink of -inf: 0 / 0
            out, lse = (out * kept.unsqueeze(-1)).to(out.dtype), with_sink
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.consecutive, ctx.spec = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, lse, *tensors = ctx.saved_tensors
        dq, dk, dv, d_sinks = _AttentionGradient.apply(g, out, lse, *tensors, ctx.consecutive, ctx.spec)
        return dq, dk, dv, (None if tensors[3] is None else d_sinks), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        *tensors, consecutive, spec = operands
        fold = _Fold(info.batch_size, tensors, in_dims)
        out, lse = _Attention.apply(*fold.operands, consecutive, spec)
        return (fold.undo(out), fold.undo(lse)), (0, 0)


class _AttentionGradient(torch.autograd.Function):
    """The backward as a Function, so that it folds rank dims too. Its own gradient goes through the reference."""

    @staticmethod
    def forward(g: Tensor, out: Tensor, lse: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        q, k, v, sinks, positions, documents, valid, consecutive, spec = operands
        mask = Mask(positions, documents, valid, consecutive)
        dq, dk, dv = _registry[spec.kernel].backward(g, q, k, v, out, lse, mask, spec)
        if sinks is None:
            return dq, dk, dv, q.new_zeros(1, q.shape[1])
        weight = torch.exp(sinks.to(lse.dtype).unsqueeze(-1) - lse).nan_to_num(0.0)
        d_sinks = -(weight * (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(-1)
        d_sinks = d_sinks.sum(0, keepdim=True) if sinks.shape[0] == 1 else d_sinks
        return dq, dk, dv, d_sinks.to(sinks.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        g, _, _, *tensors, ctx.consecutive, ctx.spec = inputs
        ctx.save_for_backward(g, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        g, q, k, v, sinks, *mask = ctx.saved_tensors
        described = Mask(*mask, ctx.consecutive)
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)

        def gradient(g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(lambda *i: _differentiable(*i, mask=described, spec=ctx.spec), *inputs)[1](g)

        seconds = torch.func.vjp(gradient, g, *inputs)[1](tuple(cotangents[: len(inputs)]))
        dg, dq, dk, dv, *d_sinks = seconds
        return dg, None, None, dq, dk, dv, *(d_sinks or [None]), *([None] * 5)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        g, out, lse, *tensors, consecutive, spec = operands
        fold = _Fold(info.batch_size, tensors, in_dims[3:])
        results = _AttentionGradient.apply(
            *(fold.query_like(x, dim) for x, dim in zip((g, out, lse), in_dims[:3], strict=True)),
            *fold.operands,
            consecutive,
            spec,
        )
        return tuple(fold.undo(x) for x in results[:3]) + (fold.undo_sinks(results[3]),), (0, 0, 0, 0)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, mask: Mask, spec: Spec) -> Tensor:
    """Attention in plain torch operations, for derivatives beyond the first."""
    logits, _ = _logits(q, k, spec)
    allowed = _allowed(mask, spec)
    logits = logits.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        column = sinks.unflatten(1, (k.shape[1], -1))[..., None, None].to(logits.dtype)
        logits = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., : q.shape[2]]
    return (p @ v.to(p.dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


class _Fold:
    """Folds a vmapped dim of attention's operands away: into the heads if all ranks share the mask, else the batch."""

    def __init__(self, size: int, tensors: list[Tensor | None], in_dims: Any) -> None:
        q, k, v, sinks, *mask = tensors
        q_dim, k_dim, v_dim, sinks_dim, *mask_dims = in_dims
        self.size = size
        self.into_batch = any(dim is not None for dim in mask_dims[:3])
        self.batch = (q.shape if q_dim is None else q.movedim(q_dim, 0).shape[1:])[0]  # type: ignore[union-attr]
        heads = [self.query_like(x, dim) for x, dim in ((q, q_dim), (k, k_dim), (v, v_dim))]
        if self.into_batch:
            mask = [
                None if x is None else self._front(x, d).flatten(0, 1) for x, d in zip(mask, mask_dims, strict=False)
            ]
        self.sink_rows = 1
        if sinks is not None:
            sinks = self._front(sinks, sinks_dim)  # [size, 1 or batch, heads]
            self.sink_rows = sinks.shape[1]
            if self.into_batch:
                sinks = sinks.expand(size, self.batch, -1).flatten(0, 1)
            else:
                sinks = sinks.movedim(0, 1).flatten(1, 2)
        self.operands = [*heads, sinks, *mask]

    def _front(self, x: Tensor, dim: int | None) -> Tensor:
        return x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)

    def query_like(self, x: Any, dim: int | None) -> Tensor:
        """[size, batch, heads, ...] to [size * batch, heads, ...] or [batch, size * heads, ...]."""
        x = self._front(x, dim)
        return x.flatten(0, 1) if self.into_batch else x.movedim(0, 1).flatten(1, 2)

    def undo(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.size, -1)) if self.into_batch else x.unflatten(1, (self.size, -1)).movedim(1, 0)

    def undo_sinks(self, x: Tensor) -> Tensor:
        """The sinks' gradient with the rank dim in front, of the shape that each rank's sinks have."""
        if x.shape[0] == 1 and self.into_batch:  # no sinks: a placeholder
            return x.expand(self.size, 1, -1)
        x = self.undo(x)
        return x.sum(1, keepdim=True) if self.sink_rows == 1 else x

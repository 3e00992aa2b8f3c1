"""The kernels behind `fcp.attention`: what one is, the registry, who serves a call, and two of them.

Problem. Attention on a device is somebody's fast kernel, and no two of them serve the same calls. What is built on top
(vmap, sinks, second derivatives, a ring) should not know which one runs.

Idea. A kernel is a pair of functions on plain tensors (`Kernel`): forward gives the output and the log-sum-exp of each
row's logits, backward takes both back and computes neither again. So who changes the normaliser of a row (a sink, or
another rank's keys) corrects the two numbers, and the same backward is exact for the corrected ones.

Two are here. "reference" is a plain softmax that serves every call, with a [seq, seq] tensor. "fused" is torch's flash
kernel for CPU on the whole; it knows no soft cap, and a mask only as numbers to add. `register_kernel` adds one.

What "auto" takes follows the device (`AUTO`). On CPU that is "planned" (`_planned.py`), which calls the same kernel on
the parts of the mask that are not empty. On CUDA it is "varlen" (`_varlen.py`) where the mask is packed documents and
no more, else "flex" (`_flex.py`); neither makes a [seq, seq] tensor. What both refuse, the reference serves.

A kernel refuses twice. `refuses` looks at what a call tells before any number is read, so that a kernel that was asked
for by name and cannot serve is an error before anything runs. `refuses_mask` reads the mask, below vmap, where its
numbers are plain.

A query that sees no key gives zero output and zero gradient, and its log-sum-exp is -inf.

Left out: dropout on the weights, and forward-mode derivatives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fcp.loss import cap
from fcp.masks import Mask, materialize

__all__ = [
    "AUTO",
    "Kernel",
    "Spec",
    "check_kernel",
    "differentiable",
    "flash_backward",
    "flash_forward",
    "merge",
    "only_on",
    "pick",
    "plain_backward",
    "plain_forward",
    "register_kernel",
    "registered",
    "weight_of",
]


@dataclass(frozen=True)
class Spec:
    """What is fixed about one attention call before any tensor is seen.

    Attributes:
        scale: the factor on q k^T.
        window, chunk: as in `fcp.masks`.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        kernel: the name of the kernel that computes it; "auto" for the best of its device that serves it.
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
        refuses: (spec, q, v) -> why this kernel cannot serve the call, or None. q and v may be tensors of torch.func:
            it may look at their devices, dtypes and last dims, not at their numbers.
        refuses_mask: (spec, mask) -> why it cannot serve that mask, or None; here numbers may be read.
        parts: whether it serves queries and keys of different tokens, or tokens in another order than their rows'
            (`Mask.keys`, `Mask.rows`), as a ring asks for.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Mask, Spec], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Mask, Spec], tuple[Tensor, Tensor, Tensor]]
    refuses: Callable[[Spec, Tensor, Tensor], str | None] = lambda spec, q, v: None
    refuses_mask: Callable[[Spec, Mask], str | None] = lambda spec, mask: None
    parts: bool = False


def only_on(device: str, q: Tensor) -> str | None:
    """Why a kernel of that kind of device cannot serve `q`, or None."""
    return None if q.device.type == device else f"it runs on {device}, and q is on {q.device.type}"


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp over both of two disjoint parts of the keys, in the log-sum-exps' dtype.

    (Milakov and Gimelshein 2018, section 3.1.) Nothing overflows: each part is scaled down by what it counts.
    """
    both = torch.logaddexp(lse, more_lse)
    return out * weight_of(lse, both) + more * weight_of(more_lse, both), both


def weight_of(lse: Tensor, both: Tensor) -> Tensor:
    """What one part of a row's keys counts; a part without a key counts nothing."""
    return torch.where(lse == -math.inf, 0.0, torch.exp(lse - both)).unsqueeze(-1)


# --- the reference ----------------------------------------------------------------------------------------------------


def _logits(q: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Grouped logits [batch, kv_heads, group, seq, seq] in float32 or wider, capped; and the raw ones."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (k.shape[1], -1)).to(wide)
    raw = (q @ k.to(wide).transpose(-1, -2).unsqueeze(2)) * spec.scale
    return cap(raw, spec.softcap), raw


def _allowed(mask: Mask, spec: Spec) -> Tensor:
    allowed = materialize(mask, window=spec.window, chunk=spec.chunk)
    if allowed is None:
        seq = mask.seq
        allowed = torch.ones(seq, seq, dtype=torch.bool, device=mask.positions.device).tril()[None, None]
    return allowed.unsqueeze(2)


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    return plain_forward(q, k, v, _allowed(mask, spec), spec)


def _reference_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    return plain_backward(g, q, k, v, out, lse, _allowed(mask, spec), spec)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """The formula: out and log-sum-exp of q on k and v, any number of each; `allowed` [batch, 1, 1, queries, keys]."""
    logits, _ = _logits(q, k, spec)
    logits = logits.masked_fill(~allowed, -math.inf)
    lse = logits.logsumexp(-1)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out = p @ v.to(p.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def plain_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradient, from the final output and log-sum-exp."""
    groups = (k.shape[1], -1)
    logits, raw = _logits(q, k, spec)
    wide = logits.dtype
    lse = lse.masked_fill(lse == -math.inf, 0.0).unflatten(1, groups).unsqueeze(-1)
    p = torch.exp(logits - lse).masked_fill(~allowed, 0.0)
    g = g.unflatten(1, groups).to(wide)
    dv = (p.transpose(-1, -2) @ g).sum(2)
    row = (g * out.unflatten(1, groups).to(wide)).sum(-1, keepdim=True)
    ds = p * (g @ v.to(wide).transpose(-1, -2).unsqueeze(2) - row)
    if spec.softcap is not None:
        ds = ds * (1 - torch.tanh(raw / spec.softcap) ** 2)
    dq = (ds @ k.to(wide).unsqueeze(2)) * spec.scale
    dk = (ds.transpose(-1, -2) @ q.unflatten(1, groups).to(wide)).sum(2) * spec.scale
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def differentiable(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, mask: Mask, spec: Spec) -> Tensor:
    """The reference's formula in torch operations that may be differentiated; sinks [batch, heads]. Nothing is fast."""
    logits, _ = _logits(q, k, spec)
    logits = logits.masked_fill(~_allowed(mask, spec), -math.inf)
    if sinks is not None:
        column = sinks.unflatten(1, (k.shape[1], -1))[..., None, None].to(logits.dtype)
        logits = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., : k.shape[2]]
    return (p @ v.to(p.dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


# --- torch's flash kernel ---------------------------------------------------------------------------------------------


def _rows(dim: int, *tensors: Tensor) -> list[Tensor]:
    """What the flash kernel wants: one head size (zeros in q, k or v change nothing), and rows that lie dense."""
    padded = (torch.nn.functional.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's kernel: out and log-sum-exp; `allowed` [1 or batch, 1, queries, keys], or None for all (or `causal`)."""
    v_dim = v.shape[-1]
    additive = _additive(allowed, q.dtype)
    q, k, v = _rows(max(q.shape[-1], v_dim), q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=additive, scale=scale
    )
    if allowed is not None:  # the kernel says 0 for a row without a key
        lse = lse.masked_fill(~allowed.any(-1), -math.inf)
    return out[..., :v_dim], lse


def flash_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradient, from the final output and log-sum-exp."""
    q_dim, v_dim = q.shape[-1], v.shape[-1]
    additive = _additive(allowed, q.dtype)
    q, k, v, g, out = _rows(max(q_dim, v_dim), q, k, v, g, out)
    if allowed is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, causal, attn_mask=additive, scale=scale
    )
    return dq[..., :q_dim], dk[..., :q_dim], dv[..., :v_dim]


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    allowed = materialize(mask, window=spec.window, chunk=spec.chunk)
    return flash_forward(q, k, v, allowed, allowed is None, spec.scale)


def _fused_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    allowed = materialize(mask, window=spec.window, chunk=spec.chunk)
    return flash_backward(g, q, k, v, out, lse, allowed, allowed is None, spec.scale)


def _fused_refuses(spec: Spec, q: Tensor, v: Tensor) -> str | None:
    return only_on("cpu", q) or (None if spec.softcap is None else "torch's flash kernel has no soft cap")


# --- the registry -----------------------------------------------------------------------------------------------------


_registry: dict[str, Kernel] = {
    "reference": Kernel(_reference_forward, _reference_backward, parts=True),
    "fused": Kernel(_fused_forward, _fused_backward, _fused_refuses, parts=True),
}
registered: Mapping[str, Kernel] = MappingProxyType(_registry)
"""The registered attention kernels by name."""


def register_kernel(name: str, kernel: Kernel) -> None:
    """Adds an attention kernel under `name`, to be asked for as `fcp.attention(..., kernel=name)`.

    Raises:
        ValueError: the name is taken.
    """
    if name in _registry or name == "auto":
        raise ValueError(f"register_kernel: {name!r} is taken; registered are {', '.join(_registry)}")
    _registry[name] = kernel


AUTO: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("planned",), "cuda": ("varlen", "flex")})
"""What "auto" tries on each kind of device, in order; then the reference."""


def check_kernel(spec: Spec, q: Tensor, v: Tensor, *, parts: bool) -> None:
    """Raises ValueError where the kernel that `spec` asks for is none, or cannot serve the call whatever its mask.

    Args:
        parts: whether the queries and keys are parts of the sequence, or in an order of their own.
    """
    if spec.kernel == "auto":
        return
    if spec.kernel not in _registry:
        raise ValueError(f"attention: no kernel {spec.kernel!r}; registered are {', '.join(_registry)}")
    if parts and not _registry[spec.kernel].parts:
        raise ValueError(
            f"attention: kernel {spec.kernel!r} knows no queries and keys of different parts of the sequence, which "
            f"rings, gathers and layouts bring; use kernel='auto', or register it with parts=True"
        )
    _raise_if(spec, _registry[spec.kernel].refuses(spec, q, v))


def pick(spec: Spec, q: Tensor, v: Tensor, mask: Mask) -> str:
    """The name of the kernel that serves a call on plain tensors: the one that `spec` asks for, or the best there is.

    Raises:
        ValueError: no such kernel, or one that refuses the call.
    """
    parts = not mask.whole
    if spec.kernel != "auto":
        check_kernel(spec, q, v, parts=parts)
        _raise_if(spec, _registry[spec.kernel].refuses_mask(spec, mask))
        return spec.kernel
    for name in AUTO.get(q.device.type, ()):
        kernel = _registry.get(name)
        if kernel is None or (parts and not kernel.parts) or kernel.refuses(spec, q, v) is not None:
            continue
        if kernel.refuses_mask(spec, mask) is None:
            return name
    return "reference"


def _raise_if(spec: Spec, why: str | None) -> None:
    if why is not None:
        raise ValueError(f"attention: kernel {spec.kernel!r} cannot serve {spec}: {why}; use kernel='auto'")

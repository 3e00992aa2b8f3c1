"""The varlen kernel, for CUDA: torch's flash attention over packed sequences, one call for all documents of all rows.

Problem. Packed documents on a GPU want the kernel that was made for them: sequences of any lengths end to end, told by
where each starts. It knows causal attention within a sequence, a window, grouped heads, and nothing else.

Idea. The runs of a description (`_plan.runs_of`: tokens of one document and chunk, side by side) are such sequences
wherever every query sees just the keys of its own run up to itself. That holds for packed documents, chunks, padding on
the left, and windows over positions that rise by one. It does not hold where a document comes back, or where padding
follows its own document, as on the right: those queries see keys of an earlier run. Which it is, is read off the
description once a step (`packing_of`). Tokens that see nothing are left out of the call, and get zeros and -inf.

Backward hands the given output and log-sum-exp to the kernel, which takes both as they are (Dao 2023, algorithm 2): its
probabilities are exp(logits - lse), its row correction sum(g * out). So it is exact for a corrected normaliser.

Heads of a size that the kernel does not have are filled up with zeros, which change no logit and no value.

Left out: float32 and float64, soft caps, parts of a sequence: another kernel serves those. ROCm, where nobody tried it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fcp import pytree
from fcp._per_mask import PerMask
from fcp._plan import runs_of
from fcp.kernels import Kernel, Spec, only_on, register_kernel
from fcp.masks import Mask

__all__ = ["VARLEN", "Packing", "packing_of"]

LARGEST = 256
"""The largest head that the kernel has."""

flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Packing:
    """The runs of all rows, end to end.

    Attributes:
        starts: [runs + 1], int32, where each run starts among the tokens that are in one, and their number.
        longest: the tokens of the longest run.
        at: [tokens], int64, where each of those is in the flattened [batch * seq]; None where they are all, in order.
    """

    starts: Tensor
    longest: int
    at: Tensor | None


_packings: PerMask[Packing | str] = PerMask(64)


def packing_of(mask: Mask, window: int | None, chunk: int | None) -> Packing | str:
    """The runs that say all of a mask, or why no runs do."""
    return _packings.get(mask, (window, chunk), lambda: _find(mask, window, chunk))


def _find(mask: Mask, window: int | None, chunk: int | None) -> Packing | str:
    if not mask.whole:
        return "it knows no parts of a sequence and no other order than the rows'"
    device, (batch, seq) = mask.positions.device, mask.positions.shape
    window = mask.narrowed(window)
    on_host = pytree.map(Tensor.cpu, mask)  # one wait a tensor
    lengths: list[int] = []
    at: list[Tensor] = []
    for row in range(batch):
        met = set()
        for run in runs_of(on_host, row, window, chunk):
            if run.kind in met:
                return f"in row {row} the queries from {run.first} on see keys of an earlier run of tokens"
            if run.valid:
                met.add(run.kind)
                lengths.append(run.size)
                at.append(torch.arange(row * seq + run.first, row * seq + run.end))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    whole = sum(lengths) == batch * seq
    return Packing(starts, max(lengths, default=0), None if whole else torch.cat([*at, torch.arange(0)]).to(device))


# --- between [batch, heads, seq, dim] and [tokens, heads, dim] --------------------------------------------------------


def _pack(packing: Packing, dim: int, *tensors: Tensor) -> list[Tensor]:
    """Each [batch, heads, seq, any] as [tokens, heads, dim], dense; those outside of any run are left out."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
    packed = [x if packing.at is None else x.index_select(0, packing.at) for x in flat]
    return [pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x.contiguous() for x in packed]


def _unpack(packing: Packing, packed: Tensor, batch: int, seq: int, fill: float = 0.0) -> Tensor:
    """[tokens, heads, ...] as [batch, heads, seq, ...], with `fill` outside of any run."""
    if packing.at is not None:
        whole = packed.new_full((batch * seq, *packed.shape[1:]), fill)
        packed = whole.index_copy_(0, packing.at, packed)
    return packed.unflatten(0, (batch, seq)).transpose(1, 2)


def _dim(*tensors: Tensor) -> int:
    """One size for all heads that the kernel has: a multiple of 8."""
    return -(-max(x.shape[-1] for x in tensors) // 8) * 8


def _how(packing: Packing, spec: Spec) -> tuple[tuple[int, int, float, bool], dict[str, float | int]]:
    """What both calls are told: (longest queries, longest keys, dropout, causal), and the words."""
    # Causal is a window without end; with an end it is told by the window alone, as torch's own varlen_attn tells it.
    left = -1 if spec.window is None else spec.window - 1
    words = {"scale": spec.scale, "window_size_left": left, "window_size_right": 0}
    return (packing.longest, packing.longest, 0.0, spec.window is None), words


# --- the kernel -------------------------------------------------------------------------------------------------------


def _packing(mask: Mask, spec: Spec) -> Packing:
    packing = packing_of(mask, spec.window, spec.chunk)
    if isinstance(packing, str):
        raise ValueError(f"attention: kernel 'varlen' cannot serve {spec}: {packing}; use kernel='auto'")
    return packing


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    packing, (batch, _, seq, _), v_dim = _packing(mask, spec), q.shape, v.shape[-1]
    if not packing.longest:
        return q.new_zeros(*q.shape[:3], v_dim), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    packed = _pack(packing, _dim(q, v), q, k, v)
    given, words = _how(packing, spec)
    out, lse, *_ = flash_forward(*packed, packing.starts, packing.starts, *given, False, **words)
    lse = _unpack(packing, lse.transpose(0, 1), batch, seq, -torch.inf)
    return _unpack(packing, out[..., :v_dim], batch, seq), lse


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    packing, (batch, _, seq, q_dim), v_dim = _packing(mask, spec), q.shape, v.shape[-1]
    if not packing.longest:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    packed = _pack(packing, _dim(q, v), g.to(q.dtype), q, k, v, out.to(q.dtype))
    (rows,) = _pack(packing, 1, lse.to(torch.float32).unsqueeze(-1))
    given, words = _how(packing, spec)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    found = flash_backward(
        *packed,
        rows.squeeze(-1).transpose(0, 1).contiguous(),
        packing.starts,
        packing.starts,
        *given,
        *no_dropout,
        **words,
    )
    dq, dk, dv = (_unpack(packing, x, batch, seq) for x in found)
    return dq[..., :q_dim], dk[..., :q_dim], dv[..., :v_dim]


def _refuses(spec: Spec, q: Tensor, v: Tensor) -> str | None:
    if (why := only_on("cuda", q)) is not None:
        return why
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"torch's flash attention has float16 and bfloat16, not {q.dtype}"
    if spec.softcap is not None:
        return "torch's flash attention has no soft cap"
    dim = max(q.shape[-1], v.shape[-1])
    if dim > LARGEST:
        return f"torch's flash attention has heads of up to {LARGEST}, not {dim}"
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no CUDA flash attention"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"torch's flash attention wants compute capability 8.0 or more, not {capability}"
    if dim > 192 and capability != (8, 0) and capability[0] not in (9, 10):
        return f"torch's flash attention has no gradient for heads of {dim} on compute capability {capability}"
    return None


def _refuses_mask(spec: Spec, mask: Mask) -> str | None:
    packing = packing_of(mask, spec.window, spec.chunk)
    return packing if isinstance(packing, str) else None


VARLEN = Kernel(_forward, _backward, _refuses, _refuses_mask)
register_kernel("varlen", VARLEN)

"""The flex kernel, for CUDA: torch's flex attention under any description, with a soft cap, over parts of a sequence.

Problem. What packed sequences cannot say (padding on the right, documents that come back, a ring's parts, a soft cap,
float32) would otherwise cost a square of the sequence on a GPU.

Idea. Flex attention (Dong et al. 2024) compiles a mask that is told as a function of a query's and a key's place, and
skips the blocks that a block mask calls empty. Every description is one function of three numbers a query and three a
key (`_words`), so all of them share one compiled kernel. The block mask is the description's (`masks.materialize`),
found for one block of queries after another, and kept while the mask lives. Blocks that are seen whole are listed
apart: no mask is computed there.

Backward must take the output and log-sum-exp that it is given, which may be those of a corrected normaliser; flex would
use its own, out_f and lse_f. Its probabilities are p_f = exp(logits - lse_f); the wanted ones are w p_f, with w =
exp(lse_f - lse). For cotangents G of out_f and L of lse_f its gradient of the logits is p_f (G.v - G.out_f + L), since
d lse_f / d logits = p_f, and that of v is the sum of p_f G. Wanted are w p_f (g.v - g.out) and the sum of w p_f g. So
G = w g and L = w (g.out_f - g.out) are exact. A row without a key has w = 0, and gives nothing.

Left out: float64. The forward runs again in backward: of the contract's two numbers flex keeps none.
"""

from collections.abc import Callable
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad
from torch.utils._triton import has_triton

from fcp._per_mask import PerMask
from fcp.kernels import Kernel, Spec, only_on, register_kernel, weight_of
from fcp.masks import Mask, materialize, rows_of

__all__ = ["FLEX", "blocks_of"]

BLOCK = 128
"""Queries, and keys, in a block of the block mask."""

SMALLEST, LARGEST = 16, 256
"""The sizes of heads: below, they are filled up with zeros; above, nobody tried."""

RECOMPILE = 64
"""How often one kernel may be compiled anew, for other shapes and dtypes, before that is an error."""


# --- the block mask ---------------------------------------------------------------------------------------------------

_blocks: PerMask[BlockMask] = PerMask(64)


def blocks_of(mask: Mask, window: int | None, chunk: int | None) -> BlockMask:
    """Which blocks of queries and keys are seen in part, and which whole; and the mask as a function of places."""
    return _blocks.get(mask, (window, chunk), lambda: _find(mask, window, chunk))


def _find(mask: Mask, window: int | None, chunk: int | None) -> BlockMask:
    keys = mask.seq if mask.keys is None else mask.keys.seq
    columns, partial, whole = -(-keys // BLOCK), [], []
    for first in range(0, mask.seq, BLOCK):
        queries = slice(first, min(first + BLOCK, mask.seq))
        seen = materialize(mask, queries, slice(0, keys), window=window, chunk=chunk)
        if seen is None:  # the only block, and plain causal
            seen = torch.ones(mask.seq, keys, dtype=torch.bool, device=mask.positions.device).tril()
            seen = seen.expand(mask.positions.shape[0], 1, -1, -1)
        # What is filled up counts as unseen: a block at the end that is not complete is never whole.
        seen = pad(seen[:, 0], (0, columns * BLOCK - keys, 0, BLOCK - seen.shape[2]))
        seen = seen.unflatten(-1, (columns, BLOCK))
        full = seen.all(-1).all(1)
        whole.append(full)
        partial.append(seen.any(-1).any(1) & ~full)
    return BlockMask.from_kv_blocks(
        *_listed(torch.stack(partial, 1)),
        *_listed(torch.stack(whole, 1)),
        BLOCK_SIZE=BLOCK,
        mask_mod=_function_of(*_words(mask, window, chunk)),
        seq_lengths=(mask.seq, keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [batch, rows, columns] as (how many a row has, which): [batch, 1, rows] and [batch, 1, rows, columns]."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[:, None].contiguous(), order.to(torch.int32)[:, None].contiguous()


def _words(mask: Mask, window: int | None, chunk: int | None) -> tuple[Tensor, ...]:
    """Of each query: its row, its kind and the first position it may see; of each key: its row, its kind, its position.

    Tokens of one kind are of one document and chunk. An invalid key's kind is no query's.
    """
    keys = mask if mask.keys is None else mask.keys
    q_kind, k_kind = _kinds(mask, keys, chunk)
    if keys.valid is not None:
        k_kind = torch.where(keys.valid, k_kind, -1)
    least = keys.positions.min()
    k_position = keys.positions - least  # a tensor of its own: `PerMask` must not hold the mask's
    lowest = torch.zeros_like(mask.positions) if window is None else mask.positions - least - (window - 1)
    q_row, k_row = (rows_of(each).expand_as(each.positions).to(torch.int32).contiguous() for each in (mask, keys))
    return q_row, q_kind.to(torch.int32), lowest, k_row, k_kind.to(torch.int32), k_position


def _kinds(mask: Mask, keys: Mask, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Of each query and each key a number, alike where both are of one document and chunk."""
    sides, columns = (mask, keys), []
    if mask.documents is not None and keys.documents is not None:
        columns.append([each.documents for each in sides])
    if chunk is not None:
        columns.append([each.positions.div(chunk, rounding_mode="floor") for each in sides])
    if not columns:
        return torch.zeros_like(mask.positions), torch.zeros_like(keys.positions)
    table = torch.stack([torch.cat([x.flatten() for x in pair]) for pair in columns])
    number = table.unique(dim=1, return_inverse=True)[1]
    of_queries, of_keys = number.split([each.positions.numel() for each in sides])
    return of_queries.view_as(mask.positions), of_keys.view_as(keys.positions)


def _function_of(
    q_row: Tensor, q_kind: Tensor, lowest: Tensor, k_row: Tensor, k_kind: Tensor, k_position: Tensor
) -> Callable[[Any, Any, Any, Any], Any]:
    return lambda row, head, query, key: (
        (k_row[row, key] <= q_row[row, query])
        & (k_kind[row, key] == q_kind[row, query])
        & (k_position[row, key] >= lowest[row, query])
    )


# --- the call ---------------------------------------------------------------------------------------------------------

COMPILED = {"cuda"}
"""Where flex attention is compiled. Elsewhere it is run as it stands, on a [seq, seq] tensor; tests do."""

_numbers = count()


def _call_of(scale: float, softcap: float | None) -> Callable[..., tuple[Tensor, Any]]:
    """flex_attention with what is fixed about a call as constants of its own.

    Its code has a name of its own. By that name the compiler remembers which numbers were seen to change; those of two
    functions of one name would be taken for variables, which flex attention cannot compile.
    """
    score: Any = None if softcap is None else _capped(softcap)
    options: Any = {"BACKEND": "TRITON"}  # not the one for short queries, nor one that knows no gradient of lse
    return _under_own_name(
        lambda q, k, v, blocks: flex_attention(
            q,
            k,
            v,
            score_mod=score,
            block_mask=blocks,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            kernel_options=options,
        )
    )


def _capped(softcap: float) -> Callable[..., Any]:
    return lambda score, row, head, query, key: softcap * torch.tanh(score / softcap)


def _under_own_name(call: Any) -> Any:
    code = call.__code__.replace(co_name=f"flex_{next(_numbers)}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


@cache
def _compiled(scale: float, softcap: float | None, even: bool) -> Callable[..., tuple[Tensor, Any]]:
    """`even` is whether all lengths are multiples of a block: such a kernel has no checks of bounds, as long as no
    other length was met by the same function."""
    compiler: Any = torch.compile  # whose type has no word for the limit
    return compiler(_call_of(scale, softcap), fullgraph=True, recompile_limit=RECOMPILE)


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, spec: Spec) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp); zeros and -inf where a row sees no key."""
    even = q.shape[2] % BLOCK == 0 and k.shape[2] % BLOCK == 0
    compiled = q.device.type in COMPILED
    call = _compiled(spec.scale, spec.softcap, even) if compiled else _call_of(spec.scale, spec.softcap)
    with torch.autocast(q.device.type, enabled=False):
        out, aux = call(q, k, v, blocks)
    return out, aux.lse


def _dense(*tensors: Tensor) -> list[Tensor]:
    """In one layout, so that nothing is compiled twice; and an expanded operand has no gradient there."""
    return [pad(x, (0, max(0, SMALLEST - x.shape[-1]))).contiguous() for x in tensors]


# --- the kernel -------------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    q_dense, k_dense, v_dense = _dense(q, k, v)
    out, lse = _attend(q_dense, k_dense, v_dense, blocks_of(mask, spec.window, spec.chunk), spec)
    return out[..., : v.shape[-1]], lse


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocks_of(mask, spec.window, spec.chunk)
    q_dense, k_dense, v_dense = dense = [x.detach().requires_grad_() for x in _dense(q, k, v)]
    with torch.enable_grad():
        found, found_lse = _attend(q_dense, k_dense, v_dense, blocks, spec)
    g_dense, out_dense = _dense(g, out)
    cotangents = _cotangents(g_dense, out_dense, lse, found.detach(), found_lse.detach())
    gradients = torch.autograd.grad((found, found_lse), dense, cotangents)
    dq, dk, dv = (x[..., : like.shape[-1]] for x, like in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def _cotangents(g: Tensor, out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Those of flex's own output and log-sum-exp that make its gradient the one for the given `out` and `lse`."""
    wide = found_lse.dtype
    weight = weight_of(found_lse, lse.to(wide))
    row = (g.to(wide) * (found.to(wide) - out.to(wide))).sum(-1)
    return (weight * g).to(found.dtype), weight.squeeze(-1) * row


def _refuses(spec: Spec, q: Tensor, v: Tensor) -> str | None:
    if (why := only_on("cuda", q)) is not None:
        return f"{why}; elsewhere flex attention has no gradient, and makes a [seq, seq] tensor"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"flex attention computes in float32, which is not {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > LARGEST:
        return f"it has heads of up to {LARGEST}, not {max(q.shape[-1], v.shape[-1])}"
    return None if has_triton() else "flex attention is compiled by Triton, which is not here"


FLEX = Kernel(_forward, _backward, _refuses, parts=True)
register_kernel("flex", FLEX)

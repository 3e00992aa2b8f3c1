"""The planned kernel: attention's cost follows the mask. Each group of a plan (`_plan.py`) is one call of torch's.

Forward takes each group's queries, keys and values, computes their output and log-sum-exp, and puts them in place;
where several groups have the same queries, what they found is merged by the log-sum-exp, in float32 or wider (Milakov
and Gimelshein 2018, section 3.1). Backward gives each group the final output and log-sum-exp, from which its
probabilities are exact without the others', and adds up.

Soft caps have no fused kernel: there a group is computed by the plain formula, for a block of its queries at a time.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fcp._plan import Group, plan_of
from fcp.kernels import (
    Kernel,
    Spec,
    flash_backward,
    flash_forward,
    merge,
    only_on,
    plain_backward,
    plain_forward,
    register_kernel,
)
from fcp.masks import Mask, materialize

__all__ = ["PLANNED"]

CAPPED = 256
"""Queries for which the plain formula is computed at a time."""


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: Spec) -> tuple[Tensor, Tensor]:
    groups = plan_of(mask, spec.window, spec.chunk)
    if _is_everything(groups, q, k):
        return _tile_forward(q, k, v, groups[0].causal, _seen(groups[0], mask, spec), spec)
    wide = torch.promote_types(q.dtype, torch.float32)
    merged = any(group.shared for group in groups)
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide if merged else q.dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    for group in groups:
        (q_here,), (k_here, v_here) = _take(group, 1, q), _take(group, 2, k, v)
        found, found_lse = _tile_forward(q_here, k_here, v_here, group.causal, _seen(group, mask, spec), spec)
        if group.steps is not None and not group.shared:
            for whole, part in ((out, found), (lse, found_lse)):
                _take(group, 1, whole)[0].copy_(part)
            continue
        for rows, first, _, here in _places(group, q.shape[0]):
            at = (rows, slice(None), slice(first, first + group.queries))
            if not group.shared:
                out[at], lse[at] = found[here], found_lse[here]
                continue
            out[at], lse[at] = merge(out[at], lse[at], found[here].to(wide), found_lse[here])
    return out.to(q.dtype), lse


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    groups = plan_of(mask, spec.window, spec.chunk)
    if _is_everything(groups, q, k):
        return _tile_backward(g, q, k, v, out, lse, groups[0].causal, _seen(groups[0], mask, spec), spec)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for group in groups:
        _add_gradients(group, (dq, dk, dv), (g, q, out, lse), (k, v), mask, spec)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_gradients(
    group: Group,
    totals: tuple[Tensor, Tensor, Tensor],
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    of_keys: tuple[Tensor, Tensor],
    mask: Mask,
    spec: Spec,
) -> None:
    """One group's part; what it needs is gone before the next group's is made."""
    g, q, out, lse = _take(group, 1, *of_queries)
    k, v = _take(group, 2, *of_keys)
    found = _tile_backward(g, q, k, v, out, lse, group.causal, _seen(group, mask, spec), spec)
    for which, total, part in zip((1, 2, 2), totals, found, strict=True):
        _add(group, which, total, part)


# --- where a group's rectangles are -----------------------------------------------------------------------------------


def _is_everything(groups: tuple[Group, ...], q: Tensor, k: Tensor) -> bool:
    """Whether one rectangle of all queries and keys is all there is of each row."""
    if len(groups) != 1 or groups[0].blocks:
        return False
    (group,) = groups
    return (group.queries, group.keys, len(group.places)) == (q.shape[2], k.shape[2], q.shape[0])


def _is_batch(group: Group, batch: int) -> bool:
    """Whether it is the same rectangle of every row."""
    rows = [place[0] for place in group.places]
    return group.blocks or (rows == list(range(batch)) and len({place[1:] for place in group.places}) == 1)


def _places(group: Group, batch: int) -> list[tuple[slice, int, int, slice]]:
    """(rows, first query, first key, which entries of the call) of each rectangle, or once for all rows."""
    if _is_batch(group, batch):
        return [(slice(0, batch), *group.places[0][1:], slice(None))]
    return [(slice(row, row + 1), first, key, slice(i, i + 1)) for i, (row, first, key) in enumerate(group.places)]


def _take(group: Group, which: int, *tensors: Tensor) -> list[Tensor]:
    """The group's queries (1) or keys (2) of each tensor, its rectangles side by side in the batch dim.

    A series of one row is a view, overlapping where its keys do; other rectangles are copied together.
    """
    size = group.queries if which == 1 else group.keys
    steps = group.steps
    if steps is not None and steps[which - 1] > 0:
        row, *first = group.places[0]
        end = group.places[-1][which] + size
        return [_windows(x[row, :, first[which - 1] : end], size, steps[which - 1]) for x in tensors]
    where = [(rows, query if which == 1 else key) for rows, query, key, _ in _places(group, tensors[0].shape[0])]
    parts = [[x[rows, :, first : first + size] for rows, first in where] for x in tensors]
    return [found[0] if len(found) == 1 else torch.cat(found) for found in parts]


def _windows(x: Tensor, size: int, step: int) -> Tensor:
    """[heads, seq, ...] to [windows, heads, size, ...], without a copy."""
    found = x.unfold(1, size, step)  # [heads, windows, ..., size]
    return found.movedim(-1, 2).movedim(1, 0)


def _add(group: Group, which: int, total: Tensor, found: Tensor) -> None:
    """Adds what a group found to where its queries (1) or keys (2) are in `total`."""
    size, steps = (group.queries if which == 1 else group.keys), group.steps
    if steps is not None and steps[which - 1] >= size:
        (here,) = _take(group, which, total)
        here += found
        return
    for rows, query, key, entry in _places(group, total.shape[0]):
        first = query if which == 1 else key
        total[rows, :, first : first + size] += found[entry]


def _seen(group: Group, mask: Mask, spec: Spec) -> Tensor | None:
    """bool [1 or batch, 1, queries, keys]; None where all are seen, or the group is the causal triangle."""
    if group.blocks:
        (_, first, key), *_ = group.places
        queries, keys = slice(first, first + group.queries), slice(key, key + group.keys)
        return materialize(mask, queries, keys, window=spec.window, chunk=spec.chunk)
    allowed = group.allowed(mask.positions.device)
    return None if allowed is None else allowed[None, None]


# --- one call ---------------------------------------------------------------------------------------------------------


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    if spec.softcap is None:
        return flash_forward(q, k, v, seen, causal, spec.scale)
    found = [
        plain_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], allowed, spec)
        for rows, keys, allowed in _query_blocks(q, k, causal, seen)
    ]
    out, lse = zip(*found, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def _tile_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, seen: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    if spec.softcap is None:
        return flash_backward(g, q, k, v, out, lse, seen, causal, spec.scale)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    g, q, k, v = (x.to(wide) for x in (g, q, k, v))  # what blocks add up to is rounded once
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys, allowed in _query_blocks(q, k, causal, seen):
        g_here, q_here, out_here, lse_here = (x[:, :, rows] for x in (g, q, out, lse))
        found = plain_backward(g_here, q_here, k[:, :, keys], v[:, :, keys], out_here, lse_here, allowed, spec)
        dq[:, :, rows] = found[0]
        dk[:, :, keys] += found[1]
        dv[:, :, keys] += found[2]
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _query_blocks(q: Tensor, k: Tensor, causal: bool, seen: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, the keys that any of them may see, bool [1 or batch, 1, 1, queries, keys]): so the formula's memory
    grows with the keys, not with the rectangle."""
    for begin in range(0, q.shape[2], CAPPED):
        end = min(begin + CAPPED, q.shape[2])
        keys = end if causal else k.shape[2]
        if seen is None:
            allowed = torch.ones(1, 1, end - begin, keys, dtype=torch.bool, device=q.device)
            allowed = allowed.tril(begin) if causal else allowed
        else:
            allowed = seen[:, :, begin:end]
        yield slice(begin, end), slice(0, keys), allowed.unsqueeze(2)


PLANNED = Kernel(_forward, _backward, lambda spec, q, v: only_on("cpu", q), parts=True)
register_kernel("planned", PLANNED)

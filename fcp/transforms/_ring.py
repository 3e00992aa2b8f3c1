"""ring: attention over the whole sequence, keys and values going round the ranks (Ring Attention: Liu et al. 2023).

Every rank keeps its own queries, of all heads. At each turn it attends with the keys that are with it, while they
travel on to the next rank; what it finds is merged with what it found before by the log-sum-exps, in float32 or wider
(`kernels.merge`). So no rank ever holds more than two slices of keys, and any number of heads will do.

Blocks that nobody further on sees are not sent, and turns without any are left out (`_schedule.py`): a window, or
documents that end in a slice, cost what they need. Sinks are one more term in the normaliser, added once at the end.

The gradient is its own (`_own_gradient.py`). A block's probabilities follow from the final output and log-sum-exp, so
backward sends the keys round once more, and after them the gradients that the ranks add up for them, which return to
the owner from the last rank that had any to add. Nothing but this rank's own queries, keys and values is kept between.

Compose it outside of `ulysses` over another axis, and the ring goes between groups of ranks that exchange heads within.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fcp._across_slices import Across, across_slices, check_slices
from fcp._attention import (
    check_operands,
    kernel_of,
    part,
    part_gradient,
    row_sinks,
    sinks_gradient,
    spec_of,
    with_sinks,
)
from fcp._own_gradient import own_gradient
from fcp._schedule import Perm, Schedule, schedule_of
from fcp.axes import Axes, axis_index, axis_size, batched
from fcp.collectives import start_ppermute
from fcp.kernels import Spec, merge
from fcp.masks import Mask
from fcp.ops import Attention
from fcp.sharded import Sharded
from fcp.typing import ModelFn

__all__ = ["ring"]


def ring(model_fn: ModelFn, *, axis: Axes = "cp") -> Sharded:
    """Replaces `Ops.attention`: queries stay, keys and values of [batch, kv_heads, seq_local, dim] go round the ranks.

    (Liu et al. 2023, section 3; the order of turns and the backward pass, algorithm 1.)

    Compose it with `shard_seq` over the same axis, in either order.

    Args:
        model_fn: any model function that attends through `ops.attention`.
        axis: the axis over which the sequence is split.

    Raises:
        ValueError: the config lists layers that carry a state along the sequence; or, when called, the model never
            calls `ops.attention`, a transform further out replaced it, or the kernel knows no parts of a sequence.
    """
    return across_slices(model_fn, "ring", axis, _ringed)


def _ringed(attention: Attention, axis: Axes) -> Across:
    kernel = kernel_of(attention)
    if kernel is None:
        raise ValueError(
            f"ring: the attention that it is to replace is no longer fcp.attention, whose parts it merges: another "
            f"transform replaced it. Apply ring over axis {axis!r} after (outside of) that one."
        )

    def ringed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        size = axis_size(axis)
        check_operands(q, k, v, window=window, chunk=chunk, softcap=softcap, sinks=sinks)
        check_slices("ring", q, k, mask, size)
        parts = mask.against(mask)
        spec = spec_of(q, v, parts, window=window, chunk=chunk, scale=scale, softcap=softcap, kernel=kernel)
        how = _Ring(axis, schedule_of(mask, size, window, chunk), spec)
        attend = own_gradient(partial(_forward, how), partial(_backward, how), "ring")
        return attend((q, k, v), row_sinks(q, sinks), mask)

    return ringed


KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Ring:
    """What is fixed about a call."""

    axis: Axes
    schedule: Schedule
    spec: Spec

    def send(self, x: Tensor, perm: Perm, backward: bool) -> Callable[[], Tensor]:
        return start_ppermute(x, self.axis, perm=perm, backward=backward)

    def turns(
        self, k: Tensor, v: Tensor, mask: Mask, backward: bool
    ) -> Iterator[tuple[int, KeysAndValues, Mask | None]]:
        """At each turn its number, the keys and values that are here, and the mask between them and the rank's queries.

        The next block is on its way meanwhile. The mask is None where the rank sees none of this one's keys.
        """
        local, size, device = k.shape[2], self.schedule.size, mask.positions.device
        rank, own = axis_index(self.axis).to(device), torch.arange(local, device=device)
        here = None if batched(rank) else int(rank)  # in the simulator this is all of them
        queries, block, arriving = mask.take(rank * local + own), (k, v), None
        flat = _pack(k, v) if self.schedule.turns else None
        for turn in range(self.schedule.turns + 1):
            if flat is not None and turn < self.schedule.turns:
                arriving = self.send(flat, self.schedule.onward(turn + 1), backward)
            seen = self.schedule.busy(turn) if here is None else (here - turn) % size in self.schedule.needs[here]
            keys = mask.take((rank - turn) % size * local + own) if seen else None
            yield turn, block, None if keys is None else queries.against(keys)
            if arriving is not None:
                flat, arriving = arriving(), None
                block = _unpack(flat, k, v)


def _forward(how: _Ring, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, mask: Mask) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp), both over the keys of all ranks."""
    q, k, v = qkv
    out: Tensor | None = None
    lse: Tensor | None = None
    for _, (k_here, v_here), described in how.turns(k, v, mask, backward=False):
        if described is None:
            continue
        found, found_lse = part(q, k_here, v_here, described, how.spec)
        out, lse = (found, found_lse) if out is None or lse is None else merge(out, lse, found, found_lse)
    assert out is not None and lse is not None  # a rank meets its own keys always
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _backward(
    how: _Ring,
    g: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    mask: Mask,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) and that of the sinks, where there are any. Sums are taken, and travel, in float32 or wider."""
    q, k, v = qkv
    wide = lse.dtype
    dq = torch.zeros_like(q, dtype=wide)
    own: Tensor | None = None
    travelling: Callable[[], Tensor] | None = None
    returning: list[Callable[[], Tensor]] = []
    for turn, (k_here, v_here), described in how.turns(k, v, mask, backward=True):
        found: Tensor | None = None
        if described is not None:
            dq_here, *found_here = part_gradient(g, out, lse, q, k_here, v_here, described, how.spec)
            dq, found = dq + dq_here, _pack(*found_here).to(wide)
        if own is None:
            own = found
            continue
        total = found if travelling is None else travelling() if found is None else travelling() + found
        total = torch.zeros_like(own) if total is None else total
        back = how.schedule.home(turn)
        if back:
            returning.append(how.send(total, back, backward=True))
        travelling = how.send(total, how.schedule.onward(turn + 1), True) if turn < how.schedule.turns else None
    assert own is not None  # a rank meets its own keys always
    dk, dv = _unpack(sum((wait() for wait in returning), own), k, v)
    gradients = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return gradients if sinks is None else (*gradients, sinks_gradient(g, out, lse, sinks))


def _pack(*tensors: Tensor) -> Tensor:
    """One row of numbers: they travel as one message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpack(flat: Tensor, *like: Tensor) -> KeysAndValues:
    first, second = flat.split([x.numel() for x in like])
    return first.view(like[0].shape), second.view(like[1].shape)

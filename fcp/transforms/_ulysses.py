"""ulysses: attention over the whole sequence, each rank with some of the heads (DeepSpeed-Ulysses: Jacobs et al. 2023).

Queries, keys and values arrive split along the sequence; one all-to-all splits all along the heads instead, every
rank runs ordinary attention with the mask of the whole sequence, and a second all-to-all takes the output back. The
mask is never cut, so packing, padding and windows are what they are without ranks.

Any head counts. The plan (`plan`) may give each key-value head to several ranks, as `copies` interleaved repeats that
each serve a part of the head's queries, and may pad heads, so that every query head still meets its own key-value head.
The sum of the copies' gradients and the zero gradients of padding follow from repeat's and pad's own adjoints.

A per-head parameter (sinks) is taken by `own_slice`: it was marked varying already, so its gradient is summed once.
"""

from dataclasses import dataclass

from torch import Tensor

from fcp._across_slices import Across, across_slices
from fcp.axes import Axes, axis_size
from fcp.collectives import all_to_all, all_to_all_each, own_slice
from fcp.masks import Mask
from fcp.ops import Attention
from fcp.sharded import Sharded, pad_to
from fcp.typing import ModelFn

__all__ = ["Plan", "plan", "ulysses"]


def ulysses(model_fn: ModelFn, *, axis: Axes = "cp") -> Sharded:
    """Replaces `Ops.attention`: moves [batch, heads, seq_local, dim] to [batch, heads_local, seq, dim] and back.

    (Jacobs et al. 2023, section 3.1.)

    Compose it with `shard_seq` over the same axis, in either order.

    Args:
        model_fn: any model function that attends through `ops.attention`.
        axis: the axis over which the sequence is split.

    Raises:
        ValueError: the config lists layers that carry a state along the sequence; or, when called, the model never
            calls `ops.attention` (its tokens would see only their own slice).
    """
    return across_slices(model_fn, "ulysses", axis, _exchanged)


def _exchanged(attention: Attention, axis: Axes) -> Across:
    def exchanged(
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
        heads = q.shape[1]
        spread = plan(heads, k.shape[1], axis_size(axis))
        operands = (spread.spread_queries(q), spread.spread_keys(k), spread.spread_keys(v))
        q, k, v = all_to_all_each(operands, axis, split_dim=1, concat_dim=2)
        out = attention(
            q,
            k,
            v,
            mask,
            window=window,
            chunk=chunk,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else own_slice(spread.spread_queries(sinks[None])[0], axis, dim=0),
        )
        # [batch, seq, heads_local, dim] is how kernels lay it out and how the model reads it: nothing else is copied.
        rows = all_to_all(out.transpose(1, 2), axis, split_dim=1, concat_dim=2)
        return spread.gather_queries(rows.transpose(1, 2), heads)

    return exchanged


@dataclass(frozen=True)
class Plan:
    """Key-value head j becomes `copies` heads side by side, each with `group` query heads; then pad to `kv_heads`."""

    group_before: int
    copies: int
    group: int
    kv_before: int
    kv_heads: int

    @property
    def heads(self) -> int:
        """The query heads, copies and padding too."""
        return self.kv_heads * self.group

    @property
    def plain(self) -> bool:
        return self.copies == 1 and self.kv_heads == self.kv_before

    def spread_keys(self, x: Tensor) -> Tensor:
        """[batch, kv_before, ...] to [batch, kv_heads, ...]."""
        if self.plain:
            return x
        return pad_to(x.repeat_interleave(self.copies, 1) if self.copies > 1 else x, self.kv_heads, 1)

    def spread_queries(self, x: Tensor) -> Tensor:
        """[batch, heads, ...] to [batch, kv_heads * group, ...], every head beside its own key-value head."""
        if self.plain:
            return x
        x = pad_to(x.unflatten(1, (self.kv_before, -1)), self.copies * self.group, 2)
        return pad_to(x.flatten(1, 2), self.heads, 1)

    def gather_queries(self, x: Tensor, heads: int) -> Tensor:
        """The inverse of `spread_queries`."""
        if self.plain:
            return x
        x = x[:, : self.kv_before * self.copies * self.group]
        return x.unflatten(1, (self.kv_before, -1))[:, :, : self.group_before].flatten(1, 2)


def plan(heads: int, kv_heads: int, size: int) -> Plan:
    """The plan with the fewest query heads on the busiest rank, then the fewest copies.

    With q heads and kv heads divided by `size` that is one copy and no padding; with kv_heads below size, each kv head
    goes to the ranks that need it.
    """
    group = heads // kv_heads

    def load(copies: int) -> tuple[int, int]:
        return -(-kv_heads * copies // size) * -(-group // copies), copies

    _, copies = min(load(copies) for copies in range(1, group + 1))
    padded = -(-kv_heads * copies // size) * size
    return Plan(group, copies, -(-group // copies), kv_heads, padded)

"""ulysses: attention over the whole sequence, each rank with some of the heads (DeepSpeed-Ulysses: Jacobs et al. 2023).

Queries, keys and values arrive split along the sequence; one all-to-all splits all along the heads instead, every
rank runs ordinary attention with the mask of the whole sequence, and a second all-to-all takes the output back. The
mask is never cut, so packing, padding and windows are what they are without ranks.

Any head counts. The plan (`_plan`) may give each key-value head to several ranks, as `copies` interleaved repeats that
each serve a part of the head's queries, and may pad heads, so that every query head still meets its own key-value head.
The sum of the copies' gradients and the zero gradients of padding follow from repeat's and pad's own adjoints.

A per-head parameter (sinks) is taken by `own_slice`: it was marked varying already, so its gradient is summed once.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fcp.axes import Axes, axis_size, names_of
from fcp.collectives import all_to_all, all_to_all_each, own_slice
from fcp.masks import Mask
from fcp.ops import Attention, Ops
from fcp.sharded import Sharded, base_model, pad_to
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["ulysses"]


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
    stateful = sorted({kind for kind in _layer_kinds(base_model(model_fn)) if _STATEFUL & set(kind.split("_"))})
    if stateful:
        raise ValueError(
            f"ulysses: the config has layers of kind {', '.join(stateful)}. They carry a state along the sequence, and "
            f"nothing hands it from one slice of axis {axis!r} to the next; split the batch or the parameters instead."
        )

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        called: list[bool] = []
        out = inner(params, inputs, replace(ops, attention=_exchanged(ops.attention, axis, called)))
        if not called:
            raise ValueError(
                f"ulysses: the model never called ops.attention, so nothing brought the slices of axis {axis!r} "
                f"together. Call ops.attention in the model, or leave ulysses out if no token looks at another."
            )
        return out

    return Sharded(model_fn, f"ulysses({' x '.join(names_of(axis))})", run)


_STATEFUL = {"linear", "lightning", "recurrent", "mamba", "mamba2", "ssm", "conv", "hybrid", "rwkv", "retention"}


def _layer_kinds(model: Any) -> list[str]:
    """The kinds of layers that a config names, by any of the names that config.json files use."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("layer_types", "layers_block_type", "block_types"))
    return [kind for kinds in found if isinstance(kinds, list | tuple) for kind in kinds if isinstance(kind, str)]


def _exchanged(attention: Attention, axis: Axes, called: list[bool]) -> Attention:
    def exchanged(
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
    ) -> Tensor:
        called.append(True)
        if mask is None:
            raise ValueError("ulysses: attention needs the mask of the whole sequence; pass inputs.mask")
        heads = q.shape[1]
        plan = _plan(heads, k.shape[1], axis_size(axis))
        spread = (plan.spread_queries(q), plan.spread_keys(k), plan.spread_keys(v))
        q, k, v = all_to_all_each(spread, axis, split_dim=1, concat_dim=2)
        out = attention(
            q,
            k,
            v,
            mask,
            window=window,
            chunk=chunk,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else own_slice(plan.spread_queries(sinks[None])[0], axis, dim=0),
        )
        # [batch, seq, heads_local, dim] is how kernels lay it out and how the model reads it: nothing else is copied.
        rows = all_to_all(out.transpose(1, 2), axis, split_dim=1, concat_dim=2)
        return plan.gather_queries(rows.transpose(1, 2), heads)

    return exchanged


@dataclass(frozen=True)
class _Plan:
    """Key-value head j becomes `copies` heads side by side, each with `group` query heads; then pad to `kv_heads`."""

    group_before: int
    copies: int
    group: int
    kv_before: int
    kv_heads: int

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
        return pad_to(x.flatten(1, 2), self.kv_heads * self.group, 1)

    def gather_queries(self, x: Tensor, heads: int) -> Tensor:
        """The inverse of `spread_queries`."""
        if self.plain:
            return x
        x = x[:, : self.kv_before * self.copies * self.group]
        return x.unflatten(1, (self.kv_before, -1))[:, :, : self.group_before].flatten(1, 2)


def _plan(heads: int, kv_heads: int, size: int) -> _Plan:
    """The plan with the fewest query heads on the busiest rank, then the fewest copies.

    With q heads and kv heads divided by `size` that is one copy and no padding; with kv_heads below size, each kv head
    goes to the ranks that need it.
    """
    group = heads // kv_heads

    def load(copies: int) -> tuple[int, int]:
        return -(-kv_heads * copies // size) * -(-group // copies), copies

    _, copies = min(load(copies) for copies in range(1, group + 1))
    padded = -(-kv_heads * copies // size) * size
    return _Plan(group, copies, -(-group // copies), kv_heads, padded)

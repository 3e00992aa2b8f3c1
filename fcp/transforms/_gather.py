"""gather: attention over the whole sequence, each rank with its own queries and everybody's keys and values.

Keys and values are gathered along the sequence, and each rank attends with the queries it has (Llama 3: Dubey et al.
2024, section 3.3.2). One exchange forward, and its adjoint, a scattered sum, backward; any number of heads. Where there
are few key and value heads, as under grouped-query attention, they are small beside the queries. But every rank holds
those of the whole sequence, until the layer's backward, so memory does not fall with the number of ranks.

The gradients of keys and values are summed over the ranks in float32 or wider.
"""

import torch
from torch import Tensor

from fcp._across_slices import Across, across_slices, check_slices
from fcp.axes import Axes, axis_index, axis_size
from fcp.collectives import all_gather_each
from fcp.masks import Mask
from fcp.ops import Attention
from fcp.sharded import Sharded
from fcp.typing import ModelFn

__all__ = ["gather"]


def gather(model_fn: ModelFn, *, axis: Axes = "cp") -> Sharded:
    """Replaces `Ops.attention`: keys and values of [batch, kv_heads, seq_local, dim] become those of the whole seq.

    (Dubey et al. 2024, section 3.3.2.)

    Compose it with `shard_seq` over the same axis, in either order.

    Args:
        model_fn: any model function that attends through `ops.attention`.
        axis: the axis over which the sequence is split.

    Raises:
        ValueError: the config lists layers that carry a state along the sequence; or, when called, the model never
            calls `ops.attention`, or the kernel knows no parts of a sequence.
    """
    return across_slices(model_fn, "gather", axis, _gathered)


def _gathered(attention: Attention, axis: Axes) -> Across:
    def gathered(
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
        size, local, device = axis_size(axis), q.shape[2], mask.positions.device
        check_slices("gather", q, k, mask, size)
        k, v = all_gather_each((k, v), axis, dim=2, sum_dtype=torch.promote_types(k.dtype, torch.float32))
        own = axis_index(axis).to(device) * local + torch.arange(local, device=device)
        here = mask if size == 1 else mask.take(own).against(mask)
        return attention(q, k, v, here, window=window, chunk=chunk, scale=scale, softcap=softcap, sinks=sinks)

    return gathered

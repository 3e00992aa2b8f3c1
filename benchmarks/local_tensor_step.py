"""The same cp step on torch's LocalTensor: one process, each rank's tensor apart, every operation run once a rank.

The model is models.llama with operations written for LocalTensor: sequence slices as per-rank tensors, Ulysses through
torch's functional all_to_all, torch's own attention. `simulate.py` holds its loss equal to the plain model's before
anything is timed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed._local_tensor import LocalTensorMode

import fcp
from fcp import pytree

__all__ = ["make_step"]


def make_step(model: fcp.Model, params: Any, batch: Any, ranks: int) -> Callable[[], float]:
    """One step, forward and backward, with `ranks` ranks; returns the loss, the sum over the ranks."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=ranks)
    group = dist.group.WORLD
    inputs = fcp.prepare(batch)
    params = pytree.map(lambda x: x.clone().requires_grad_(), params)

    def exchange(x: Any, split: int, concat: int) -> Any:
        parts = torch.stack(x.chunk(ranks, split)).contiguous()
        parts = all_to_all_single_autograd(parts, [1] * ranks, [1] * ranks, group)
        return torch.cat(parts.unbind(0), concat)

    def attention(q: Any, k: Any, v: Any, mask: Any, *, window: Any = None) -> Any:
        group_size = q.shape[1] // k.shape[1]
        if k.shape[1] < ranks:  # as fcp does: a kv head goes to every rank that needs it
            repeat = ranks // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            group_size //= repeat
        q, k, v = (exchange(x, 1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)
        return exchange(out, 2, 1)

    def loss(hidden: Any, table: Any, targets: Any, *, logits: bool = True) -> Any:
        scores = torch.nn.functional.linear(hidden, table)
        total = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, scores

    ops = replace(fcp.LOCAL, attention=attention, loss=loss)

    def step() -> float:
        with LocalTensorMode(ranks) as mode:

            def local(x: Any) -> Any:
                return mode.rank_map(lambda rank: x.chunk(ranks, 1)[rank].contiguous())

            mine = replace(
                inputs,
                tokens=local(inputs.tokens),
                positions=local(inputs.positions),
                targets=local(inputs.targets),
            )
            out = model(params, mine, ops)
            out.loss.backward()
            total = sum(float(out.loss._local_tensors[rank].detach()) for rank in range(ranks))
        for x in pytree.leaves(params):
            x.grad = None
        return total

    return step

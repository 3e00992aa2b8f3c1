"""Dispatch on processes: rows to the ranks that have their experts, and back (uneven all-to-all, nothing dropped).

A rank sorts its rows by expert, and so by the rank that owns the expert. Ranks first tell each other how many rows of
each expert are coming; then the rows travel in one exchange, are sorted by expert where they arrive, computed, and
travel back by the same counts. The gradient takes the same two ways with the counts swapped.

The events of `fcp.record` name a rank's exchange by the rows it holds before it routes any, [tokens * k, hidden], which
is one shape for all ranks; how many of them go where differs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fcp import pytree
from fcp._function import Function
from fcp._grouped import ExpertFn, join_rows, lengths, run_sorted, sort_rows
from fcp._process import group_of
from fcp._watch import collective
from fcp.axes import Axis
from fcp.trace import Event, note, recording, tap
from fcp.typing import Params

__all__ = ["dispatch_on_processes", "note_exchange"]


def dispatch_on_processes(
    x: Tensor, weights: Tensor, indices: Tensor, params: Params, fn: ExpertFn, axes: tuple[Axis, ...]
) -> Tensor:
    """`experts` for x [tokens, hidden] of this process, its experts being slice r of all along `axes`."""
    live = [axis for axis in axes if axis.index is not None]
    group = group_of(live[0].mesh, tuple(axis.name for axis in live))
    local, size = pytree.leaves(params)[0].shape[0], dist.get_world_size(group)
    event = _event(x, indices, axes)
    counts = lengths(indices.reshape(-1), local * size)
    arriving = _swap_counts(counts, local, x.device, group, event.axis)
    sent = [sum(counts[rank * local : (rank + 1) * local]) for rank in range(size)]
    got = [sum(each) for each in arriving]
    rows, place = sort_rows(x, indices, sum(sent))
    rows = _Rows.apply(rows, _Exchange(sent, got, group, event))
    expert = torch.cat([torch.arange(local).repeat_interleave(torch.tensor(each)) for each in arriving]).to(x.device)
    totals = [sum(each[e] for each in arriving) for e in range(local)]
    rows = _Rows.apply(run_sorted(rows, expert, totals, params, fn), _Exchange(got, sent, group, event))
    return join_rows(rows, weights, place).to(x.dtype)


def note_exchange(x: Tensor, indices: Tensor, axes: tuple[Axis, ...]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """For the simulator, which moves no rows: notes what `dispatch_on_processes` would, forward and backward."""
    if not recording() or all(axis.index is None for axis in axes):
        return x, lambda y: y
    event = _event(x, indices, axes)
    back = Event(event.name, event.axis, event.shape, event.dtype, backward=True)
    note(event)

    def note_back(y: Tensor) -> Tensor:
        note(event)
        return tap([y], back)[0]

    return tap([x], back)[0], note_back


def _event(x: Tensor, indices: Tensor, axes: tuple[Axis, ...]) -> Event:
    names = tuple(axis.name for axis in axes if axis.index is not None)
    return Event("exchange_rows", names, (math.prod(indices.shape), x.shape[-1]), x.dtype, backward=False)


def _swap_counts(
    counts: list[int], local: int, device: torch.device, group: Any, names: tuple[str, ...]
) -> list[list[int]]:
    """[sender][expert here] -> how many rows come, from how many rows go to each of all experts."""
    with temporarily_clear_interpreter_stack():
        mine = torch.tensor(counts, device=device)
        theirs = torch.empty_like(mine)
        with collective("exchange_counts", names):
            dist.all_to_all_single(theirs, mine, group=group)
        return theirs.view(-1, local).tolist()


@dataclass(frozen=True)
class _Exchange:
    """`sent[r]` rows go to rank r of the group, `got[r]` come from it."""

    sent: list[int]
    got: list[int]
    group: Any
    event: Event


class _Rows(Function):
    """rows [sum(sent), width], by receiver -> rows [sum(got), width], by sender."""

    @staticmethod
    def forward(rows: Tensor, exchange: _Exchange) -> Tensor:
        note(exchange.event)
        width = rows.shape[1]
        arrived = rows.new_empty(sum(exchange.got) * width)
        with collective(exchange.event.name, exchange.event.axis):
            dist.all_to_all_single(
                arrived,
                rows.reshape(-1),
                [count * width for count in exchange.got],
                [count * width for count in exchange.sent],
                group=exchange.group,
            )
        return arrived.view(-1, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.exchange = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        there = ctx.exchange
        event = Event(there.event.name, there.event.axis, there.event.shape, g.dtype, backward=True)
        return _Rows.apply(g, _Exchange(there.got, there.sent, there.group, event)), None

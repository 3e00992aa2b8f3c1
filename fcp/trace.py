"""The trace: which collectives ran, forward and backward, as each rank sees them.

Communication is what a mesh costs, and a rank that runs another sequence of collectives than its peers hangs them. So
`record` lists every collective with its axis, shape and bytes. In one program all ranks run the same, and one list
describes each of them.

Backward collectives are noted once, wherever the derivative is taken. Inside the map, a collective's own backward runs
and notes itself. Outside, torch differentiates what the collective did to all ranks' tensors at once, and no such
backward is called; there a `tap`, an identity laid behind the collective, notes the adjoint when a gradient passes.
Inside, the tap lies below the level that is differentiated, and stays silent.

Left out: a backward that another thread runs (torch does so off the CPU) does not see the list.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Event", "event_of", "note", "record", "recording", "tap"]


@dataclass(frozen=True)
class Event:
    """One collective as one rank sees it: what it handed in."""

    name: str
    axis: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    backward: bool

    @property
    def bytes(self) -> int:
        """The size of the tensor that one rank hands in, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def event_of(
    name: str, axis: tuple[str, ...], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, backward: bool
) -> Event:
    """The event of one tensor, or of several that travel together, as one row of numbers."""
    shape = shapes[0] if len(shapes) == 1 else (sum(math.prod(each) for each in shapes),)
    return Event(name, axis, shape, dtype, backward)


_trace: ContextVar[list[Event] | None] = ContextVar("fcp_trace", default=None)


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Records every collective that runs in the `with` block, forward and backward, in order, into the list it gives.

    In one program all ranks run the same collectives, so one list describes every rank. A `shard` or `pvary` is
    listed though it moves nothing forward; its adjoint moves data.

    >>> import fcp, torch
    >>> with fcp.record() as events:
    ...     _ = fcp.simulate(lambda x: fcp.psum(fcp.shard(x, "cp", dim=0), "cp"), cp=2)(torch.ones(4))
    >>> [(event.name, event.shape, event.bytes) for event in events]
    [('shard', (4,), 16), ('psum', (2,), 8)]
    """
    events: list[Event] = []
    token = _trace.set(events)
    try:
        yield events
    finally:
        _trace.reset(token)


def recording() -> bool:
    """Whether a `record` block is open here."""
    return _trace.get() is not None


def note(event: Event) -> None:
    """Adds a collective to the open `record` block, if there is one."""
    events = _trace.get()
    if events is not None:
        events.append(event)


def tap(xs: Sequence[Tensor], event: Event) -> list[Tensor]:
    """xs themselves; when their gradients pass here, `event` is noted once."""
    return list(_Tap.apply(event, *xs))


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(event: Event, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.event = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        note(ctx.event)
        return None, *gs

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], event: Event, *xs: Tensor) -> tuple[Any, Any]:
        return _Tap.apply(event, *xs), tuple(in_dims[1:])

"""What is kept of a function that backward computes again: results that cost much and weigh little.

Problem. Rematerialisation computes a whole layer twice, and the most expensive part of a layer on a long sequence,
attention, gives one tensor no larger than the layer's input. Keeping that one spares the second run.

Idea. Whoever makes such a result says so: `once("attention", fn, *args)` is `fn(*args)`. Around a function that will be
run again lies a `Tape`. The first run writes on it what was kept; the next one, in backward, reads it in the same order
and computes nothing. It is called at the bottom, below every level of torch.func, so that what lies on a tape is plain
numbers; gradients and rank dimensions are the caller's and never pass here.

A tape is read once: what is read is no longer held by it. A further run (a second backward through the same graph)
finds it empty and computes.

Left out: any choice by size. What is worth keeping is named where the policy is (`remat.py`).
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Tape", "once"]

Result = TypeVar("Result")


@dataclass(eq=False)
class Tape:
    """What one call of a function keeps for its replay; `kinds` are those that are kept at all."""

    kinds: frozenset[str]
    held: deque[Any] = field(default_factory=deque)
    written: bool = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """One run: the first is written down, every later one reads."""
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)
            self.written = True


_tape: ContextVar[Tape | None] = ContextVar("fcp_kept", default=None)


def once(kind: str, fn: Callable[..., Result], *args: Any) -> Result:
    """fn(*args), or what it gave in the run that is now repeated. It must give the same both times."""
    tape = _tape.get()
    if tape is None or kind not in tape.kinds:
        return fn(*args)
    if tape.written:
        return tape.held.popleft() if tape.held else fn(*args)
    token = _tape.set(None)  # of what this is made of, nothing more is kept
    try:
        result = fn(*args)
    finally:
        _tape.reset(token)
    tape.held.append(result)
    return result

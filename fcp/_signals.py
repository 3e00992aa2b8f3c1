"""Signals to a process whose main thread may be stuck in a collective, seen by another of its threads.

Problem. A handler in Python runs between two instructions of the main thread, and so not while that waits inside of a
backend. A rank that is told to stop there does not hear it, and its launcher kills it half a minute later.

Idea. The interpreter writes the number of each signal into a pipe at once, whatever the main thread does. A thread that
reads the pipe knows of it and can end the process.

A process that handles SIGTERM itself, or whose event loop reads its signals, is left alone.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["leave", "listen", "told_within"]

_pipe: tuple[int, int] | None = None
_told = 0
_heard: Callable[[], bool] | None = None


def listen(heard: Callable[[], bool]) -> None:
    """From now on `told_within` sees signals; to be called once a process.

    Args:
        heard: whether a thread is there that calls it, and ends the process when it says so.
    """
    global _pipe, _heard
    if threading.current_thread() is not threading.main_thread():
        return
    pipe = os.pipe()
    for end in pipe:
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    if before != -1:  # an event loop reads the signals of this process; leave them to it
        signal.set_wakeup_fd(before)
        return
    _pipe, _heard = pipe, heard
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def leave() -> None:
    """SIGTERM does again what it does by default."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def told_within(seconds: float, stuck: Callable[[], bool]) -> int:
    """Waits that long, or until a signal comes; the signal that is to end this process, 0 for none.

    Args:
        seconds: how long.
        stuck: whether the main thread is inside of a collective; only there SIGINT does not reach it.
    """
    global _told
    if _pipe is None:
        time.sleep(seconds)
        return 0
    if select.select([_pipe[0]], [], [], seconds)[0]:
        numbers = os.read(_pipe[0], 64)
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _terminated:
            _told = signal.SIGTERM
        elif signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _told = signal.SIGINT
    if _told == signal.SIGINT and not stuck():
        _told = 0  # the main thread gets its KeyboardInterrupt
    return _told


def _terminated(number: int, frame: Any) -> None:
    """Stands for the default action, which the thread takes when it knows why; where there is no thread, takes it."""
    if _heard is None or not _heard():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

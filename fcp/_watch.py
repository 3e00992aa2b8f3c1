"""What happened to the others: so that no process waits for one that is gone.

Problem. A process that raises, dies or stalls leaves the others inside a collective. Some of them get an error that
names an address, some wait for as long as the group's timeout says, and none says whose fault it was.

Idea. Every process that runs a distributed function keeps a thread beside it, the watch. It publishes through the
group's own store where this process is (how many collectives it has entered, which one is the last), and looks at one
neighbour. Who finds that its neighbour is gone, or has an exception of its own, writes one record that all look at: the
first failure. From then on

- a collective that fails raises `RankError`, which says who failed, how, and in which collective everybody was;
- a process that enters another collective raises it at once;
- a process that is stuck inside of one ends within `GRACE` seconds, the same words on standard error, since nothing in
  Python can wake it; so does one that the launcher or the user told to stop (SIGTERM, SIGINT), and, after twice as
  long, one that has not come to a collective yet, or is in one of torch's own (a checkpoint's, say).

A collective that takes longer than nine tenths of the default group's timeout has a rank that never came: the one that
has entered the fewest, of fcp's and of those that torch counts in the default group. The tenth is for the others to
fail in, so that all have when the timeout is over. (Groups of a mesh would wait for torch's default of half an hour;
they are told. The default group is left as it is.) What fails is explained only if it has to do with other ranks:
memory that runs out in the middle of a collective is this rank's own failure.

An exception that all ranks raise alike (ValueError and NameError: what callers get wrong) leaves them of use, and is
no failure until it ends a process. What a collective costs for all this is two attributes.

Left out: a process on another machine whose connections stay open when it stops is found by the timeout only. Where
they close, it is the one whose watch has fallen silent.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from fcp import _signals

__all__ = ["RankError", "Watch", "collective", "explained", "failed_here", "last_words", "watch_of"]

EVERY = 0.25
"""Seconds between two looks."""
PATIENCE = 0.9
"""The part of the default group's timeout that a collective may take."""
GRACE = 3.0
"""Seconds in which a process that is not stuck raises by itself, before its watch ends it."""


class RankError(RuntimeError):
    """A collective that cannot complete: which rank is to blame, what became of it, and where this one was.

    Attributes:
        rank: the rank that is to blame.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return self.args[0]


_watch: "Watch | None" = None

last_words: "list[Callable[[RankError], None]]" = []
"""What is called with the error of a process that its watch ends."""


def watch_of() -> "Watch | None":
    """The watch of this process's default group, started at the first call; None where there is no other process."""
    global _watch
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    if _watch is None or _watch.group_store is not store:
        if _watch is None:
            _install()
        _watch = Watch(store)
    return _watch


@contextlib.contextmanager
def collective(name: str, names: tuple[str, ...]) -> Iterator[None]:
    """Around what may wait for other ranks: says where this process is, and explains what fails.

    Raises:
        RankError: it failed, or another rank has failed before.
    """
    watch = _watch
    if watch is None:
        yield
        return
    watch.enter(name, names)
    try:
        yield
    except RuntimeError as error:
        if not _of_others(error):
            raise
        raise watch.explained(error) from error
    finally:
        watch.inside = False


def failed_here(error: BaseException) -> None:
    """Tells the other ranks of an exception that ends this one's part, unless it is what another's failure raised."""
    if _watch is not None and not isinstance(error, RankError):
        text = next(iter(str(error).splitlines()), "")[:300]
        _watch.fail(_watch.rank, f"raised {type(error).__name__}: {text}")
        _watch.raised = True


def explained(error: BaseException) -> BaseException:
    """What an exception that ends this rank's part is to be known as: the RankError behind what another rank caused.

    One of this rank's own doing comes back as it is, and the others are told of it.
    """
    if _watch is not None and _of_others(error):
        return _watch.explained(error)
    failed_here(error)
    return error


def _of_others(error: BaseException) -> bool:
    """Whether an error is a backend's or the store's, about ranks that are gone or late, and no more than that."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(words in said for words in ("gloo/", "connection closed", "timed out"))
    )


class Watch:
    """One process's watch: a daemon thread with its own connection to the group's store."""

    def __init__(self, store: Any) -> None:
        self.group_store = store
        self.store = store.clone()
        self.rank, self.size, self.pid = dist.get_rank(), dist.get_world_size(), os.getpid()
        self.entered, self.last, self.inside, self.since = 0, ("", ("",)), False, 0.0
        self.patience = PATIENCE * _timeout()
        self.failure: dict[str, Any] = {}
        self.raised = False  # whether this process knows of the failure, as an exception
        self.beats = 0
        self.hurried: set[str] = set()
        self.checked: set[Any] = set()  # what the self-check has found right in this group
        self.ended = threading.Event()
        self.publish()
        self.thread = threading.Thread(target=self._look, name="fcp watch", daemon=True)
        self.thread.start()

    # --- for the process itself ---

    def hurry(self, group: Any) -> None:
        """Tells a group of a mesh, once, how long its collectives may take."""
        if group.group_name in self.hurried:
            return
        self.hurried.add(group.group_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend of another make has no such setting; then this watch sees to it
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.patience), group)

    def enter(self, name: str, names: tuple[str, ...]) -> None:
        if self.failure:
            raise self.explained(None)
        self.entered += 1
        self.last, self.inside, self.since = (name, names), True, time.monotonic()

    def where(self) -> str:
        if not self.entered:
            return "before any collective"
        name, names = self.last
        axes = " x ".join(map(repr, names))
        return f"{'in' if self.inside else 'after'} {name} over {axes}, its collective {self.entered}"

    def explained(self, error: BaseException | None) -> RankError:
        """The error of the collective that this process is in or about to enter."""
        if isinstance(error, RankError):
            return error
        failure = self._cause(late=error is not None and "timed out" in str(error).lower())
        self.raised = True
        said = "" if error is None else f": {next(iter(str(error).splitlines()), '')[:300]}"
        return RankError(f"{failure['text']} (here: rank {self.rank}, {self.where()}{said})", failure["rank"])

    def fail(
        self, rank: int, what: str, where: str | None = None, *, who: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Records that `rank` failed, if nothing is recorded yet; what is recorded now."""
        if self.pid == os.getpid() and not self.failure:
            record = {"rank": rank, "text": f"{who or f'rank {rank}'} {what} ({where or self.where()})", **more}
            try:
                self.failure = json.loads(self.store.compare_set("fcp/failure", "", json.dumps(record)))
            except Exception:  # whoever kept the store is gone too
                self.failure = record
        return self.failure

    def publish(self, left: bool = False) -> None:
        self.beats += 1
        at = {"host": _host(), "pid": self.pid, "entered": self.entered, "torch": _torch_count(), "where": self.where()}
        beat = {**at, "left": left, "beats": self.beats}
        self.store.set(f"fcp/beat/{self.rank}", json.dumps(beat))

    def _cause(self, *, late: bool) -> dict[str, Any]:
        """The first failure: the watches get a moment to find it, unless it is late; or what can be seen from here."""
        earlier = [] if late else self._all_beats()
        until = time.monotonic() + GRACE
        while not self.failure and not late and time.monotonic() < until:
            time.sleep(EVERY / 5)
        if self.failure:
            return self.failure
        beats = self._all_beats()
        for rank, beat in enumerate(beats):
            if beat is not None and beat["left"]:
                return self.fail(rank, "has ended", beat["where"])
        for rank, (then, now) in enumerate(zip(earlier, beats, strict=False)):
            if then is not None and now is not None and now["beats"] == then["beats"] and rank != self.rank:
                return self.fail(rank, "was lost: its process gives no sign of life", f"last seen {now['where']}")
        done = [(beat["entered"], beat["torch"]) if beat else (-1, -1) for beat in beats]
        fewest = min(done, default=(0, 0))
        behind = [rank for rank, each in enumerate(done) if each == fewest]
        if beats and len(behind) < len(beats):
            beat = beats[behind[0]]
            who = f"rank {behind[0]}" if len(behind) == 1 else f"ranks {behind}"
            where = "before any collective" if beat is None else beat["where"]
            return self.fail(behind[0], "did not come", where, who=who, stalled=behind)
        return self.fail(self.rank, "lost its connections")

    def _all_beats(self) -> list[dict[str, Any] | None]:
        with contextlib.suppress(Exception):  # whoever kept the store is gone too
            self.publish()
            return [self._beat(rank) for rank in range(self.size)]
        return []

    def _beat(self, rank: int) -> dict[str, Any] | None:
        key = f"fcp/beat/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    # --- beside the process ---

    def _look(self) -> None:
        neighbour, ends = (self.rank + 1) % self.size, None
        while not self.ended.is_set() and _default_store() is self.group_store:
            told = _signals.told_within(EVERY, lambda: self.inside)
            try:
                self.publish()
                if self.store.check(["fcp/failure"]):
                    self.failure = json.loads(self.store.get("fcp/failure"))
                beat = None if self.failure else self._beat(neighbour)
            except Exception:  # whoever keeps the store has ended; a collective that fails now says so
                beat = None
            if beat is not None and not beat["left"] and _is_gone(beat):
                self.fail(neighbour, f"was killed or died (process {beat['pid']})", f"last seen {beat['where']}")
            if self.inside and not self.failure and time.monotonic() - self.since > self.patience + EVERY:
                self._cause(late=True)  # by a backend that keeps no time itself
            # Who computes raises at its next collective. Ended is who does not: stuck in one, stalled, told to stop, or
            # for long without a word of ours (in a collective of torch's own; in a computation that is of no use).
            stuck = self.inside or self.rank in self.failure.get("stalled", ())
            unaware = not self.raised and self.failure.get("rank") != self.rank
            if not told and not (self.failure and (stuck or unaware)):
                ends = None
            elif ends is None:
                ends = time.monotonic() + (GRACE if told or stuck else 2 * GRACE)
            elif time.monotonic() > ends:
                self._end(told)
        with contextlib.suppress(Exception):
            self.publish(left=True)

    def _end(self, told: int) -> None:
        why = self.failure.get("text") or f"rank {self.rank} was told to stop by {signal.Signals(told).name}"
        error = RankError(f"{why} (here: rank {self.rank}, {self.where()})", self.failure.get("rank", self.rank))
        print(f"fcp.RankError: {error}", file=sys.__stderr__)
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        for tell in last_words:
            with contextlib.suppress(Exception):
                tell(error)
        for stream in (sys.stdout, sys.__stderr__):
            with contextlib.suppress(Exception):
                cast(Any, stream).flush()
        os._exit(128 + told if told else 1)


def _default_store() -> Any:
    """The default group's store; None where there is none, or no longer."""
    try:
        return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    except (ValueError, RuntimeError):  # taken down between the two
        return None


def _torch_count() -> int:
    """The collectives that torch has counted in the default group, whoever called them."""
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return group._get_sequence_number_for_group()
    except Exception:  # a backend that does not count, or no group any more
        return 0


def _timeout() -> float:
    """Seconds that the default group waits."""
    group = dist.distributed_c10d._get_default_group()
    try:
        return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    except Exception:  # a backend of another make
        return dist.default_pg_timeout.total_seconds()


# --- is a process gone? -----------------------------------------------------------------------------------------------


def _host() -> str:
    """This machine, and the namespace in which its process numbers mean something."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_gone(beat: dict[str, Any]) -> bool:
    """Whether the process of a beat no longer runs, as far as this machine can tell."""
    if beat["host"] != _host():
        return False
    try:
        os.kill(beat["pid"], 0)
        with open(f"/proc/{beat['pid']}/stat") as file:  # a process that nobody has waited for is still listed
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except ProcessLookupError:
        return True
    except OSError:
        return False


# --- the process's end ------------------------------------------------------------------------------------------------


def _install() -> None:
    """Once a process: exceptions that nothing catches are reported, an ordinary end is no death, signals are seen."""
    previous = sys.excepthook

    def uncaught(kind: Any, error: Any, trace: Any) -> None:
        known = error if isinstance(error, KeyboardInterrupt) else explained(error)
        if known is error:
            previous(kind, error, trace)
        else:
            known.__cause__ = error
            previous(type(known), known, known.__traceback__)

    sys.excepthook = uncaught
    atexit.register(_leave)
    _signals.listen(lambda: _watch is not None and _watch.thread.is_alive())


def _leave() -> None:
    """Ends the watch before the interpreter ends: a thread that wakes up later, in the store, aborts the process."""
    if _watch is not None and _watch.pid == os.getpid():
        _signals.leave()
        _watch.ended.set()
        _watch.thread.join(timeout=10 * EVERY)

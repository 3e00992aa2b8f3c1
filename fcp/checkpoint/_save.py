"""save: each process writes its files, and the first one makes a checkpoint of them.

A save is three steps. Begin: every rank says what it is about to save, and the first makes the folder. Write: each rank
writes its own files. Commit: the first rank lists all of them and renames the folder. Between two steps stands an
exchange, so that no step begins unless the one before has ended well on every rank (`_ranks.py`).

Beside a training there can be no exchange: its collectives would meet the training's, in another order on each rank. So
an asynchronous save has threads write and commit, and each leaves a report in the folder for the first rank's; only
`wait`, which every rank calls where it likes, exchanges what became of it.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fcp._train_step import TrainState
from fcp._transformed import Transformed
from fcp.checkpoint import _folder
from fcp.checkpoint._folder import STATE
from fcp.checkpoint._ranks import Ranks
from fcp.checkpoint._state import Contents, contents_of
from fcp.huggingface._checkpoint import extra as library

__all__ = ["Saving", "save"]

POLL = 0.01
"""Seconds between two looks at whether the other ranks' files are there."""
AT_EXIT = 60.0
"""Seconds for which a process whose program has ended goes on to wait for the other ranks' files."""


@dataclass(frozen=True)
class _Job:
    """One process's share of a save."""

    final: Path
    ranks: Ranks
    contents: Contents
    keep: int | None

    @property
    def partial(self) -> Path:
        return self.final.with_name(self.final.name + ".partial")

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """Nothing is left of a save that fails inside."""
        try:
            yield
        except BaseException:
            if self.ranks.number == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def write(self) -> dict[str, Any]:
        """This process's files, with their sizes and checksums."""
        from fcp.checkpoint._shards import write_blocks  # torch's checkpoints take a second to import

        return write_blocks(self.partial, self.ranks.number, self.ranks.count, self.contents.blocks)

    def commit(self, facts: list[dict[str, Any]]) -> None:
        """Makes a checkpoint of every process's files; the first process does."""
        if self.ranks.number:
            return
        files = {name: about for each in facts for name, about in each.items()}
        files[STATE] = _folder.write_json(self.partial / STATE, self.contents.values)
        about = {"step": self.contents.step, "leaves": self.contents.leaves, "mesh": self.ranks.sizes}
        _folder.commit(self.partial, about, files, keep=self.keep)

    # Beside the training there are no collectives, so each process leaves a report for the first.

    def report(self) -> None:
        facts = self.write()
        report = self._report(self.ranks.number)
        _folder.write_json(report.with_suffix(".new"), facts)
        report.with_suffix(".new").rename(report)

    def reports(self, given_up: threading.Event) -> list[dict[str, Any]]:
        """Every process's, as soon as all are there."""
        found, ended = [], math.inf
        for number in range(self.ranks.count):
            path = self._report(number)
            while not path.exists():
                if ended == math.inf and not threading.main_thread().is_alive():
                    ended = time.monotonic()
                if given_up.is_set() or time.monotonic() > ended + AT_EXIT:
                    raise RuntimeError(f"rank {number} has not written its files")
                time.sleep(POLL)
            found.append(json.loads(path.read_bytes()))
            path.unlink()
        return found

    def _report(self, number: int) -> Path:
        return self.partial / f"report-{number}.json"


class _Background:
    """A job in a thread of its own."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.written: Future[None] = Future()
        self.committed: Future[None] = Future()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fcp checkpoint")  # no daemon: a save is not cut short
        self._thread.start()

    def _run(self) -> None:
        _settle(self.written, self.job.report)
        _settle(self.committed, self._commit)

    def _commit(self) -> None:
        if self.job.ranks.number == 0:
            with self.job.cleaned():
                self.written.result()
                self.job.commit(self.job.reports(self._given_up))

    def wait(self) -> None:
        """Waits for every rank's; raises on all what failed on one."""
        try:
            self.job.ranks.together("checkpoint.save", self.written.result)
        except BaseException:
            self._given_up.set()
            self._thread.join()
            raise
        self.job.ranks.together("checkpoint.save", self.committed.result)


def _settle(future: "Future[None]", fn: Callable[[], None]) -> None:
    try:
        future.set_result(fn())
    except BaseException as error:
        future.set_exception(error)


@dataclass(frozen=True)
class Saving:
    """A save; an asynchronous one may still be going on.

    Attributes:
        path: where the checkpoint is, or will be.
    """

    path: Path
    _background: _Background | None = field(default=None, repr=False)

    def done(self) -> bool:
        """Whether this rank has nothing more to do for it, or has failed."""
        return self._background is None or self._background.committed.done()

    def wait(self) -> Path:
        """Waits until the checkpoint is there; every rank calls it.

        Returns:
            Its path.

        Raises:
            RuntimeError: a rank could not write. Nothing of this checkpoint stays, and no earlier one is touched.
        """
        if _going_on.get(self.path.parent) is self:
            del _going_on[self.path.parent]
        if self._background is not None:
            self._background.wait()
        return self.path


_going_on: dict[Path, Saving] = {}


def save(
    folder: str | Path,
    sharded: Transformed,
    state: TrainState,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Writes the checkpoint `folder/step-00000042`, 42 being the state's step. Every rank calls it.

    Args:
        folder: of the checkpoints of one training; made where it is not there. The same, and shared, on all ranks.
        sharded: the transformed function whose shards the state has.
        state: what `train_step` gives.
        extra: what else has to come back, as the position in the data: what JSON can hold, the same on all ranks. A
            generator that the training draws from is numbers too, as below.
        keep: once this one is there, remove what is older than the newest `keep` whole checkpoints. None: nothing.
        asynchronous: return when this rank's tensors are copied, and write beside the training. What fails is raised by
            `wait`, or by the next save into the folder.

    Returns:
        The save: its `path`, and `wait()`.

    Raises:
        ValueError: the state is not one of `sharded`'s, JSON would give back another `extra`, `keep` is no positive
            number, or the ranks' differ.
        ImportError: safetensors is not installed.
        RuntimeError: a rank could not write, now or in an asynchronous save into this folder that nobody has waited
            for. Nothing of that checkpoint stays, and no earlier one is touched.

    >>> import fcp, tempfile, torch
    >>> from models import llama
    >>> model, folder = llama.tiny(), tempfile.mkdtemp()
    >>> sharded = fcp.transform(model, cp=2)
    >>> step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=0.1))
    >>> state = step.init(sharded.shard(model.init(seed=0)))
    >>> generator = torch.Generator().manual_seed(0)
    >>> extra = {"row": 7, "random": generator.get_state().tolist()}
    >>> fcp.checkpoint.save(folder, sharded, state, extra=extra).path.name
    'step-00000000'
    >>> drawn = torch.rand(3, generator=generator)
    >>> state, extra = fcp.checkpoint.load(folder, fcp.transform(model, fsdp=2))
    >>> extra["row"]
    7
    >>> again = torch.Generator().set_state(torch.tensor(extra["random"], dtype=torch.uint8))
    >>> torch.equal(torch.rand(3, generator=again), drawn)
    True
    """
    library("safetensors")
    where, ranks = Path(folder).expanduser().absolute(), Ranks.of(sharded)
    if where in _going_on:
        _going_on[where].wait()
    job, digests = _begun(where, ranks, sharded, state, extra or {}, keep)
    with job.cleaned():
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"checkpoint.save: the ranks {others} have another folder, step, `extra` or `keep`, or other leaves, "
                f"than rank 0. Every rank saves the same."
            )
        if not asynchronous:
            facts = ranks.together("checkpoint.save", job.write)
            ranks.together("checkpoint.save", lambda: job.commit(facts))
            return Saving(job.final)
        copied = [replace(b, values=b.values.to("cpu", copy=True)) for b in job.contents.blocks]
    job = replace(job, contents=replace(job.contents, blocks=copied))
    saving = Saving(job.final, _Background(job))
    _going_on[where] = saving
    return saving


def _begun(
    where: Path,
    ranks: Ranks,
    sharded: Transformed,
    state: TrainState,
    extra: Mapping[str, Any],
    keep: int | None,
) -> tuple[_Job, list[str]]:
    """This process's share of the save, its folder being there, and what every rank is about to save, as digests."""
    begun: list[_Job] = []

    def begin() -> str:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ValueError(f"checkpoint.save: keep={keep!r} must be a number of checkpoints, 1 or more, or None")
        contents = contents_of(sharded, state, extra)
        begun.append(_Job(where / _folder.name_of(contents.step), ranks, contents, keep))
        if ranks.number == 0:
            _folder.begin(where, contents.step)
        return f"{contents.digest()} {begun[0].final} {keep}"

    try:
        digests = ranks.together("checkpoint.save", begin)
    except BaseException:
        for job in begun:
            if ranks.number == 0:
                shutil.rmtree(job.partial, ignore_errors=True)
        raise
    return begun[0], digests

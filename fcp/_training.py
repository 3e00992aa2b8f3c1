"""The run behind `fcp train`: steps until the last one, or until it is told to stop; logged, saved, resumed.

Everything that decides what a step computes is in two values, the `TrainState` and the position in the data, and both
are in each checkpoint. So a run that was resumed is the run that was not interrupted, on this mesh or on another.

A run is told to stop by SIGTERM (a scheduler's) or SIGINT (Ctrl-C). Neither may end a step half way, nor one rank of
several: the signal is noted, and after each step the ranks ask each other whether any was told. If so, all save and
end, with status 0 and a line that says how to go on. A second Ctrl-C in one process ends it at once. (torchrun gives
its processes 30 seconds for that, and then kills them: no checkpoint is lost, and the steps since the last one are.)

In the folder of a run lie `log.jsonl` (a JSON object a step), `checkpoints/`, and TensorBoard's files where asked for.
Rank 0 alone decides what is there, and the others hear of it: a folder that two machines see in different states would
otherwise send them different ways.

Left out: evaluation between steps, and devices other than the CPU.
"""

import contextlib
import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fcp import checkpoint, data, tables
from fcp._cli_args import DTYPES, ways
from fcp._cli_inputs import read_model
from fcp._optimizer import optimizer
from fcp._run_log import NAME, event_writer, open_log, read_log
from fcp._settings import Settings
from fcp._train_step import TrainState, TrainStep, train_step
from fcp._transform import transform
from fcp._transformed import Transformed
from fcp._watch import collective
from fcp.typing import Params

__all__ = ["Run", "checkpoint_at", "prepare_run", "train"]

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Run:
    """A run that could begin.

    Attributes:
        settings: what it was told.
        sharded: the transformed model.
        step: the training step.
        data: the rows of this rank.
        fresh: gives this rank's shards of the parameters that the run begins with, once: nobody keeps them then.
    """

    settings: Settings
    sharded: Transformed
    step: TrainStep
    data: data.Packed
    fresh: Callable[[], Params]


def prepare_run(settings: Settings, device_mesh: Any = None) -> Run:
    """Everything that can be refused, before a parameter is made.

    Args:
        settings: what `fcp train` was told.
        device_mesh: the DeviceMesh of the ranks; None where they are simulated.

    Raises:
        ValueError: something in the settings cannot be, or does not fit the model or the data.
    """
    dtype, compute = DTYPES[settings.dtype], settings.compute_dtype
    if settings.tensorboard:
        event_writer()  # refused now where there is none
    documents = data.read(
        settings.text,
        checkpoint=settings.checkpoint,
        documents=cast(Any, settings.documents),
        column=settings.column,
        split=settings.split,
    )
    model, make_params = read_model(
        settings.target, settings.checkpoint, dtype, settings.seed, lazy=device_mesh is not None
    )
    data.check_vocabulary(documents, model, settings.text)
    splits_rows = any(settings.mesh.get(axis, 1) > 1 for axis in ("dp", "fsdp"))
    sharded = transform(
        model,
        mesh=device_mesh,
        remat=cast(Any, settings.remat),
        logits=False,
        loss_tile=settings.loss_tile,
        mlp_tile=settings.mlp_tile,
        rows="own" if device_mesh is not None and splits_rows else "all",
        **cast(Any, ways(settings, settings.mesh)),
    )
    rule = optimizer(
        getattr(torch.optim, settings.optimizer),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        sharded=sharded,
        **settings.options,
    )
    step = train_step(
        sharded, rule, max_norm=settings.clip, compute_dtype=None if compute is None else DTYPES[compute], donate=True
    )
    packed = data.pack(
        documents, seq=settings.seq, batch=settings.batch, seed=settings.seed, part=data.part_of(sharded)
    )
    once = [make_params]
    del make_params  # what it holds may be the whole model, of which a process is to keep its shards alone
    return Run(settings, sharded, step, packed, lambda: sharded.shard(once.pop()()))


def train(run: Run, *, resume: str | None = None, how_to_resume: str = "--resume auto") -> int:
    """Runs the steps that are left, and returns how many have been done in all.

    Args:
        run: what `prepare_run` gives.
        resume: "auto", the newest whole checkpoint of the run's folder, or the beginning where there is none; a
            checkpoint, or a folder of them; None, the beginning.
        how_to_resume: the command that a line names when the run was told to stop.

    Raises:
        ValueError: the folder has a run already and `resume` is None; the checkpoint is not this run's; or the data
            has changed since.
    """
    settings = run.settings
    folder = Path(settings.folder).expanduser()
    state, place = _start(run, _on_first(lambda: _found(folder, resume)))
    first = done = int(state.step)
    told = 0
    with (
        open_log(folder, done, tensorboard=settings.tensorboard) if _speaks() else contextlib.nullcontext() as log,
        tables.training(settings.steps, done) as show,
        _signals(run.sharded.mesh is None) as heard,
    ):
        while done < settings.steps and not told:
            started = time.perf_counter()
            batch, place = run.data.batch(place)
            rate = run.step.optimizer.lr(int(state.optimizer["step"]))
            state, metrics = run.step(state, _micro_batches(batch, settings.accumulate))
            done = int(state.step)
            told, memory = _together(run.sharded.mesh, heard(), _peak_megabytes())
            seconds = time.perf_counter() - started
            record = {
                "step": done,
                "loss": float(metrics["loss"]),
                "norm": float(metrics["norm"]),
                "lr": rate,
                "skipped": bool(metrics["skipped"]),
                "passes": place.taken / run.data.num_rows,
                "seconds": seconds,
                "tokens_per_second": settings.batch * settings.seq / seconds,
                "memory_mb": memory,
            }
            if log is not None:
                log(record)
            show(record)
            if done == settings.steps or told or (settings.save_every and done % settings.save_every == 0):
                _save(run, folder, state, place)
    if told and done < settings.steps:
        name = signal.Signals(told).name
        print(f"stopped by {name} after step {done} of {settings.steps}, saved; to go on: {how_to_resume}", flush=True)
    elif first == settings.steps:
        print(f"nothing left to do: {done} of {settings.steps} steps are done", flush=True)
    else:
        print(f"{done} steps done; the log and checkpoints are in {folder}", flush=True)
    return done


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _found(folder: Path, resume: str | None) -> str | None:
    """The checkpoint to go on from, or the folder whose newest whole one it is; None for a run that begins."""
    kept = folder / CHECKPOINTS
    there = sorted(path for path in kept.glob("step-*") if not path.suffix)
    if resume is None:
        if (folder / NAME).exists() or there:
            raise ValueError(f"{folder}: a run is in this folder; add --resume auto to go on with it, or name another")
        return None
    if (folder / NAME).exists():
        read_log(folder)  # it is to be gone on with
    if resume == "auto":
        return str(kept) if there else None
    asked = checkpoint_at(resume)
    later = [path.name for path in there if asked.resolve().parent == kept.resolve() and path.name > asked.name]
    if later:
        raise ValueError(
            f"--resume {resume}: {later[-1]} in the same folder is later, and would be in the way; "
            f"give another folder (--folder) for a run that branches off"
        )
    return str(asked)


def checkpoint_at(path: str) -> Path:
    """The checkpoint, or the folder of several, that a path means: itself, or what is in the folder of a run.

    Raises:
        ValueError: nothing is there.
    """
    asked = Path(path).expanduser()
    asked = asked / CHECKPOINTS if (asked / CHECKPOINTS).is_dir() else asked
    if not asked.exists():
        raise ValueError(f"{path}: nothing is there; give a checkpoint, or the folder of a run")
    return asked


def _start(run: Run, found: str | None) -> tuple[TrainState, data.DataState]:
    state = run.step.init(run.fresh())
    if found is None:
        return state, run.data.init()
    state, extra = checkpoint.load(found, run.sharded, state)
    try:
        place = data.DataState(**extra["data"])
    except (KeyError, TypeError):
        raise ValueError(f"{found}: no position in the data is in it, so it is no checkpoint of fcp train") from None
    if place.source != run.data.source:
        raise ValueError(
            f"{found}: its run read other data: the text, tokenizer, documents, seq or seed have changed since; put "
            f"them back, or begin a run in another folder"
        )
    return state, place


def _save(run: Run, folder: Path, state: TrainState, place: data.DataState) -> None:
    extra = {"data": dataclasses.asdict(place), "settings": dataclasses.asdict(run.settings)}
    checkpoint.save(folder / CHECKPOINTS, run.sharded, state, extra=extra, keep=run.settings.keep)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _speaks() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_first(find: Callable[[], str | None]) -> str | None:
    """What `find` gives on rank 0, on every rank; or the ValueError that it raises there."""
    if not dist.is_initialized():
        return find()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = find()
        except ValueError as error:
            said[1] = str(error)
    with collective("the start", ("world",)):
        dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise ValueError(said[1])
    return said[0]


def _together(mesh: Any, told: int, memory: float) -> tuple[int, float]:
    """The signal that any rank has heard, and the most memory that any holds."""
    if mesh is None:
        return told, memory
    both = torch.tensor([float(told), memory], dtype=torch.float64)
    with collective("the end of a step", tuple(mesh.mesh_dim_names)):
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return int(both[0]), float(both[1])


@contextlib.contextmanager
def _signals(alone: bool) -> Iterator[Callable[[], int]]:
    """Notes SIGTERM and SIGINT; gives a function that says which has come, 0 for none.

    A second SIGINT of a process that is `alone` interrupts it; a launcher passes one on to ranks that had it already.
    """
    heard = 0

    def note(number: int, frame: Any) -> None:
        nonlocal heard
        if heard and number == signal.SIGINT and alone:
            raise KeyboardInterrupt
        heard = number

    if threading.current_thread() is not threading.main_thread():  # a process's signals are its main thread's
        yield lambda: heard
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _micro_batches(batch: dict[str, torch.Tensor], count: int) -> Any:
    if count == 1:
        return batch
    rows = batch["input_ids"].shape[0] // count
    return [{key: x[i * rows : (i + 1) * rows] for key, x in batch.items()} for i in range(count)]


def _peak_megabytes() -> float:
    """The most memory that this process has held; NaN where the system does not say."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

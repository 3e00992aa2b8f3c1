"""launch: a function on several processes of this machine, from a notebook, a script or a test.

    losses = fcp.launch(step, params, batch, num_processes=4)      # one result a rank

The processes are those of torch's elastic launcher, as under torchrun, each a fresh interpreter. The function and its
arguments travel by value where they are defined in a notebook or a script (cloudpickle), by name where they can be
imported. In each process torch.distributed is ready when the function is called, and taken down after it: gloo, or NCCL
where every process has a GPU of its own. torch runs on one thread in each (`OMP_NUM_THREADS` set to another number
changes that), since several processes that all take every core are slower than one.

What a rank prints goes into a file of its own. If a rank fails, all end (`_watch.py`), and the caller gets one
`LaunchError` with what that rank raised, its traceback, and where the outputs lie. Processes do not outlive their
caller: a Ctrl-C ends them, and so does the caller's death.

Left out: other machines (start the same function under torchrun there), and results that cannot be pickled.
"""

import contextlib
import ctypes
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from fcp import pytree
from fcp._watch import RankError, explained, last_words, watch_of

__all__ = ["LaunchError", "launch", "process_group"]


START = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for number, ending in ((1, "out"), (2, "err")):
    name = folder / f"rank_{os.environ['RANK']}.{ending}"
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
from fcp._launch import work
work(folder)
"""
"""The program of each process; its outputs go to files before anything else can speak."""


class LaunchError(RuntimeError):
    """A rank of `launch` failed.

    Attributes:
        rank: the rank that failed first.
        folder: where each rank's output and error lie, or None where they were not kept.
    """

    def __init__(self, message: str, rank: int, folder: Path | None) -> None:
        super().__init__(message)
        self.rank, self.folder = rank, folder


def launch(
    fn: Callable[..., Any],
    *args: Any,
    num_processes: int,
    timeout: int | float = 300,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """Calls fn(*args) on `num_processes` processes of this machine and gives their results, by rank.

    Args:
        fn: a function; one from a notebook or a script, and what it closes over, is sent by value. Tensors come back
            as copies on the CPU.
        args: its arguments, the same on every rank; `torch.distributed.get_rank()` tells a rank which it is.
        num_processes: how many, 1 or more.
        timeout: seconds that a collective waits for a rank before it fails.
        log_dir: a folder for the ranks' outputs (`rank_0.out`, `rank_0.err`, ...), made if it is not there. None: they
            are kept only if a rank fails.

    Raises:
        ValueError: `num_processes` is no positive integer, `timeout` no positive number, or fn or its arguments cannot
            be sent.
        LaunchError: a rank raised, died, or did not come to a collective in time. Its cause is the exception itself,
            where that could be sent.

    >>> import fcp
    >>> def square():
    ...     import torch
    ...     return torch.distributed.get_rank() ** 2
    >>> fcp.launch(square, num_processes=2)
    [0, 1]
    """
    if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
        raise ValueError(f"launch: num_processes={num_processes!r} must be a number of processes, 1 or more")
    if not timeout > 0:
        raise ValueError(f"launch: timeout={timeout!r} must be a number of seconds, more than 0")
    try:
        payload = cloudpickle.dumps((fn, args))
    except Exception as error:  # of every kind: each object says in its own way that it cannot be sent
        raise ValueError(
            f"launch: the function or its arguments cannot be sent to another process ({error})"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="fcp_launch_"))
    try:
        (folder / "call").write_bytes(payload)
        about = {"timeout": timeout, "parent": os.getpid()}
        (folder / "about.json").write_text(json.dumps(about))
        ends = _run(folder, num_processes)
        kept = _keep_outputs(folder, log_dir, bool(ends))
        if ends:
            raise _error(folder, num_processes, kept, ends)
        return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(num_processes)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, num_processes: int) -> dict[int, str]:
    """Runs the processes to their end; how those ended that failed, by rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, errors
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        shutdown_timeout=15,
    )
    # What the caller can import, the processes can.
    set_there = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with _own_signals(), _environment(**set_there), _quiet():
        try:
            elastic_launch(config, sys.executable)("-c", START, str(folder))
        except errors.ChildFailedError as failed:
            return {rank: _how(each.exitcode) for rank, each in failed.failures.items()}
        except SignalException as told:
            if told.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(told.sigval)) from None
    return {}


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher takes the signals of the process while it runs; afterwards they are the caller's again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The launcher logs what the error says better."""
    loggers = [logging.getLogger(f"torch.distributed.elastic{name}") for name in ("", ".multiprocessing.api", ".agent")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _keep_outputs(folder: Path, log_dir: str | Path | None, failed: bool) -> Path | None:
    """Copies the ranks' outputs to where the caller finds them."""
    if log_dir is None and not failed:
        return None
    kept = Path(tempfile.mkdtemp(prefix="fcp_launch_failed_") if log_dir is None else log_dir)
    kept.mkdir(parents=True, exist_ok=True)
    for file in (*folder.glob("rank_*.out"), *folder.glob("rank_*.err")):
        shutil.copyfile(file, kept / file.name)
    return kept


def _error(folder: Path, num_processes: int, kept: Path | None, ends: dict[int, str]) -> LaunchError:
    """Whoever failed of itself; else who was killed, which the others' errors name, or else the launcher."""
    said: dict[int, dict[str, Any]] = {}
    for rank in range(num_processes):
        with contextlib.suppress(OSError, ValueError):
            said[rank] = json.loads((folder / f"error_{rank}.json").read_text())
    own = [rank for rank, each in said.items() if not each["of_another"]]
    rank = next(iter(sorted(own, key=lambda each: said[each]["time"]) or sorted(said)), -1)
    if rank < 0:  # nobody lived to tell; whom the launcher ended in turn got a SIGTERM
        rank = min(ends, key=lambda each: (ends[each].endswith("SIGTERM"), each))
        output = kept / f"rank_{rank}.err" if kept else None
        tail = output.read_text()[-2000:] if output and output.exists() else ""
        return LaunchError(f"launch: rank {rank} {ends[rank]}\n{tail}\nOutputs: {kept}", rank, kept)
    each = said[rank]
    text = f"launch: rank {rank} raised {each['what']}\n\n{each['trace']}\nOutputs: {kept}"
    if each["of_another"]:
        rank = each["blamed"]
        text = f"launch: {each['what']}\nOutputs: {kept}"
    error = LaunchError(text, rank, kept)
    with contextlib.suppress(Exception):
        error.__cause__ = pickle.loads(bytes.fromhex(each["error"]))
    return error


# --- in the process ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(timeout: float, backend: str | None = None) -> Iterator[None]:
    """torch.distributed for the processes of a launcher: started, watched, and taken down."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    watch_of()
    try:
        yield
    except RankError:  # the group is left as it is: what is stuck in it would keep this process
        raise
    except BaseException as error:
        known = explained(error)
        if known is not error:
            raise known from error
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def work(folder: Path) -> None:
    """What each process runs."""
    about = json.loads((folder / "about.json").read_text())
    _die_with(about["parent"])
    rank = int(os.environ["RANK"])
    last_words.append(partial(_tell, folder, rank))
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        with process_group(about["timeout"]):
            result = fn(*args)
        (folder / f"result_{rank}").write_bytes(cloudpickle.dumps(_on_cpu(result)))
    except BaseException as error:
        _tell(folder, rank, error)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an interpreter that ends waits for what is stuck in the group


def _tell(folder: Path, rank: int, error: BaseException) -> None:
    what = {
        "what": f"{type(error).__name__}: {error}",
        "trace": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "of_another": isinstance(error, RankError),
        "blamed": getattr(error, "rank", -1),
        "error": "",
    }
    with contextlib.suppress(Exception):
        what["error"] = cloudpickle.dumps(error).hex()
    (folder / f"error_{rank}.json").write_text(json.dumps(what))


def _on_cpu(result: Any) -> Any:
    return pytree.map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, result)


def _die_with(parent: int) -> None:
    """Ends this process when its caller's ends, however that ends."""
    with contextlib.suppress(Exception):  # Linux has it; elsewhere a caller that is killed leaves its processes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""Faults to put into a rank, and what the ranks were seen to do: for test_faults.py and the table of benchmarks."""

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import _collective, _process, _watch
from models import llama
from tests.toys import batch_of, tokens

KINDS, PLACES, PROCESSES = ("raise", "kill", "stall"), ("forward", "backward", "save", "checkpoint"), 4
"""A save gathers with fcp's collectives; a checkpoint is torch's, in which fcp has no part."""
FAULTS = tuple(itertools.product(KINDS, PLACES, (0, 2)))
TIMEOUT = 4.0


def fault(kind: str, folder: Path) -> None:
    """Does it, once, and writes down when."""
    (folder / "when").write_text(str(time.time()))
    if kind == "raise":
        raise MemoryError("no room for 7 tensors")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def failing(kind: str, place: str, rank: int, folder: Path) -> None:
    """`step`, with the time at which this rank knew of the failure written down, raised or told by its watch."""

    def note(error: BaseException) -> None:
        (folder / f"failed_{dist.get_rank()}").write_text(str(time.time()))

    _watch.last_words.append(note)
    try:
        step(kind, place, rank, folder)
    except BaseException as error:
        note(error)
        raise


def step(kind: str, place: str, rank: int, folder: Path) -> None:
    """A training step and a save on a mesh of 4, in which `rank` fails."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = llama.tiny()
    sharded = fcp.transform(model, mesh=mesh, cp=2, tp=2)
    shards = sharded.shard(model.init(seed=0))
    right, seen = _collective.on_processes, {"forward": 0, "backward": 0}

    def wrong(rules: Any, *more: Any) -> Any:
        here = "backward" if rules[0].backward else "forward"
        seen[here] += 1
        if place == here and seen[here] == 5 and dist.get_rank() == rank:
            fault(kind, folder)
        return right(rules, *more)

    _collective.on_processes = wrong
    fcp.value_and_grad(sharded.on_shards)(shards, batch_of(tokens(2, 8)))
    if place == "save" and dist.get_rank() == rank:
        fault(kind, folder)
    if place == "checkpoint":
        if dist.get_rank() == rank:
            fault(kind, folder)
        dist.checkpoint.save({"step": torch.ones(3)}, checkpoint_id=folder / "checkpoint")
    sharded.unshard(shards, to=0)
    sharded.on_shards(shards, batch_of(tokens(2, 8)))  # who had no part in the save goes on to the next step
    raise AssertionError("nothing failed")


@dataclass(frozen=True)
class Seen:
    """What became of a fault.

    Attributes:
        seconds: from the fault until every process had ended.
        others: until every other rank had said why it failed.
        raised: what the caller of `launch` was told, in one line.
        said: the last line of each other rank's standard error.
        left: processes of the launch that still run.
    """

    seconds: float
    others: float
    raised: str
    said: dict[int, str]
    left: list[int]


def inject(kind: str, place: str, rank: int, folder: Path) -> Seen:
    before = children()
    try:
        fcp.launch(failing, kind, place, rank, folder, num_processes=PROCESSES, timeout=TIMEOUT, log_dir=folder)
    except fcp.LaunchError as error:
        raised = str(error).splitlines()[0]
    else:
        raised = ""
    when = float((folder / "when").read_text())
    seconds = time.time() - when
    others = max(float((folder / f"failed_{o}").read_text()) for o in range(PROCESSES) if o != rank) - when
    said = {
        other: next((line for line in reversed(lines(folder, other)) if "rank" in line), "")
        for other in range(PROCESSES)
        if other != rank
    }
    return Seen(seconds, others, raised, said, sorted(children() - before))


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank_{rank}.err").read_text().splitlines()


def children() -> set[int]:
    """The processes that this one started and that still run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


def listening() -> int:
    """The sockets of this process that listen."""
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself was open while it was listed
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum(link in inodes for link in links)


# --- what the other tests launch --------------------------------------------------------------------------------------


def rank_and_ones(scale: float) -> tuple[int, torch.Tensor]:
    print(f"this is rank {dist.get_rank()}")
    return dist.get_rank(), scale * torch.ones(2)


def refused() -> list[tuple[str, float]]:
    """What each rank is told of sizes that do not fit, and the seconds until it is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = llama.tiny()
    sharded = fcp.transform(model, mesh=mesh, cp=2)
    other = fcp.transform(model, mesh=mesh, cp=2, logits=False)
    params, batch = model.init(seed=0), batch_of(tokens(2, 8))
    sharded.on_shards(sharded.shard(params), batch)
    odd = dist.get_rank() == 1
    calls = (
        lambda: fcp.transform(model, mesh=mesh, cp=2, tp=2),
        lambda: sharded(params, {"input_ids": batch["input_ids"], "labels": batch["labels"][:1]}),
        lambda: sharded.on_shards({"model": params["model"]}, batch),
        lambda: sharded(params, batch_of(tokens(2, 8, seed=int(odd)))),
        lambda: (other if odd else sharded)(params, batch),
    )
    told = []
    for call in calls:
        started = time.monotonic()
        try:
            call()
        except ValueError as error:
            told.append((str(error), time.monotonic() - started))
    return told


def averaging() -> str:
    """A backend whose sums are means."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    right = dist.all_reduce

    def mean(x: torch.Tensor, *more: Any) -> None:
        right(x, *more)
        x.div_(2)

    dist.all_reduce = mean
    try:
        fcp.distribute(lambda x: fcp.psum(x, "cp"), mesh)(torch.ones(3))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_memory() -> None:
    """A failure of rank 1's own, in the middle of a collective."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def wrong(*given: Any) -> None:
        raise torch.OutOfMemoryError("no room for 7 tensors")

    total = fcp.distribute(lambda x: fcp.psum(x, "cp"), mesh)
    total(torch.ones(3))
    if dist.get_rank() == 1:
        _process._one = wrong
    total(torch.ones(3))


def killed(*ranks: int) -> None:
    """Ranks that are killed while no other waits for them."""
    if dist.get_rank() in ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_elsewhere() -> None:
    """Rank 1 is killed, and the others cannot ask after its process: each believes to be on a machine of its own."""
    rank = dist.get_rank()
    _watch._host = lambda: f"machine {rank}"
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    total = fcp.distribute(lambda x: fcp.psum(x, "cp"), mesh)
    total(torch.ones(3))
    time.sleep(1)  # every watch has said where it is
    killed(1)
    total(torch.ones(3))


def told_to_stop_after_the_group() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    fcp.distribute(lambda x: fcp.psum(x, "cp"), mesh)(torch.ones(3))
    watch = _watch._watch
    assert watch is not None
    dist.barrier()
    dist.destroy_process_group()
    watch.thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def wait_for_ever(folder: Path) -> None:
    """Every rank but the first waits in a collective."""
    (folder / f"pid_{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        time.sleep(1000)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    fcp.distribute(lambda x: fcp.psum(x, "cp"), mesh)(torch.ones(3))

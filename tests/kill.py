"""The kill test: a training that is killed again and again, at random moments, and goes on from its checkpoints.

    nox -s kill -- --kills 30

Each run goes on from the newest checkpoint on the next mesh (one process, simulated ranks, two or four real ones),
saves every other step, by turns at once and beside the training, and is killed (SIGKILL) some time after its first
step: all of its processes, or one of them, whose fellows must end by themselves. After each kill the newest whole
checkpoint must not be older than before. The last run is let live. Its losses, from the first step on, and its weights
are compared with those of a training that nobody disturbed.

The processes are forked from one that has imported everything, so that a run is not longer in beginning than in going.
"""

import argparse
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import pytree
from fcp._launch import process_group
from tests.toys import batch_of, tokens, toy, worst_error

MESHES: list[tuple[dict[str, int], bool]] = [
    ({}, False),
    ({"fsdp": 2}, True),
    ({"cp": 2, "tp": 2}, False),
    ({"cp": 2}, True),
    ({"fsdp": 2, "cp": 2}, True),
    ({"tp": 2}, True),
    ({"dp": 2}, True),
    ({"cp": 2, "tp": 2}, True),
]
"""Sizes, and whether the ranks are processes."""
LONGEST = 1.2
"""Seconds from a run's first step to its kill, at most."""
MORE = 6
"""Steps of the run that is let live."""


# --- a run ------------------------------------------------------------------------------------------------------------


def train(sharded: fcp.Transformed, steps: int, folder: Path | None, begun: Any = None) -> tuple[Any, list[float]]:
    """The state after `steps` steps, and the loss of each, from the newest checkpoint in `folder` on."""
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-3), max_norm=1.0, donate=True)
    losses: list[float] = []
    if folder is not None and fcp.checkpoint.newest(folder) is not None:
        state, extra = fcp.checkpoint.load(folder, sharded)
        losses = extra["losses"]
    else:
        state = step.init(pytree.map(torch.clone, sharded.shard(toy()[1])))
    while len(losses) < steps:
        state, metrics = step(state, batch_of(tokens(2, 12, seed=len(losses))))  # the position in the data: len(losses)
        losses.append(float(metrics["loss"]))
        if begun is not None:
            begun.send(len(losses))
            begun = None
        if folder is not None and len(losses) % 2 == 0:
            beside = len(losses) % 4 == 0
            fcp.checkpoint.save(folder, sharded, state, extra={"losses": losses}, keep=3, asynchronous=beside)
    if folder is not None:
        fcp.checkpoint.save(folder, sharded, state, extra={"losses": losses}, keep=3)
    return state, losses


def work(sizes: dict[str, int], rank: int | None, steps: int, folder: Path, port: int, begun: Any) -> None:
    """What one process of a run does; `rank` None where it is alone."""
    log = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    settings: Any = sizes
    if rank is None:
        train(fcp.transform(toy()[0], **settings), steps, folder, begun)
        return
    world = torch.Size(sizes.values()).numel()
    about = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in about.items()})
    try:
        with process_group(60.0, "gloo"):
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            train(fcp.transform(toy()[0], mesh=mesh, **settings), steps, folder, begun if rank == 0 else None)
    except fcp.RankError:
        os._exit(3)  # what is stuck in the group would keep this process


@dataclass(frozen=True)
class Run:
    """The processes of a run, and the end of a pipe on which the first says that it has taken a step."""

    processes: list[Any]
    begun: Any

    @classmethod
    def start(cls, mesh: tuple[dict[str, int], bool], steps: int, folder: Path) -> "Run":
        sizes, real = mesh
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.kill", "fcp.checkpoint._shards"])
        here, there = context.Pipe(duplex=False)
        ranks = range(torch.Size(sizes.values()).numel()) if real else [None]
        processes = [context.Process(target=work, args=(sizes, rank, steps, folder, port, there)) for rank in ranks]
        for each in processes:
            each.start()
        there.close()
        return cls(processes, here)

    def wait_until_begun(self) -> None:
        try:
            if self.begun.poll(120):
                self.begun.recv()
                return
        except EOFError:
            pass
        self.kill(self.processes)
        raise RuntimeError("a run did not come to its first step")

    def kill(self, which: list[Any]) -> None:
        """Kills these; the others have to end by themselves."""
        for each in which:
            each.kill()
        self.join(60)
        left = [each for each in self.processes if each.is_alive()]
        for each in left:
            each.kill()
        if left:
            raise RuntimeError(f"{len(left)} processes went on after one of them was killed")

    def join(self, seconds: float) -> list[int | None]:
        end = time.monotonic() + seconds
        for each in self.processes:
            each.join(max(end - time.monotonic(), 0))
        return [each.exitcode for each in self.processes]


# --- the test ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """What a kill met: `before` and `after` are the newest checkpoint's step, None for none."""

    mesh: str
    killed: str
    seconds: float
    before: int | None
    after: int | None
    saving: bool

    @property
    def lost(self) -> bool:
        return self.before is not None and (self.after is None or self.after < self.before)


@dataclass(frozen=True)
class Outcome:
    """All kills, and how far the training that was killed ended from the one that was not (relative errors)."""

    kills: list[Kill]
    steps: int
    loss_error: float
    weight_error: float


def kill_test(kills: int, folder: Path, seed: int = 0) -> Outcome:
    """Runs the test in `folder`, which must be empty."""
    chance, found = random.Random(seed), []
    checkpoints = folder / "checkpoints"
    for index in range(kills):
        mesh = MESHES[index % len(MESHES)]
        before, lay = _newest(checkpoints), _half_done(checkpoints)
        run = Run.start(mesh, 10**6, checkpoints)
        run.wait_until_begun()
        seconds = chance.uniform(0, LONGEST)
        time.sleep(seconds)
        alone = len(run.processes) > 1 and chance.random() < 0.5
        run.kill([chance.choice(run.processes)] if alone else run.processes)
        saving = bool(_half_done(checkpoints) - lay)
        name = (" x ".join(f"{axis}={size}" for axis, size in mesh[0].items()) or "one") + (
            "" if mesh[1] else ", simulated"
        )
        found.append(Kill(name, "one" if alone else "all", seconds, before, _newest(checkpoints), saving))
    steps = (_newest(checkpoints) or 0) + MORE
    last = Run.start(MESHES[kills % len(MESHES)], steps, checkpoints)
    codes = last.join(300)
    if any(codes):
        raise RuntimeError(f"the last run ended with {codes}: {(folder / 'log').read_text()[-2000:]}")
    alone = fcp.transform(toy()[0])
    state, extra = fcp.checkpoint.load(checkpoints, alone)
    expected, losses = train(alone, steps, None)
    pairs = zip(losses, extra["losses"], strict=True)
    return Outcome(found, steps, max(abs(a - b) / abs(a) for a, b in pairs), worst_error(expected.params, state.params))


def _half_done(folder: Path) -> set[tuple[str, int]]:
    """What a save that was killed has left."""
    return {(path.name, path.stat().st_mtime_ns) for path in folder.glob("step-*") if path.suffix}


def _newest(folder: Path) -> int | None:
    path = fcp.checkpoint.newest(folder)
    return None if path is None else int(path.name.partition(".")[0].removeprefix("step-"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_test(args.kills, Path(folder), args.seed)
    print(f"{'kill':>4}  {'mesh':<24} {'killed':<7} {'after s':>7}  {'newest before':>13}  {'then':>5}  during a save")
    for index, each in enumerate(outcome.kills):
        before, after = ("none" if step is None else step for step in (each.before, each.after))
        during = "yes" if each.saving else ""
        print(
            f"{index + 1:>4}  {each.mesh:<24} {each.killed:<7} {each.seconds:>7.2f}  {before:>13}  {after:>5}  {during}"
        )
    lost, during = sum(each.lost for each in outcome.kills), sum(each.saving for each in outcome.kills)
    print(f"\n{len(outcome.kills)} kills, {during} of them during a save, {lost} checkpoints lost")
    print(f"after {outcome.steps} steps, against the undisturbed training, relative errors:")
    print(f"every loss {outcome.loss_error:.1e}, weights {outcome.weight_error:.1e}")
    return 1 if lost or outcome.loss_error > 1e-9 or outcome.weight_error > 1e-9 else 0


if __name__ == "__main__":
    sys.exit(main())

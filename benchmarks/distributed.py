"""What sharding over real processes costs: one training step, against transformers' own unsharded Llama.

The claims: two ranks with a thread each take hardly longer than one process with two threads, hold little more than
half its memory, and beat the libraries that do the same, where these are installed. The model is `simulate.py`'s,
float32, batch 1 (fsdp: batch 2).

Everybody's processes are alive together and take turns, one step at a time; a ratio is that of two steps of the same
turn, and what is printed is the median over the turns, and between which ratios half of them lie. Nobody is timed
before its loss and gradient norm are the unsharded ones. Memory is that of other processes, fresh ones whose glibc is
told to give freed blocks back (see measure.py), which makes them slow.

    python benchmarks/distributed.py [--runs 15] [--only "cp, 2,048"]
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import GIVE_BLOCKS_BACK
from rich.table import Table
from simulate import SIZES

from fcp.tables import show
from models import llama

HERE = Path(__file__).resolve().parent
RANKS = 2


@dataclass(frozen=True)
class Claim:
    """Who is compared at `seq` tokens and `rows` rows, and the most that `ours` may take of the unsharded's."""

    title: str
    ours: str
    peers: tuple[str, ...]
    rows: int
    seq: int
    time: float
    memory: float | None = None


ULYSSES = ("DeepSpeed Ulysses", "yunchang Ulysses")
CLAIMS = (
    Claim("cp, 2,048 tokens", "fcp cp 2", ULYSSES, 1, 2048, time=1.03),
    Claim("tp, 2,048 tokens", "fcp tp 2", ("transformers tp",), 1, 2048, time=1.15),
    Claim("fsdp, 2 rows of 2,048 tokens", "fcp fsdp 2", ("transformers fsdp",), 2, 2048, time=1.02),
    Claim("cp, 8,192 tokens", "fcp cp 2", ULYSSES, 1, 8192, time=0.92, memory=0.55),
    Claim("tp, 8,192 tokens", "fcp tp 2", ("transformers tp",), 1, 8192, time=1.02),
)


@dataclass(frozen=True)
class Measured:
    """One candidate: its peak in MB, and for every turn the seconds of its step (of the slower rank)."""

    name: str
    peak_mb: float
    seconds: list[float]


def measure(claim: Claim, folder: str, runs: int) -> tuple[list[Measured], list[str]]:
    """What was measured, the unsharded first and ours second; and the names of those that are not installed."""
    peaks: dict[str, float] = {}
    missing, expected = [], {}
    for name in ("unsharded", claim.ours, *claim.peers):
        with ranks_of(name, folder, claim.rows, claim.seq, GIVE_BLOCKS_BACK) as started:
            first = [answer(rank) for rank in started]
        if first[0].get("missing"):
            missing.append(name)
            continue
        expected = expected or first[0]
        for found in first:
            check(name, found, expected)
        peaks[name] = max(found["peak_mb"] for found in first)
    with contextlib.ExitStack() as stack:
        ranks = {name: stack.enter_context(ranks_of(name, folder, claim.rows, claim.seq, {})) for name in peaks}
        for each in ranks.values():
            for rank in each:
                answer(rank)
        seconds: dict[str, list[float]] = {name: [] for name in ranks}
        for _ in range(runs):
            for name, each in ranks.items():
                for rank in each:
                    rank.stdin.write("step\n")
                    rank.stdin.flush()
                seconds[name].append(max(answer(rank)["seconds"] for rank in each))
    return [Measured(name, peaks[name], seconds[name]) for name in ranks], missing


def answer(rank: Any) -> dict[str, float]:
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError(f"{rank.args} failed:\n{Path(rank.log).read_text()[-4000:]}")
    return json.loads(line)


def check(name: str, found: dict[str, float], expected: dict[str, float]) -> None:
    """Nobody is timed who computes something else: loss and gradient norm are the unsharded ones."""
    for what in ("loss", "norm"):
        if not abs(found[what] - expected[what]) <= 1e-4 * abs(expected[what]):
            raise RuntimeError(f"{name}: {what} {found[what]:.6f}, the unsharded has {expected[what]:.6f}")


@contextlib.contextmanager
def ranks_of(name: str, folder: str, rows: int, seq: int, variables: Mapping[str, str]) -> Iterator[list[Any]]:
    """The processes of one candidate, each waiting for a line; they end with the block."""
    count = 1 if name == "unsharded" else RANKS
    env = {**os.environ, **variables, "OMP_NUM_THREADS": str(RANKS // count), "PYTHONPATH": str(HERE.parent)}
    if count > 1:
        env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(HERE / "distributed_rank.py"), name, folder, str(rows), str(seq)]
    ranks: list[Any] = []
    try:
        for rank in range(count):
            mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else env
            log = Path(folder) / f"{name} {seq} {rank}.log"
            with log.open("w") as said:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
                ranks.append(subprocess.Popen(command, env=mine, text=True, **pipes))
            ranks[-1].log = log
        yield ranks
    finally:
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(20)
            rank.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def report(claim: Claim, measured: list[Measured], missing: list[str]) -> tuple[Table, list[str]]:
    """The table of a claim, and what of the claim does not hold."""
    table = Table(title=claim.title, title_justify="left")
    for column in ("", "ms", "/ unsharded", "half of the turns", "at most", "MB", "/ unsharded", "at most"):
        table.add_column(column, justify="right" if column else "left")
    base, ours = measured[0], measured[1]
    time = {each.name: ratios(each, base) for each in measured}
    memory = {each.name: each.peak_mb / base.peak_mb for each in measured}
    for each in measured:
        low, middle, high = time[each.name]
        table.add_row(
            each.name,
            f"{1000 * statistics.median(each.seconds):.0f}",
            f"{middle:.3f}",
            "" if each is base else f"{low:.3f} .. {high:.3f}",
            f"{claim.time:g}" if each is ours else "",
            f"{each.peak_mb:.0f}",
            f"{memory[each.name]:.2f}",
            f"{claim.memory:g}" if each is ours and claim.memory else "",
        )
    for name in missing:
        table.add_row(name, "", "not installed")
    mine, held = time[ours.name][1], memory[ours.name]
    wrong = [f"time above {claim.time:g}"] if mine > claim.time else []
    wrong += [f"memory above {claim.memory:g}"] if claim.memory and held > claim.memory else []
    wrong += [f"slower than {peer.name}" for peer in measured[2:] if mine >= time[peer.name][1]]
    wrong += [f"larger than {peer.name}" for peer in measured[2:] if held >= memory[peer.name]]
    return table, wrong


def ratios(each: Measured, base: Measured) -> tuple[float, float, float]:
    """The quartiles of time / unsharded, turn by turn."""
    found = [mine / other for mine, other in zip(each.seconds, base.seconds, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, middle, high


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=15, help="turns at 2,048 tokens; a third of them at 8,192")
    parser.add_argument("--only", default="", help="the claims whose title has this in it")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        config = llama.Config(**SIZES)
        llama.save(folder, config, llama.init(config))
        for claim in CLAIMS:
            if args.only in claim.title:
                runs = args.runs if claim.seq < 8192 else max(3, args.runs // 3)
                table, wrong = report(claim, *measure(claim, folder, runs))
                show(table)
                print(f"{claim.ours}: {'; '.join(wrong) or 'ok'}\n", flush=True)
                good &= not wrong
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

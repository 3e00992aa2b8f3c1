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

import torch
from measure import GIVE_BLOCKS_BACK
from rich.table import Table
from simulate import SIZES

import fcp
from fcp._order import LAYOUTS, multiple_of, order_of
from fcp.tables import show
from models import llama

HERE = Path(__file__).resolve().parent
RANKS = 2


@dataclass(frozen=True)
class Claim:
    """Who is compared at `seq` tokens and `rows` rows, and the most that `ours` may take of the unsharded's.

    Rows may hold several documents, and layers have a window; then all others, the unsharded too, have a dense mask.
    `faster` is how many times as fast as each peer `ours` is to be; `beside` are ours too, for comparison.
    """

    title: str
    ours: str
    peers: tuple[str, ...]
    rows: int
    seq: int
    time: float
    memory: float | None = None
    documents: int = 1
    window: int | None = None
    faster: float = 1.0
    beside: tuple[str, ...] = ()


ULYSSES = ("DeepSpeed Ulysses", "yunchang Ulysses")
WAYS = ("fcp cp 2, ring", "fcp cp 2, gather")
CLAIMS = (
    Claim("cp, 2,048 tokens", "fcp cp 2", ULYSSES, 1, 2048, time=1.03),
    Claim("tp, 2,048 tokens", "fcp tp 2", ("transformers tp",), 1, 2048, time=1.15),
    Claim("fsdp, 2 rows of 2,048 tokens", "fcp fsdp 2", ("transformers fsdp",), 2, 2048, time=1.02),
    Claim("cp, 8,192 tokens", "fcp cp 2", ULYSSES, 1, 8192, time=0.92, memory=0.55),
    Claim("tp, 8,192 tokens", "fcp tp 2", ("transformers tp",), 1, 8192, time=1.02),
    Claim("cp, 8,192 tokens of 16 documents", "fcp cp 2", ULYSSES, 1, 8192, 0.5, documents=16, faster=1.3, beside=WAYS),
    Claim("cp, 8,192 tokens, window 512", "fcp cp 2", ULYSSES, 1, 8192, 0.9, window=512, faster=1.5, beside=WAYS),
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
    for name in ("unsharded", claim.ours, *claim.beside, *claim.peers):
        with ranks_of(name, folder, claim, GIVE_BLOCKS_BACK) as started:
            first = [answer(rank) for rank in started]
        if first[0].get("missing"):
            missing.append(name)
            continue
        expected = expected or first[0]
        for found in first:
            check(name, found, expected)
        peaks[name] = max(found["peak_mb"] for found in first)
    with contextlib.ExitStack() as stack:
        ranks = {name: stack.enter_context(ranks_of(name, folder, claim, {})) for name in peaks}
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
def ranks_of(name: str, folder: str, claim: Claim, variables: Mapping[str, str]) -> Iterator[list[Any]]:
    """The processes of one candidate, each waiting for a line; they end with the block."""
    count = 1 if name == "unsharded" else RANKS
    env = {**os.environ, **variables, "OMP_NUM_THREADS": str(RANKS // count)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    if count > 1:
        env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    batch = (str(number) for number in (claim.rows, claim.seq, claim.documents))
    command = [sys.executable, str(HERE / "distributed_rank.py"), name, folder, *batch]
    ranks: list[Any] = []
    try:
        for rank in range(count):
            mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else env
            log = Path(folder) / f"{name} {claim.seq} {rank}.log"
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
    peers = [each for each in measured if each.name in claim.peers]
    wrong += [f"not {claim.faster:g} times {each.name}" for each in peers if mine * claim.faster >= time[each.name][1]]
    wrong += [f"larger than {each.name}" for each in peers if held >= memory[each.name]]
    return table, wrong


def ratios(each: Measured, base: Measured) -> tuple[float, float, float]:
    """The quartiles of time / unsharded, turn by turn."""
    found = [mine / other for mine, other in zip(each.seconds, base.seconds, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, middle, high


BALANCE = "balance, 37 uneven documents of 8,192 tokens at cp 8"


def balance() -> tuple[Table, bool]:
    """The (query, key) pairs of the busiest rank over the mean, in every order; nothing is timed."""
    generator, size, seq = torch.Generator().manual_seed(0), 8, 8192
    cuts = torch.randperm(seq - 1, generator=generator)[:36].sort().values + 1
    lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([seq]))
    mask = fcp.masks.describe(torch.cat([torch.arange(int(n)) for n in lengths])[None])
    pairs = torch.cat([torch.arange(1, int(n) + 1) for n in lengths])[None]
    table, worst = Table(title=BALANCE, title_justify="left"), 0.0
    for column in ("layout", "busiest / mean", "at most"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout in LAYOUTS:
        order = order_of(layout, mask, size, multiple_of(layout, seq, size) // size)
        work = (pairs if order is None else pairs.gather(1, order)).view(size, -1).sum(1).double()
        worst = float(work.max() / work.mean())
        table.add_row(layout, f"{worst:.3f}", "1.05" if layout == "balanced" else "")
    return table, worst <= 1.05


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=15, help="turns at 2,048 tokens; a third of them at 8,192")
    parser.add_argument("--only", default="", help="the claims whose title has this in it")
    args = parser.parse_args()
    good = True
    if args.only in BALANCE:
        table, good = balance()
        show(table)
    with tempfile.TemporaryDirectory() as scratch:
        for claim in CLAIMS:
            if args.only in claim.title:
                folder = tempfile.mkdtemp(dir=scratch)
                windows: dict[str, Any] = {"model_type": "mistral", "sliding_window": claim.window}
                config = llama.Config(**SIZES, **(windows if claim.window else {}))
                llama.save(folder, config, llama.init(config))
                runs = args.runs if claim.seq < 8192 else max(3, args.runs // 3)
                table, wrong = report(claim, *measure(claim, folder, runs))
                show(table)
                print(f"{claim.ours}: {'; '.join(wrong) or 'ok'}\n", flush=True)
                good &= not wrong
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

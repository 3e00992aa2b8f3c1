"""Real processes, started by torch's launcher on gloo: the same function as unsharded, the same trace as simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tolerances import FLOAT64

ROOT = Path(__file__).resolve().parents[2]


def launch(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` under torchrun, with the checkout importable and one thread a rank."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return subprocess.run(
        [*run, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False
    )


def work(processes: int, what: str, count: int, folder: Path) -> list[dict[str, Any]]:
    results = folder / "results.jsonl"
    done = launch(processes, str(ROOT / "tests" / "distributed" / "worker.py"), what, str(count), str(results))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in results.read_text().splitlines()]


def check(processes: int, what: str, count: int, folder: Path) -> None:
    lines = work(processes, what, count, folder)
    assert len(lines) >= max(count, 8)
    assert not [line for line in lines if not line["error"] < FLOAT64]
    assert not [line for line in lines if not line["same"]]


@pytest.mark.parametrize("processes", [2, 4])
def test_every_collective(processes: int, tmp_path: Path) -> None:
    """A process rule that lays out, scales or routes otherwise than the simulator's, forward or backward."""
    check(processes, "collectives", 0, tmp_path)


def test_the_check_notices(tmp_path: Path) -> None:
    """Mutant: a sum that leaves each rank with its own part, forward or in another collective's backward."""
    wrong = {line["name"] for line in work(2, "mutant", 0, tmp_path) if line["error"] > 1e-6}
    assert {"psum over a", "axis_index over a", "all_gather over a"} <= wrong
    assert "all_to_all over a" not in wrong


@pytest.mark.parametrize(("processes", "count"), [(2, 16), (4, 10)])
def test_grid_sample(processes: int, count: int, tmp_path: Path) -> None:
    """A transform that is right in one process and wrong between several; ranks that run other collectives."""
    check(processes, "grid", count, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 4])
def test_grid_all(processes: int, tmp_path: Path) -> None:
    """Every case of the grid whose mesh has this many ranks."""
    check(processes, "grid", -1, tmp_path)


@pytest.mark.parametrize(("processes", "count"), [(2, 8), (4, 10)])
def test_experts_sample(processes: int, count: int, tmp_path: Path) -> None:
    """Rows that come back to another token, counts that are swapped, a gradient that took the way there again."""
    check(processes, "experts", count, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_experts_all(processes: int, tmp_path: Path) -> None:
    """Every case of the grid of experts whose mesh has this many ranks."""
    check(processes, "experts", -1, tmp_path)


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    """A rank that reads another row, whose text attention would join to its neighbours'; shapes that hang."""
    lines = work(2, "disagreements", 0, tmp_path)
    assert len(lines) == 7
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


def test_command_line() -> None:
    """A check that says equal because it still simulates, or whose ranks all speak."""
    mesh = ("--cp", "2", "--packed", "--seq", "12", "--distributed")
    done = launch(2, "-m", "fcp", "check", "models.llama:tiny", *mesh)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("cp=2 on processes: ") == 1
    assert "equal within 1e-10" in done.stdout


def test_command_line_refuses_on_every_rank() -> None:
    """Ranks that wait for one which was refused."""
    done = launch(2, "-m", "fcp", "check", "models.llama:tiny", "--cp", "3", "--distributed")
    assert done.returncode != 0
    assert done.stderr.count("fcp: error: --distributed: {'cp': 3} is a mesh of 3 ranks") == 2

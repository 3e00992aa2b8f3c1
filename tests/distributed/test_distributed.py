"""Real processes, started by torch's launcher on gloo: the same function as unsharded, the same trace as simulated."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerances import FLOAT64

ROOT = Path(__file__).resolve().parents[2]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


SAMPLE, ALL = 3000, 4 * 3600
"""Seconds that a launch may take: of some cases, and of all there are, on two cores."""


def launch(
    processes: int, *command: str, device: str = "cpu", timeout: int = SAMPLE
) -> subprocess.CompletedProcess[str]:
    """Runs `command` under torchrun, with the checkout importable and one thread a rank."""
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(
            f"NCCL wants a GPU of its own for each of {processes} processes; {torch.cuda.device_count()} are here"
        )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FCP_TEST_DEVICE": device}
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return subprocess.run(
        [*run, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def work(processes: int, what: str, count: int, folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    results = folder / "results.jsonl"
    worker = str(ROOT / "tests" / "distributed" / "worker.py")
    limit = ALL if count < 0 else SAMPLE
    done = launch(processes, worker, what, str(count), str(results), device=device, timeout=limit)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in results.read_text().splitlines()]


def check(processes: int, what: str, count: int, folder: Path, device: str) -> None:
    lines = work(processes, what, count, folder, device)
    assert len(lines) >= max(count, 8)
    assert not [line for line in lines if not line["error"] < FLOAT64]
    assert not [line for line in lines if not line["same"]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_collective(processes: int, device: str, tmp_path: Path) -> None:
    """A process rule that lays out, scales or routes otherwise than the simulator's, forward or backward."""
    check(processes, "collectives", 0, tmp_path, device)


def test_the_check_notices(tmp_path: Path) -> None:
    """Mutant: a sum that leaves each rank with its own part, forward or in another collective's backward."""
    wrong = {line["name"] for line in work(2, "mutant", 0, tmp_path) if line["error"] > 1e-6}
    assert {"psum over a", "axis_index over a", "all_gather over a"} <= wrong
    assert "all_to_all over a" not in wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("processes", "count"), [(2, 16), (4, 10)])
def test_grid_sample(processes: int, count: int, device: str, tmp_path: Path) -> None:
    """A transform that is right in one process and wrong between several; ranks that run other collectives."""
    check(processes, "grid", count, tmp_path, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("processes", "count"), [(2, 12), (4, 12)])
def test_other_ways_sample(processes: int, count: int, device: str, tmp_path: Path) -> None:
    """Rings whose messages cross, schedules that differ between ranks, gradients that go home to another rank."""
    check(processes, "ways", count, tmp_path, device)


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_other_ways_all(processes: int, device: str, tmp_path: Path) -> None:
    """Every case of the other ways to attend whose mesh has this many ranks."""
    check(processes, "ways", -1, tmp_path, device)


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_grid_all(processes: int, device: str, tmp_path: Path) -> None:
    """Every case of the grid whose mesh has this many ranks."""
    check(processes, "grid", -1, tmp_path, device)


@pytest.mark.parametrize(("processes", "what", "count"), [(2, "shards", 8), (4, "shards", 19), (4, "checkpoints", 3)])
def test_shards(processes: int, what: str, count: int, tmp_path: Path) -> None:
    """A shard that holds another rank's rows, or more than its own; a gradient of a shard that misses a sum."""
    lines = work(processes, what, 0, tmp_path)
    assert len(lines) == count
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


def test_sums_in_a_wider_dtype(tmp_path: Path) -> None:
    """Gradients that are rounded at every rank they pass."""
    lines = work(4, "sums", 0, tmp_path)
    assert len(lines) == 4
    assert not [line for line in lines if not line["same"]]


def test_gathered_parameters_are_freed(tmp_path: Path) -> None:
    """Gathered layers that stay in memory until backward; a buffer that one layer frees and another still reads."""
    lines = work(2, "regathers", 0, tmp_path)
    assert len(lines) == 4
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


@pytest.mark.parametrize(("processes", "count"), [(2, 4), (4, 5)])
def test_own_rows(processes: int, count: int, tmp_path: Path) -> None:
    """A mean of the readers' means; a reader's short rows that scale its rope otherwise; a cp group fed two texts."""
    lines = work(processes, "rows", 0, tmp_path)
    assert len(lines) == count
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


@pytest.mark.parametrize(("processes", "count"), [(2, 12), (4, 18)])
def test_steps_of_own_rows(processes: int, count: int, tmp_path: Path) -> None:
    """Micro-batches divided by their reader's targets; readers that wait for each other in different collectives; a
    count of a reader's own, which scales its part of the loss."""
    lines = work(processes, "steps", 0, tmp_path)
    assert len(lines) == count
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


def test_saved_states_go_on_elsewhere(tmp_path: Path) -> None:
    """A moment that lies otherwise than its parameter; a copy written twice, or by nobody; a rank that waits for one
    whose disk is full."""
    lines = work(4, "saves", 0, tmp_path)
    assert len(lines) == 24
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("processes", "count"), [(2, 8), (4, 10)])
def test_experts_sample(processes: int, count: int, device: str, tmp_path: Path) -> None:
    """Rows that come back to another token, counts that are swapped, a gradient that took the way there again."""
    check(processes, "experts", count, tmp_path, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_experts_all(processes: int, device: str, tmp_path: Path) -> None:
    """Every case of the grid of experts whose mesh has this many ranks."""
    check(processes, "experts", -1, tmp_path, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("processes", "count"), [(2, 9), (4, 3)])
def test_less_memory(processes: int, count: int, device: str, tmp_path: Path) -> None:
    """A tile whose ranks wait for another tile's; a replay that runs a collective which other ranks do not."""
    lines = work(processes, "memory", 0, tmp_path, device)
    assert len(lines) == count
    assert not [line for line in lines if not line["error"] < FLOAT64 or not line["same"]]


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


def test_command_line_on_two_nodes() -> None:
    """Ranks that find each other on one machine only."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "two")
    run = (*run, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    check = ("-m", "fcp", "check", "models.llama:tiny", "--cp", "2", "--seq", "12", "--distributed")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen([*run, *check], env=env, cwd=ROOT, **pipes) for _ in range(2)]
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "".join(out for out, _ in said).count("cp=2 on processes: ") == 1


def test_command_line_refuses_on_every_rank() -> None:
    """Ranks that wait for one which was refused."""
    done = launch(2, "-m", "fcp", "check", "models.llama:tiny", "--cp", "3", "--distributed")
    assert done.returncode != 0
    assert done.stderr.count("fcp: error: --distributed: {'cp': 3} is a mesh of 3 ranks") == 2

"""Processes that fail, and those that wait for them; `launch`, which starts them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from tests.distributed import faults
from tests.distributed.faults import FAULTS, TIMEOUT, Seen, inject

ROOT = Path(__file__).resolve().parents[2]
QUICK = [("raise", "backward", 0), ("kill", "forward", 2), ("stall", "backward", 0), ("stall", "checkpoint", 2)]


def check(kind: str, rank: int, seen: Seen) -> None:
    """Every other rank named the one that failed and a collective, in time; nothing runs on."""
    what = {"raise": "raised MemoryError: no room for 7", "kill": "was killed or died", "stall": "did not come"}[kind]
    assert seen.seconds < 10 + (TIMEOUT if kind == "stall" else 0)
    assert kind != "stall" or seen.others < TIMEOUT + 2
    assert f"rank {rank}" in seen.raised
    for said in seen.said.values():
        assert f"rank {rank} {what}" in said
        assert " over 'cp'" in said or " over 'tp'" in said
    assert seen.left == []


@pytest.mark.parametrize(("kind", "place", "rank"), QUICK)
def test_a_fault_ends_every_rank(kind: str, place: str, rank: int, tmp_path: Path) -> None:
    """A rank that waits for one which is gone; an error that names an address and no rank."""
    check(kind, rank, inject(kind, place, rank, tmp_path))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "place", "rank"), FAULTS)
def test_every_fault(kind: str, place: str, rank: int, tmp_path: Path) -> None:
    """The whole table."""
    check(kind, rank, inject(kind, place, rank, tmp_path))


def test_results_come_back(tmp_path: Path, capfd: Any) -> None:
    """Results in the order of arrival; words that mix with the caller's; a function that has no name elsewhere."""
    scale = 3.0
    found = fcp.launch(lambda: faults.rank_and_ones(scale), num_processes=3, log_dir=tmp_path)
    assert [rank for rank, _ in found] == [0, 1, 2]
    assert all(torch.equal(x, torch.full((2,), 3.0)) for _, x in found)
    assert capfd.readouterr().out == ""
    assert [(tmp_path / f"rank_{rank}.out").read_text() for rank in range(3)] == [
        f"this is rank {r}\n" for r in range(3)
    ]


def test_the_remote_exception_is_the_cause() -> None:
    """A failure that says no more than that a process failed."""

    def divide() -> float:
        return 1 / torch.distributed.get_rank()

    with pytest.raises(fcp.LaunchError, match="rank 0 raised ZeroDivisionError: division by zero") as raised:
        fcp.launch(divide, num_processes=2)
    assert raised.value.rank == 0
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "in divide" in str(raised.value)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"num_processes": 0}, "num_processes=0 must be"),
        ({"num_processes": True}, "num_processes=True must be"),
        ({"num_processes": 2, "timeout": 0}, "timeout=0 must be"),
        ({"num_processes": 2, "timeout": float("nan")}, "timeout=nan must be"),
    ],
)
def test_refusals(keywords: dict[str, Any], words: str) -> None:
    """A launch of no process, which returns no result."""
    with pytest.raises(ValueError, match=words):
        fcp.launch(faults.refused, **keywords)


def test_what_cannot_be_sent_is_refused() -> None:
    """A failure in another process, in words of the pickle module."""
    generator = (x for x in range(3))
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        fcp.launch(lambda: next(generator), num_processes=2)


def test_callers_mistakes_are_told_to_all_alike_and_at_once() -> None:
    """Ranks of which one is refused and the others wait; a batch, a tree or a transform that differs."""
    first, second = fcp.launch(faults.refused, num_processes=2, timeout=20)
    words = ("the mesh has the dimensions", "labels", "is missing", "another batch", "another transform")
    assert [text for text, _ in first] == [text for text, _ in second]
    assert all(word in text for word, (text, _) in zip(words, first, strict=True))
    assert max(seconds for _, seconds in (*first, *second)) < 5  # one at most, on cores of their own


def test_a_backend_that_averages_is_stopped() -> None:
    """Mutant: sums that are means, of which no later check would say where they came from."""
    for said in fcp.launch(faults.averaging, num_processes=2):
        assert said.startswith("RuntimeError: psum on gloo of torch.float32 (cpu, 2 ranks): the backend gave")


def test_a_failure_of_its_own_is_no_lost_connection() -> None:
    """Memory that runs out inside of a collective, and is said to be a network's fault."""
    with pytest.raises(fcp.LaunchError, match="rank 1 raised OutOfMemoryError: no room for 7") as raised:
        fcp.launch(faults.no_memory, num_processes=2)
    assert raised.value.rank == 1


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
def test_a_death_that_nobody_saw_is_named(processes: int, rank: int) -> None:
    """A process killed by the system's lack of memory, while no other waits for it: an error without a rank."""
    with pytest.raises(fcp.LaunchError, match=f"launch: rank {rank} was killed by SIGKILL") as raised:
        fcp.launch(faults.killed, rank, num_processes=processes)
    assert raised.value.rank == rank


def test_a_death_on_another_machine_is_named() -> None:
    """A rank whose process cannot be looked at, so that whoever loses its connection first blames itself."""
    with pytest.raises(fcp.LaunchError, match="rank 1 was lost: its process gives no sign of life") as raised:
        fcp.launch(faults.killed_elsewhere, num_processes=3, timeout=30)
    assert raised.value.rank == 1


@pytest.mark.parametrize(("told", "status"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGKILL, "")])
def test_processes_do_not_outlive_their_caller(told: signal.Signals, status: str, tmp_path: Path) -> None:
    """Orphans that hold cores and ports after a Ctrl-C, or after their notebook was killed."""
    script = f"""
        import fcp
        from pathlib import Path
        from tests.distributed.faults import wait_for_ever
        fcp.launch(wait_for_ever, Path({str(tmp_path)!r}), num_processes=2)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    caller = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    marks = [tmp_path / f"pid_{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(mark.exists() and mark.read_text() for mark in marks) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    caller.send_signal(told)
    _, said = caller.communicate(timeout=20)
    assert status in said
    pids = [int(mark.read_text()) for mark in marks]
    until = time.monotonic() + 10
    while any(runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if runs(pid)]


def test_a_process_without_a_group_can_be_stopped() -> None:
    """A handler that outlives the watch which it works for: SIGTERM does nothing."""
    with pytest.raises(fcp.LaunchError, match="was killed by SIGTERM"):
        fcp.launch(faults.told_to_stop_after_the_group, num_processes=2)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.sweep
def test_a_hundred_launches_leave_nothing() -> None:
    """A port, a process or a file that each launch leaves behind."""
    fcp.launch(faults.rank_and_ones, 1.0, num_processes=2)
    before = (faults.children(), faults.listening(), len(os.listdir("/proc/self/fd")))
    for _ in range(100):
        assert [rank for rank, _ in fcp.launch(faults.rank_and_ones, 1.0, num_processes=2)] == [0, 1]
    after = (faults.children(), faults.listening(), len(os.listdir("/proc/self/fd")))
    assert after == before

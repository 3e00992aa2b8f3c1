"""How the benchmarks measure: paired timings in one process, peak memory in a fresh one.

The speed of a shared machine drifts, so two things are never timed one after the other: they take turns, and what is
printed is the median of the ratios turn by turn. Peak memory is the kernel's own high-water mark of resident memory
above what was there before the step, in a child process that does nothing else, with glibc told to give freed blocks
back (otherwise the mark shows what was once allocated, not what was held together).
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["GIVE_BLOCKS_BACK", "ROOT", "forget_peak", "peak_mb", "print_rows", "ratios", "report_peak", "status_kb"]

GIVE_BLOCKS_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def ratios(
    baseline: Callable[[], object], others: Mapping[str, Callable[[], object]], *, runs: int = 9
) -> dict[str, float]:
    """The median over `runs` turns of time(other) / time(baseline) in the same turn; a first turn is not counted."""
    found: dict[str, list[float]] = {name: [] for name in others}
    for turn in range(runs + 1):
        base = _seconds(baseline)
        for name, fn in others.items():
            ratio = _seconds(fn) / base
            if turn:
                found[name].append(ratio)
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def peak_mb(script: str, *args: str, runs: int = 3) -> float:
    """The median peak of `python script --peak args...`, each in a fresh process; the script calls `report_peak`."""
    env = {**os.environ, **GIVE_BLOCKS_BACK, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, "--peak", *args]
    return statistics.median(
        float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()[-1])
        for _ in range(runs)
    )


ROOT = Path(__file__).resolve().parent.parent


def report_peak(step: Callable[[], object]) -> None:
    """Runs `step` once to warm up and once more, and prints by how many MB resident memory rose at its highest."""
    step()
    before = status_kb("VmRSS")
    forget_peak()
    step()
    print((status_kb("VmHWM") - before) / 1024)


def forget_peak() -> None:
    """Begins the high-water mark of resident memory (VmHWM) anew."""
    Path("/proc/self/clear_refs").write_text("5")


def status_kb(key: str, process: int | str = "self") -> int:
    """A line of a process's /proc/.../status, as VmRSS or VmHWM, in kB."""
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(key + ":"))
    return int(line.split()[1])


def print_rows(title: str, rows: Sequence[tuple[str, float | None, float | None]]) -> bool:
    """Prints (what, measured ratio, the most it may be); None was not run. True if none is above its limit."""
    print(f"\n{title}")
    good = True
    for what, ratio, limit in rows:
        if ratio is None:
            print(f"  {what:<58} not run")
            continue
        verdict = "" if limit is None else f"  at most {limit:<5g} {'ok' if ratio <= limit else 'ABOVE'}"
        good &= limit is None or ratio <= limit
        print(f"  {what:<58} {ratio:6.2f}{verdict}")
    return good

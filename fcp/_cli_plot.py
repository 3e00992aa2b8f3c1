"""`fcp plot`: draws the curves of training logs.

    fcp plot run
    fcp plot run/log.jsonl other/log.jsonl --out curves.png

Three panels over one axis of steps: loss, norm of the gradients, tokens per second; a line a log. Steps that were
skipped, whose numbers are not finite, are gaps. It reads what `fcp train` writes while it runs, so a run can be looked
at before it has ended.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from fcp._run_log import read_log
from fcp.huggingface._checkpoint import extra

__all__ = ["add_plot"]

PANELS = (("loss", "loss"), ("norm", "gradient norm"), ("tokens_per_second", "tokens / s"))


def add_plot(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("plot", help="draw the curves of training logs", allow_abbrev=False)
    parser.set_defaults(run=_plot)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log.jsonl, or the folder of a run; several overlay")
    parser.add_argument("--out", metavar="PNG", help="the picture (curves.png beside the first log)")


def _plot(args: argparse.Namespace) -> int:
    runs = {log: read_log(log) for log in args.logs}
    empty = [log for log, records in runs.items() if not records]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no step is logged there yet")
    beside = Path(args.logs[0]).expanduser()
    out = Path(args.out).expanduser() if args.out else (beside if beside.is_dir() else beside.parent) / "curves.png"
    _figure(runs, out)
    print(f"{out}: {', '.join(f'{log}, {len(records)} steps' for log, records in runs.items())}")
    return 0


def _figure(runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    figure = extra("matplotlib.figure", of="notebook").Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for each, (key, label) in zip(axes, PANELS, strict=True):
        for log, records in runs.items():
            steps = [record["step"] for record in records]
            values = [math.nan if record.get(key) is None else record[key] for record in records]
            each.plot(steps, values, label=log, linewidth=1.2, marker="." if len(steps) < 60 else None)
        each.set_ylabel(label)
        each.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0)
    axes[2].set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    if len(runs) > 1:
        axes[0].legend()
    else:
        axes[0].set_title(next(iter(runs)))
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {out}: the picture cannot be written ({error})") from None

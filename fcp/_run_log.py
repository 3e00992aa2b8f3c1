"""What a training run leaves for its reader: a log of JSON lines, and TensorBoard's event files where asked for.

One line a step, written and flushed when the step is done, so that a run that is killed has lost nothing that it had
said but perhaps half of its last line. A run that is resumed at step n goes on behind the line of step n: the lines of
later steps, which it is about to compute again, are taken out, so that no step is there twice and curves do not double
back.

A number that is not finite has no JSON; it is written as null.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["NAME", "event_writer", "open_log", "read_log"]

NAME = "log.jsonl"


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log (a file, or the folder of a run), in the order of their steps.

    Raises:
        ValueError: there is none, or it has a line that is no record.
    """
    path = Path(path).expanduser()
    path = path / NAME if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: not readable as a log ({why})") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote this
            raise ValueError(f"{path}: line {number} is no record of a step; a log has a JSON object a line")
        found.append(record)
    return found


@contextlib.contextmanager
def open_log(folder: Path, step: int, *, tensorboard: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Opens the log of a run for the steps after `step`; gives a function that adds the record of one.

    Args:
        folder: that of the run; made if it is not there.
        step: the last step that has been done; 0 for a run that begins.
        tensorboard: write event files too, into the same folder.

    Raises:
        ValueError: tensorboard is asked for and not installed; the log that is there cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    kept = [record for record in read_log(path) if record["step"] <= step] if path.exists() else []
    partly = path.with_suffix(".partly")
    partly.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(partly, path)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "a", encoding="utf-8"))
        events: Any = None
        if tensorboard:  # what it has of later steps is hidden by its reader
            events = event_writer()(str(folder), purge_step=step + 1 if step else None)
            stack.callback(events.close)

        def write(record: Mapping[str, Any]) -> None:
            finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
            file.write(json.dumps(finite, allow_nan=False) + "\n")
            file.flush()
            if events is not None:
                for key, x in finite.items():
                    if key != "step" and x is not None:
                        events.add_scalar(key, x, record["step"])
                events.flush()

        yield write


def event_writer() -> Any:
    """torch's class that writes TensorBoard's event files.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard = true: TensorBoard is not installed; `pip install fcp[train]` brings it, or leave it out"
        ) from None
    return SummaryWriter

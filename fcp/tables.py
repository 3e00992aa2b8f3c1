"""Tables and pictures for the terminal and the notebook: the only file of fcp that imports rich.

    report_view     a comparison: loss, logits and the worst gradient leaves, and one line of judgement
    mask_picture    a mask, one cell a (query, key) pair, with the shard edges of context parallelism
    grid            rows of words
    steps           what a long piece of work is doing: a bar on a terminal, plain lines elsewhere
    training        the same of a training run
    render          any of these as plain text

Everything says what it says without colour too, since it is often piped into a file: a difference is written out, and
a document has a letter as well as a colour. In Jupyter the same objects display themselves.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group
from rich.jupyter import JupyterMixin
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fcp.masks import Mask, materialize

if TYPE_CHECKING:
    from fcp._compare import Report

__all__ = [
    "MaskPicture",
    "columns",
    "grid",
    "mask_picture",
    "mimebundle",
    "render",
    "report_line",
    "report_table",
    "report_view",
    "show",
    "steps",
    "training",
]

EVERY = 5.0
"""Seconds between two lines about a training run where there is no terminal."""


def render(renderable: Any, width: int = 100) -> str:
    """A rich renderable as plain text."""
    out = StringIO()
    # force_jupyter: a Console that finds itself in Jupyter displays what it is to print, whatever the file.
    Console(file=out, width=width, color_system=None, force_jupyter=False).print(renderable)
    return out.getvalue().rstrip("\n")


def show(renderable: Any, width: int | None = None) -> None:
    """Prints to standard output: in colour and as wide as the terminal, or plain and wide enough where it is none."""
    if width is None and columns() is None:
        width = 120
    one_line = isinstance(renderable, str | Text)
    Console(file=sys.stdout, width=width, highlight=False).print(renderable, markup=False, soft_wrap=one_line)


def columns() -> int | None:
    """The width of the terminal that standard output is, or that COLUMNS says; None where it is neither."""
    console = Console(file=sys.stdout)
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def mimebundle(renderable: Any) -> dict[str, str]:
    """What a notebook displays for a renderable."""

    class Shown(JupyterMixin):
        def __rich__(self) -> Any:
            return renderable

    shown: Any = Shown()
    html = shown._repr_mimebundle_((), ())["text/html"]
    return {"text/plain": render(renderable), "text/html": html}


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], Any]]:
    """Gives a function `step(what)`, a context manager around each of `total` pieces of work, shown on standard error.

    Between two steps nothing is drawn, so results can be printed there.
    """
    stream = sys.stderr
    console = Console(file=stream, highlight=False)
    done = 0

    @contextmanager
    def step(what: str) -> Iterator[None]:
        nonlocal done
        done += 1
        if not console.is_terminal:
            start = time.perf_counter()
            yield  # a step that fails prints nothing: what it raises is the one line there is
            print(f"fcp: [{done}/{total}] {what}: {time.perf_counter() - start:.1f} s", file=stream, flush=True)
            return
        columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as progress:
            progress.add_task(what, total=total, completed=done - 1)
            yield

    yield step


@contextmanager
def training(total: int, done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Gives a function that is called with the record of each step: `step`, `loss`, `norm`, `tokens_per_second`,
    `memory_mb`, and `skipped`. `done` of the `total` steps were done before.

    Shown on standard error: a bar with the time that is left on a terminal, elsewhere a line at the first step, the
    last, and every few seconds.
    """
    stream = sys.stderr
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        first, spoke = done + 1, 0.0

        def say(record: Mapping[str, Any]) -> None:
            nonlocal spoke
            now = time.monotonic()
            if record["step"] in (first, total) or now - spoke >= EVERY:
                print(f"fcp: [{record['step']}/{total}] {_figures(record)}", file=stream, flush=True)
                spoke = now

        yield say
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("", total=total, completed=done)

        def draw(record: Mapping[str, Any]) -> None:
            progress.update(task, completed=record["step"], description=_figures(record))

        yield draw


def _figures(record: Mapping[str, Any]) -> str:
    skipped = "; not finite, skipped" if record["skipped"] else ""
    return (
        f"loss {record['loss']:.4f}, norm {record['norm']:.3g}, {record['tokens_per_second']:,.0f} tokens/s, "
        f"{record['memory_mb']:,.0f} MB{skipped}"
    )


# --- comparisons ------------------------------------------------------------------------------------------------------


def grid(titles: list[str], rows: list[list[str]]) -> Table:
    """A plain table; the last column wraps."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=title != titles[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def report_view(report: "Report", leaves: int = 12) -> Group:
    """The table of a comparison and, below it, its line."""
    return Group(report_table(report, leaves), report_line(report))


def report_line(report: "Report", *, seconds: float | None = None, reference_seconds: float | None = None) -> Text:
    """One line: `equal` or `NOT EQUAL`, the tolerance, what is worst, and how long it took if that is given."""
    errors = [("loss", report.loss_error), ("logits", report.logits_error or 0.0)]
    errors += [(f"statistic {leaf.path}", leaf.error) for leaf in report.statistics]
    errors += [(f"grad {leaf.path}", leaf.error) for leaf in report.leaves]
    what, worst = max(errors, key=lambda pair: pair[1])
    if report.ok():
        line, style = f"equal within {report.tolerance:g}; worst {worst:.1e}", "bold green"
    else:
        differing = sum(error > report.tolerance for _, error in errors)
        line = f"NOT EQUAL within {report.tolerance:g}: {differing} of {len(errors)} differ; worst {worst:.1e}, {what}"
        style = "bold red"
    if seconds is not None:
        line += f"; {seconds:.1f} s"
        line += "" if reference_seconds is None else f" (reference {reference_seconds:.1f} s)"
    return Text(line, style=style)


def report_table(report: "Report", leaves: int = 12) -> Group:
    """The title, loss, logits and the worst gradient leaves of a comparison."""
    table = Table()
    table.add_column("what", overflow="fold")
    table.add_column("relative error", justify="right", no_wrap=True)
    notes: list[tuple[str, str, str, str | None]] = []

    def row(what: str, error: float | None, note: str = "") -> None:
        if error is None:
            notes.append((what, "-", "not compared", None))
            return
        differs = error > report.tolerance
        if differs and not note:
            note = "differs" if math.isfinite(error) else "another shape, or not finite"
        notes.append((what, f"{error:.1e}", note, "bold red" if differs else None))

    row(f"loss {report.loss:.6f} (reference {report.reference_loss:.6f})", report.loss_error)
    row("logits", report.logits_error)
    for leaf in report.statistics:
        row(f"statistic {leaf.path}", leaf.error, leaf.note)
    for leaf in report.leaves[:leaves]:
        row(f"grad {leaf.path}", leaf.error, leaf.note)
    with_notes = any(note for _, _, note, _ in notes)
    if with_notes:
        table.add_column("")
    for what, error, note, style in notes:
        table.add_row(*((what, error, note) if with_notes else (what, error)), style=style)
    hidden = len(report.leaves) - leaves
    above = [Text(report.title, style="italic")] if report.title else []
    below = [Text(f"and {hidden} more gradients, none worse", style="italic")] if hidden > 0 else []
    return Group(*above, table, *below)


# --- masks ------------------------------------------------------------------------------------------------------------

DOCUMENT_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def mask_picture(
    mask: Mask, *, window: int | None = None, chunk: int | None = None, ranks: int = 1, row: int = 0
) -> "MaskPicture":
    """Who may see whom in one row of a mask: `print` it with rich, or leave it as a notebook cell's last line.

    Args:
        mask: as `fcp.masks.describe` or `fcp.prepare(batch).mask` give it.
        window, chunk: as in `fcp.masks.materialize`.
        ranks: the size of a context-parallel axis: lines mark where its shards meet, and pairs are counted for each.
        row: the row of the batch.

    Raises:
        ValueError: window, chunk or ranks below 1, or no such row.
    """
    if ranks < 1:
        raise ValueError(f"mask_picture: ranks={ranks} must be 1 or more")
    if not 0 <= row < mask.positions.shape[0]:
        raise ValueError(f"mask_picture: row={row} of a batch of {mask.positions.shape[0]}")
    return MaskPicture(mask, window, chunk, ranks, row)


class MaskPicture(JupyterMixin):
    """The picture of one row of a mask; `pairs` is its count, `pairs_by_rank` the same by the rank of the query."""

    def __init__(self, mask: Mask, window: int | None, chunk: int | None, ranks: int, row: int) -> None:
        allowed = materialize(mask, window=window, chunk=chunk)
        seq = mask.seq
        if allowed is None:
            self.allowed = [[k <= q for k in range(seq)] for q in range(seq)]
        else:
            self.allowed = allowed[row, 0].tolist()
        self.seq, self.ranks, self.window, self.chunk = seq, ranks, window, chunk
        self.valid = [True] * seq if mask.valid is None else mask.valid[row].tolist()
        self.positions = mask.positions[row].tolist()
        ids = [0] * seq if mask.documents is None else mask.documents[row].tolist()
        # Padding makes documents of its own where its positions restart; those have no letter and are not counted.
        real = dict.fromkeys(document for document, valid in zip(ids, self.valid, strict=True) if valid)
        order = {document: index for index, document in enumerate(real)}
        self.documents = [order.get(document, 0) for document in ids]

    @property
    def seq_local(self) -> int:
        """The tokens of a full shard; the last ranks hold fewer where the ranks do not divide the row."""
        return -(-self.seq // self.ranks)

    @property
    def pairs(self) -> int:
        return sum(map(sum, self.allowed))

    @property
    def pairs_by_rank(self) -> list[int]:
        step = self.seq_local
        return [sum(map(sum, self.allowed[r * step : (r + 1) * step])) for r in range(self.ranks)]

    def width(self, cell: int = 1) -> int:
        """The columns that the picture takes with `cell` characters a key."""
        return self._margin + cell * self.seq + len(self._edges) + (cell > 1)

    def __str__(self) -> str:
        return render(self, max(self.width(2), *map(len, self.caption.split("\n"))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        cell = next((n for n in (2, 1) if self.width(n) <= options.max_width), None)
        if cell is None:
            yield Text(f"a row of {self.seq} tokens needs {self.width()} columns; here are {options.max_width}")
            return
        full, none, bar, dash, cross = "#.|-+" if options.ascii_only else "█·│─┼"
        plain = console.color_system is None
        for line in self._header(cell, bar):
            yield line
        for q in range(self.seq):
            if q in self._edges:
                rule = cross.join(dash * (cell * n) for n in self._runs)
                yield Text(" " * self._margin + rule, style="bold", no_wrap=True)
            line = Text(no_wrap=True)
            line.append(f"{self._label(q):>{self._margin - 1}} ", style=self._style(q))
            for k in range(self.seq):
                if k in self._edges:
                    line.append(bar, style="bold")
                if not self.allowed[q][k]:
                    line.append(f"{none:>{cell}}", style="dim")
                elif plain:
                    line.append(f"{full:>{cell}}")
                else:
                    line.append(full * cell, style=self._style(k))
            yield line
        for part in self.caption.split("\n"):
            yield Text(part, style="italic")

    @property
    def caption(self) -> str:
        parts = [f"{self.pairs} of {self.seq * self.seq} pairs"]
        if max(self.documents):
            parts.append(f"{max(self.documents) + 1} documents")
        parts += [f"{name} {n}" for name, n in (("window", self.window), ("chunk", self.chunk)) if n is not None]
        if not all(self.valid):
            parts.append(f"{self.valid.count(False)} of {self.seq} tokens are padding (-)")
        caption = "; ".join(parts)
        if self.ranks > 1:
            caption += f"\ncp={self.ranks}: pairs by the rank of the query: {' + '.join(map(str, self.pairs_by_rank))}"
        return caption

    def _header(self, cell: int, bar: str) -> Iterator[Text]:
        """The keys' labels, read from top to bottom."""
        labels = [self._label(k) for k in range(self.seq)]
        height = max(map(len, labels))
        for level in range(height):
            what = "q \\ k" if level == height - 1 and self._margin > 6 else ""
            line = Text(f"{what:>{self._margin - 1}} ", no_wrap=True)
            for k, label in enumerate(labels):
                if k in self._edges:
                    line.append(bar, style="bold")
                line.append(f"{label.rjust(height)[level]:>{cell}}", style=self._style(k))
            yield line

    def _label(self, index: int) -> str:
        """The document's letter, where there is more than one document, and the position."""
        if not self.valid[index]:
            return "-"
        letter = LETTERS[self.documents[index] % len(LETTERS)] if max(self.documents) else ""
        return f"{letter}{self.positions[index]}"

    def _style(self, index: int) -> str:
        return DOCUMENT_COLORS[self.documents[index] % len(DOCUMENT_COLORS)] if self.valid[index] else "dim"

    @property
    def _margin(self) -> int:
        return max(len(self._label(q)) for q in range(self.seq)) + 1

    @property
    def _edges(self) -> list[int]:
        """The tokens that begin a shard, the first one's aside."""
        return list(range(self.seq_local, self.seq, self.seq_local)) if self.ranks > 1 else []

    @property
    def _runs(self) -> list[int]:
        marks = [0, *self._edges, self.seq]
        return [b - a for a, b in pairwise(marks)]

"""Tables and pictures for the terminal: the only file of fcp that imports rich."""

from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fcp._compare import Report

__all__ = ["render", "report_table"]


def render(renderable: Any, width: int = 100) -> str:
    """A rich renderable as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue().rstrip("\n")


def report_table(report: "Report", leaves: int = 12) -> Table:
    """Loss, logits and the worst gradient leaves of a comparison."""
    table = Table(title=report.title or None, title_justify="left", caption_justify="left")
    table.add_column("what")
    table.add_column("relative error", justify="right")
    table.add_column("")

    def row(what: str, error: float | None, note: str = "") -> None:
        if error is None:
            table.add_row(what, "-", "not compared")
            return
        good = error <= report.tolerance
        table.add_row(what, f"{error:.1e}", note or ("" if good else "differs"), style=None if good else "bold red")

    row(f"loss {report.loss:.6f} (reference {report.reference_loss:.6f})", report.loss_error)
    row("logits", report.logits_error)
    for leaf in report.leaves[:leaves]:
        row(f"grad {leaf.path}", leaf.error, leaf.note)
    hidden = len(report.leaves) - leaves
    verdict = "equal" if report.ok() else "NOT EQUAL"
    more = f"; {hidden} more gradients, none worse" if hidden > 0 else ""
    table.caption = f"{verdict} within {report.tolerance:g}{more}"
    return table

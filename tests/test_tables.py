"""What is drawn: a mask's picture against the mask itself, a report's table against its numbers."""

import math
import re

import pytest
import torch
from rich.console import Console

import fcp
from fcp import _compare, tables
from fcp.masks import count_pairs, describe, materialize
from tests.toys import PACK8

PACKED = describe(torch.tensor(PACK8))


def found(*errors, tolerance=1e-10, logits_error=0.0, loss_error=0.0):
    leaves = tuple(_compare.LeafError(f"leaf.{i}", error, 1.0) for i, error in enumerate(errors))
    return fcp.Report(1.0, 1.0, loss_error, logits_error, leaves, tolerance, "a title")


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_report_reads_without_color():
    """A difference shown by colour alone, which a file does not keep."""
    lines = str(found(0.5, 1e-12)).splitlines()
    assert lines[0] == "a title"
    assert [line for line in lines if "grad leaf.0" in line and "5.0e-01" in line and "differs" in line]
    assert not [line for line in lines if "grad leaf.1" in line and "differs" in line]
    assert lines[-1] == "NOT EQUAL within 1e-10: 1 of 4 differ; worst 5.0e-01, grad leaf.0"


def test_a_report_of_equals_ends_with_equal():
    """A verdict that is missing, or that counts what is not shown as different."""
    lines = str(found(*[1e-12] * 20)).splitlines()
    assert lines[-1] == "equal within 1e-10; worst 1.0e-12"
    assert lines[-2] == "and 8 more gradients, none worse"
    assert sum("grad leaf" in line for line in lines) == 12


@pytest.mark.parametrize(
    ("report", "worst"),
    [
        (found(1e-3, loss_error=0.1), "worst 1.0e-01, loss"),
        (found(1e-3, logits_error=math.inf), "worst inf, logits"),
        (found(math.inf, logits_error=None), "worst inf, grad leaf.0"),
    ],
)
def test_the_line_names_what_is_worst(report, worst):
    """A summary that looks at the gradients alone."""
    assert tables.report_line(report).plain.endswith(worst)


def test_the_line_may_say_how_long_it_took():
    """Seconds of the reference given as those of the sharded function."""
    line = tables.report_line(found(0.0), seconds=2.0, reference_seconds=1.0)
    assert line.plain == "equal within 1e-10; worst 0.0e+00; 2.0 s (reference 1.0 s)"


def test_no_line_is_wider_than_the_console():
    """A long leaf name that pushes the error out of the terminal, or is cut short."""
    path = "model.layers.29." + "very_long_name." * 6 + "weight"
    report = fcp.Report(1.0, 1.0, 0.0, 0.0, (_compare.LeafError(path, 0.5, 1.0),), 1e-10)
    text = tables.render(tables.report_table(report), 60)
    assert max(map(len, text.splitlines())) <= 60
    rows = [line.strip("│ ").split("│")[0].strip() for line in text.splitlines() if "│" in line]
    assert f"grad {path}" in "".join(rows).replace("grad", "grad ").replace("grad  ", "grad ")
    assert "5.0e-01" in text


# --- masks ------------------------------------------------------------------------------------------------------------


def cells(text):
    """The picture's rows as booleans, its margins and shard edges taken away."""
    rows = [re.sub("[^█·]", "", line) for line in text.splitlines()]
    return [[mark == "█" for mark in row] for row in rows if row]


MASKS = {
    "causal": (describe(torch.arange(6)), {}),
    "window": (describe(torch.arange(6)), {"window": 3}),
    "packed": (PACKED, {}),
    "packed, window": (PACKED, {"window": 3}),
    "chunk": (describe(torch.arange(7)), {"chunk": 3}),
    "left padding": (describe(torch.arange(-2, 4), valid=torch.arange(6) > 1), {}),
    "right padding": (describe(torch.arange(6), valid=torch.arange(6) < 4), {}),
    "documents that come back": (describe(torch.arange(6), documents=torch.tensor([0, 0, 1, 1, 0, 0])), {}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_the_picture_is_the_mask(name, ranks):
    """Rows for columns, a window off by one, a plain causal mask (which materialises to None) drawn as full."""
    mask, how = MASKS[name]
    picture = tables.mask_picture(mask, ranks=ranks, **how)
    allowed = materialize(mask, **how)
    if allowed is None:
        allowed = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    assert cells(str(picture)) == allowed[0, 0].tolist()
    assert picture.pairs == count_pairs(mask, **how)
    assert f"{picture.pairs} of {mask.seq**2} pairs" in str(picture)
    assert sum(picture.pairs_by_rank) == picture.pairs
    assert len(picture.pairs_by_rank) == ranks


@pytest.mark.parametrize(("name", "pairs"), [("window", 15), ("packed", 21), ("packed, window", 18)])
def test_pair_counts(name, pairs):
    """The counts every mask of the project is pinned to (18 for the window is the off-by-one)."""
    mask, how = MASKS[name]
    assert tables.mask_picture(mask, **how).pairs == pairs


def test_shard_edges_lie_where_the_shards_do():
    """Edges of equal parts of the row, where shard_seq pads it and gives the last ranks fewer tokens."""
    picture = tables.mask_picture(describe(torch.arange(7)), ranks=3)
    assert picture.pairs_by_rank == [1 + 2 + 3, 4 + 5 + 6, 7]
    lines = str(picture).splitlines()
    assert lines[0].rstrip() == "   0 1 2│ 3 4 5│ 6"
    rules = [i for i, line in enumerate(lines) if "┼" in line]
    assert rules == [4, 8]
    assert len({len(lines[i]) for i in (2, *rules)}) == 1
    assert [i for i, mark in enumerate(lines[4]) if mark == "┼"] == [
        i for i, mark in enumerate(lines[5]) if mark == "│"
    ]
    assert lines[-1] == "cp=3: pairs by the rank of the query: 6 + 15 + 7"


def test_ranks_without_tokens_have_no_edge():
    """An edge beyond the row: 5 tokens over 4 ranks are 2, 2, 1 and none."""
    picture = tables.mask_picture(describe(torch.arange(5)), ranks=4)
    assert picture.pairs_by_rank == [3, 7, 5, 0]
    assert str(picture).splitlines()[0].count("│") == 2


def test_margins_show_positions_documents_and_padding():
    """Row numbers in the place of position ids; padding that counts as a document."""
    mask = fcp.prepare(
        {
            "input_ids": torch.zeros(1, 7, dtype=torch.int64),
            "position_ids": torch.tensor([[0, 5, 6, 0, 1, 2, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0]]),
        }
    ).mask
    lines = str(tables.mask_picture(mask)).splitlines()
    assert [line.split()[0] for line in lines[2:9]] == ["-", "a5", "a6", "b0", "b1", "b2", "-"]
    assert lines[0].split() == ["a", "a", "b", "b", "b"]
    assert lines[1].split() == ["-", "5", "6", "0", "1", "2", "-"]
    assert lines[-1] == "9 of 49 pairs; 2 documents; 2 of 7 tokens are padding (-)"


def test_positions_of_two_digits_read_downwards():
    """Positions that run into one another, 9101112."""
    lines = str(tables.mask_picture(describe(torch.arange(9, 12)))).splitlines()
    assert lines[:2] == ["      1 1", "    9 0 1"]


def test_another_row_of_the_batch():
    """The first row drawn whatever was asked for."""
    mask = describe(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))
    assert [tables.mask_picture(mask, row=row).pairs for row in (0, 1)] == [10, 6]


def drawn(picture, width, **options):
    console = Console(width=width, force_terminal=True, record=True, file=open("/dev/null", "w"), **options)  # noqa: SIM115
    with console.file:
        console.print(picture)
    return console


def test_documents_differ_in_color():
    """Keys of two documents in one colour."""
    console = drawn(tables.mask_picture(PACKED), 80, color_system="standard")
    styles = {match[1] for match in re.finditer(r"\x1b\[(\d+)m██", console.export_text(styles=True))}
    assert len(styles) == 2


@pytest.mark.parametrize(
    ("width", "second"),
    [(80, "a1  █ █ · ·│ · · · ·"), (21, "a1  █ █ · ·│ · · · ·"), (20, "a1 ██··│····"), (12, "a1 ██··│····")],
)
def test_the_picture_narrows_to_fit(width, second):
    """A picture that wraps in a narrow terminal."""
    lines = tables.render(tables.mask_picture(PACKED, ranks=2), width).splitlines()
    assert lines[3].rstrip() == second
    drawn_rows = [line for line in lines if re.match(r"[ab]\d ", line)]
    assert cells("\n".join(drawn_rows)) == materialize(PACKED)[0, 0].tolist()


def test_too_narrow_says_so():
    """A picture that is cut off and looks whole."""
    assert "needs 12 columns; here are 11" in " ".join(tables.render(tables.mask_picture(PACKED, ranks=2), 11).split())


@pytest.mark.parametrize("how", [{"ranks": 0}, {"row": 1}, {"row": -1}, {"window": 0}, {"chunk": 0}])
def test_refusals(how):
    """A picture of nothing in the place of an error."""
    with pytest.raises(ValueError, match=f"{next(iter(how))}="):
        tables.mask_picture(PACKED, **how)


def test_a_picture_displays_itself_in_a_notebook():
    """A cell whose last line is a picture shows an address."""
    shown = tables.mask_picture(PACKED)._repr_mimebundle_((), ())
    assert "21 of 64 pairs" in shown["text/html"]
    assert shown["text/html"].count("█") >= 21


def test_a_table_in_jupyter_is_text_where_text_is_asked_for(monkeypatch):
    """A report that a notebook shows twice: rich displays what it was asked to render, and the text is left empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: pytest.fail("displayed"))
    assert "grad leaf.0" in tables.render(found(0.5).__rich__())


# --- progress ---------------------------------------------------------------------------------------------------------


def test_steps_are_plain_lines_where_there_is_no_terminal(capsys):
    """Progress on standard output, among the results, or control characters in a log."""
    with tables.steps(2) as step:
        with step("one"):
            print("between")
        with step("two"):
            pass
    out, err = capsys.readouterr()
    assert out == "between\n"
    assert re.fullmatch(r"fcp: \[1/2\] one: \d+\.\d s\nfcp: \[2/2\] two: \d+\.\d s\n", err)


def test_steps_are_a_bar_on_a_terminal(capsys, monkeypatch):
    """A bar that captures what is printed on standard output meanwhile."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with tables.steps(2) as step, step("one"):
        print("between")
    out, err = capsys.readouterr()
    assert out == "between\n"
    assert "one" in err
    assert "\x1b[" in err


RECORD = {"loss": 2.5, "norm": 1.25, "tokens_per_second": 1234.5, "memory_mb": 512.0, "skipped": False}


def test_training_is_a_line_now_and_then_where_there_is_no_terminal(capsys):
    """A line a step, which buries a log of a million steps; the last one left out."""
    with tables.training(9, 2) as show:
        for step in range(3, 10):
            show({**RECORD, "step": step, "skipped": step == 9})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fcp: [3/9] loss 2.5000, norm 1.25, 1,234 tokens/s, 512 MB",
        "fcp: [9/9] loss 2.5000, norm 1.25, 1,234 tokens/s, 512 MB; not finite, skipped",
    ]


def test_training_is_a_bar_on_a_terminal(capsys, monkeypatch):
    """A bar that begins at zero when a run is resumed."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with tables.training(9, 2) as show:
        show({**RECORD, "step": 3})
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/9" in err and "1,234 tokens/s" in err and "\x1b[" in err

"""SUPPORT.md and `fcp models`: what a report becomes, and that nobody edited it."""

import json
from pathlib import Path

import pytest

from fcp.cli import main
from fcp.testing import ContextParallelTesterMixin
from fcp.testing._support import COLUMNS, counts, from_report, markdown, read

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted({test for tests in COLUMNS.values() for test in tests})


def report(folder: Path, **cases: dict[str, str]) -> Path:
    """A report in which every test passed but for those of `cases`, {type: {test: "" (a failure), or why skipped}}."""
    lines = []
    for name, said in cases.items():
        for test in ALL:
            inner = "" if test not in said else f'<skipped message="{said[test]}"/>' if said[test] else "<failure/>"
            lines.append(f'<testcase classname="tests.huggingface.x.Test_{name}" name="{test}">{inner}</testcase>')
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    return path


def test_a_cell_is_proven_only_if_every_test_behind_it_passed(tmp_path: Path) -> None:
    support = from_report(
        report(
            tmp_path,
            good={},
            eager={"test_function_is_module_sdpa": "not constructible: no sdpa"},
            bad={"test_cp_packed": ""},
            refused=dict.fromkeys(
                {t for ts in COLUMNS.values() for t in ts}, "refused: functional: it &lt;mixes&gt; | so"
            ),
            elsewhere={"test_cp_derivative_on_each_rank": "on processes: it branches"},
        )
    )
    cells = support["types"]
    assert set(cells["good"].values()) == set(cells["eager"].values()) == {"proven"}
    assert cells["bad"]["packed"] == "wrong" and cells["bad"]["cp"] == "proven"
    assert cells["elsewhere"]["cp"] == "proven on processes"
    assert counts(support)["cp"] == 4 and counts(support)["refused"] == 1 and counts(support)["wrong"] == 1
    page = markdown(support)
    assert "| `elsewhere` | p | x |" in page
    assert "| `refused` | it &lt;mixes> \\| so |" in page
    assert "## Wrong" in page and "3 are proven under cp, on plain and on packed rows" in page


def test_a_test_that_did_not_run_proves_nothing(tmp_path: Path) -> None:
    path = report(tmp_path, half={})
    path.write_text(path.read_text().replace('name="test_fsdp"', 'name="test_other"'))
    assert from_report(path)["types"]["half"]["fsdp"] == "not run"


def test_every_test_behind_a_column_is_there() -> None:
    assert all(hasattr(ContextParallelTesterMixin, test) for tests in COLUMNS.values() for test in tests)


def test_the_page_is_what_the_sweep_found() -> None:
    """A row that somebody mended by hand, and a type that is silently wrong."""
    assert (ROOT / "SUPPORT.md").read_text() == markdown(read())
    assert counts(read())["wrong"] == 0
    assert all(said != "not run" for cells in read()["types"].values() for said in cells.values())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama", "mamba"]) == 0
    shown = capsys.readouterr().out
    assert "carry a state along the sequence" in " ".join(shown.split()) and "transformers 5" in shown
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read()
    assert main(["models", "lama"]) == 2
    assert "lama: no causal language model type" in capsys.readouterr().err

"""The public API explains itself: shapes, errors, and examples that run."""

import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fcp
from fcp import pytree

FUNCTIONS = [
    name
    for name in fcp.__all__
    if callable(getattr(fcp, name)) and inspect.isfunction(inspect.unwrap(getattr(fcp, name)))
]
README = Path(__file__).resolve().parent.parent / "README.md"
DOCS = README.parent / "docs"
NOTEBOOKS = sorted((README.parent / "notebooks").glob("*.ipynb"))
MODULES = [
    "fcp",
    *(f"fcp.{name}" for name in ("pytree", "collectives", "masks", "kernels", "data._documents", "data._rows")),
    *(f"fcp.{name}" for name in ("_simulate", "_transform", "_compare", "_attention", "_launch", "checkpoint._save")),
]


@pytest.mark.parametrize("name", fcp.__all__)
def test_everything_public_has_a_docstring(name: str) -> None:
    """A public name that only its author can use."""
    value = getattr(fcp, name)
    if callable(value) or isinstance(value, ModuleType):
        assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_raise(name: str) -> None:
    """Errors that a caller meets for the first time at night."""
    doc = inspect.getdoc(getattr(fcp, name)) or ""
    quiet = {"record", "relative_error", "rematerialize", "linear", "rms_norm"}  # these raise nothing of their own
    assert name in quiet or "Raises:" in doc, name


@pytest.mark.parametrize(
    "name", ["shard", "unshard", "pvary", "psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]
)
def test_collectives_give_a_diagram_and_their_adjoint(name: str) -> None:
    """A collective whose backward has to be guessed."""
    doc = inspect.getdoc(getattr(fcp, name)) or ""
    assert "Adjoint:" in doc and "rank 2" in doc


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    """An example in a docstring that is no longer true."""
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_examples_are_found() -> None:
    """Mutant: an import hook or decorator that hides the docstrings, so that no example runs and none fails."""
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) > 10


def test_the_code_of_the_readme_runs() -> None:
    """A first example that its reader cannot run."""
    blocks = README.read_text().split("```python\n")[1:]
    scope: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook: what it defines is sent by value
    for block in blocks:
        exec(block.split("```")[0], scope)
    assert len(blocks) == 3
    whole = scope["model"](scope["params"], scope["batch"]).loss
    assert fcp.relative_error(whole, scope["loss"]) < 1e-10
    assert pytree.paths(scope["grads"]) == pytree.paths(scope["params"])


def test_the_tree_of_the_readme_is_the_tree() -> None:
    """A map that lacks a room, or shows one that is gone."""
    tree = README.read_text().split("```text\n")[1].split("```")[0]
    shown = set(re.findall(r"\b\w+\.py\b", tree)) - {"grid.py"}
    there = {path.name for path in (README.parent / "fcp").glob("*.py")} - {"__main__.py"}
    families = {path.name for path in (README.parent / "models").glob("[a-z]*.py")}
    assert shown == there | families


# --- the site ---------------------------------------------------------------------------------------------------------


def _from_docs(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


def test_every_public_name_is_on_one_page_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is exported and that nobody finds in the reference."""
    api = _from_docs("_api", monkeypatch)
    shown = [name for names in api.pages().values() for name in names]
    assert len(shown) == len(set(shown))
    modules = {name for name in fcp.__all__ if isinstance(getattr(fcp, name), ModuleType)}
    assert {f"fcp.{name}" for name in set(fcp.__all__) - modules} <= set(shown)
    assert {f"fcp.{name}" for name in modules} <= set(api.pages())


def test_a_public_name_without_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a page that is taken away, whose names are then silently on none."""
    api = _from_docs("_api", monkeypatch)
    monkeypatch.delitem(api.PAGES, "Training")
    with pytest.raises(ValueError, match=r"fcp\..* is of fcp._(optimizer|train_step), which is on no page"):
        api.pages()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_was_executed_from_top_to_bottom(path: Path) -> None:
    """Results that belong to other lines than those above them: the site shows a lesson as it was committed."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]


def test_the_script_of_the_guide_is_the_simulated_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide to context parallelism whose script does not run, or feeds the ranks of a group different rows."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launch, str(DOCS / "train_cp.py"), "--cp", "2", "--steps", "2"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step")]

    script = _from_docs("train_cp", monkeypatch)
    model = script.llama.tiny(vocab_size=128, max_position_embeddings=96)
    step = fcp.train_step(fcp.transform(model, cp=2), fcp.optimizer(torch.optim.AdamW, lr=3e-3), max_norm=1.0)
    state, simulated = step.init(model.init(seed=0)), []
    for index in range(2):
        ids = script.rows_at(index, 0)
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        simulated.append(float(metrics["loss"]))
    assert losses == pytest.approx(simulated, abs=2e-5)  # float32, printed with 6 places

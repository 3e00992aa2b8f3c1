"""The public API explains itself: shapes, errors, and examples that run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fcp
from fcp import pytree

FUNCTIONS = [
    name
    for name in fcp.__all__
    if callable(getattr(fcp, name)) and inspect.isfunction(inspect.unwrap(getattr(fcp, name)))
]
README = Path(__file__).resolve().parent.parent / "README.md"
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
    quiet = {"record", "relative_error", "rematerialize", "linear"}  # these raise nothing of their own
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

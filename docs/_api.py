"""The pages of the API, made from what is public: every name of `fcp.__all__` on the page of its room.

Problem. A list of names kept by hand lacks the newest one, and shows one that is gone.

Idea. Where a name is defined says what it is about, so a page is a set of modules (`PAGES`), and a public name goes to
the page of the module that defines it. A module of `fcp.__all__` (`masks`, `huggingface`) has a page of its own, with
the names of its own `__all__`. A name whose module is on no page is an error, here and in the tests.

Docstrings are written for a reader of the source: Markdown's fences and single backticks, tables by indentation.
`to_rest` makes of them what Sphinx reads.
"""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import fcp
import fcp.testing

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Transforms": (
        "From a model function to one over ranks. `transform` validates and composes; by hand the same transforms "
        "compose in any order.",
        ("_transform", "_transformed", "_context_parallel", "transforms", "sharded", "remat"),
    ),
    "Collectives": (
        "Linear maps over the ranks of an axis, each with its adjoint. A value is *invariant* over an axis (every rank "
        "holds the same) or *varying*.",
        ("collectives", "axes"),
    ),
    "Runtimes": (
        "What binds an axis to ranks: a vmapped dimension of one process, or processes.",
        ("_simulate", "_distribute", "_launch", "_watch", "trace"),
    ),
    "Models": (
        "What a model function takes and gives, and how its parameters may be split.",
        ("model", "typing", "ops", "_prepare"),
    ),
    "Attention": (
        "Attention, matrix products and norms whose ranks fold into one call, and the registry of kernels.",
        ("_attention", "_linear", "_rms_norm"),
    ),
    "Gradients and comparison": (
        "First derivatives, and whether two functions are the same.",
        ("_value_and_grad", "_compare"),
    ),
    "Training": ("A training step and an optimizer as pure functions.", ("_optimizer", "_train_step")),
}
"""Title of a page: what it says first, and the modules of fcp whose public names are on it."""

CONSTANTS = {"LOCAL": "ops", "IGNORED": "typing", "Params": "typing", "Rule": "typing", "Rules": "typing"}
"""Values, which do not say where they are from: the modules that do."""


def room_of(name: str) -> tuple[str, int]:
    """The title of the page that a name of `fcp.__all__` is on, and which of the page's modules defines it.

    Raises:
        ValueError: its module is on no page.
    """
    value = getattr(fcp, name)
    if isinstance(value, ModuleType):
        return f"fcp.{name}", 0
    module = CONSTANTS.get(name) or inspect.unwrap(value).__module__.removeprefix("fcp.")
    if module.partition(".")[0] in fcp.__all__:
        return f"fcp.{module.partition('.')[0]}", 0
    for title, (_, modules) in PAGES.items():
        for index, each in enumerate(modules):
            if module == each or module.startswith(f"{each}."):
                return title, index
    raise ValueError(f"docs: fcp.{name} is of fcp.{module}, which is on no page; add it to PAGES in docs/_api.py")


def pages() -> dict[str, list[str]]:
    """Title to the full names on that page, each once, in the order of the page's modules."""
    found: dict[str, list[str]] = {title: [] for title in PAGES}
    for name in sorted(fcp.__all__, key=lambda name: room_of(name)[1]):
        value = getattr(fcp, name)
        here = found.setdefault(room_of(name)[0], [])
        if isinstance(value, ModuleType):
            here += [f"fcp.{name}.{each}" for each in value.__all__ if each not in fcp.__all__]
        else:
            here.append(f"fcp.{name}")
    found["fcp.testing"] = [f"fcp.testing.{name}" for name in fcp.testing.__all__]
    return found


def write_pages(folder: Path) -> None:
    """Writes a page a room, and an index of them; what is as it was stays untouched, so that Sphinx does too."""
    folder.mkdir(exist_ok=True)
    texts = {f"{_slug(title)}.rst": _page(title, names) for title, names in pages().items()}
    toctree = "".join(f"   {name.removesuffix('.rst')}\n" for name in texts)
    texts["index.rst"] = f"API\n===\n\nWhat `import fcp` offers.\n\n.. toctree::\n\n{toctree}"
    for path in folder.glob("*.rst"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _page(title: str, names: list[str]) -> str:
    if title in PAGES:
        first = re.sub(r"`(\w+)`", r"``\1``", PAGES[title][0]) + "\n"
    else:
        first = f".. automodule:: {title}\n   :no-members:\n"
    return f"{title}\n{'=' * len(title)}\n\n{first}{''.join(map(_entry, names))}"


def _entry(name: str) -> str:
    module, _, last = name.rpartition(".")
    value: Any = fcp
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    if inspect.isclass(value) and last not in CONSTANTS:
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f"\n.. {kind}:: {name}\n"
    if inspect.isroutine(inspect.unwrap(value)):
        return f"\n.. autofunction:: {name}\n"
    defined = f"fcp.{CONSTANTS[last]}" if last in CONSTANTS else module
    said = ModuleAnalyzer.for_module(defined).find_attr_docs().get(("", last), [])
    return f"\n.. py:data:: {name}\n\n   {' '.join(said).strip()}\n"


def to_rest(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A docstring as reStructuredText with Google's sections, in place; napoleon reads the sections after it.

    Fences, and in a module's note what is indented, become literal blocks. In prose, signs that would be markup are
    escaped. `a, b: text` of a list of arguments becomes an entry for each.
    """
    if lines and lines[0] == type.__call__.__doc__:  # inherited, and says nothing
        lines.clear()
    made: list[str] = []
    where = "prose"
    for line in _one_entry_each(lines):
        if line.lstrip().startswith("```"):
            where = "prose" if where == "fence" else "fence"
            made += ["", ".. code-block:: text", ""] if where == "fence" else [""]
            continue
        if where == "fence":
            made.append(f"   {line}")
            continue
        if line.lstrip().startswith(">>>"):
            where = "doctest"
        elif where == "doctest" and not line.strip():
            where = "prose"
        elif what == "module" and where == "prose" and line.startswith("    "):
            where = "table"
            made += ["::", ""]
        elif where == "table" and line.strip() and not line.startswith("    "):
            where = "prose"
        if made and made[-1].strip() == "Returns:":  # no type stands before the first colon of what is returned
            line = re.sub(r"(?=\S)", ": ", line, count=1)
        made.append(_escaped(line) if where == "prose" else line)
    lines[:] = made


def keep_properties(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A property's docstring as it is: napoleon takes what stands before a colon in it for a type."""
    if what == "property":
        lines[:] = [_escaped(line) for line in (inspect.getdoc(obj) or "").splitlines()]


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A signature that Sphinx could not parse (a default is a function, say), without its modules."""
    if signature is not None and "~" in signature:
        signature = re.sub(r"<(?:function|class) [^,)]*>", "...", signature)
        signature = re.sub(r"~?\b(?:[a-z_]\w*\.)+(\w+)", r"\1", signature)
    return signature, returns


def _one_entry_each(lines: list[str]) -> list[str]:
    made: list[str] = []
    names: list[str] = []
    block: list[str] = []

    def close() -> None:
        for name in names:
            made.extend([f"    {name}: {block[0]}", *block[1:]])
        names.clear()

    for line in lines:
        found = re.fullmatch(r"    (\w+(?:, \w+)+): (.*)", line)
        if names and not found and line.startswith("     "):
            block.append(line)
            continue
        close()
        if found:
            names[:], block[:] = found[1].split(", "), [found[2]]
        else:
            made.append(line)
    close()
    return made


def _escaped(line: str) -> str:
    """Stars and bars outside of backticks, which are products, options and absolute values but for `*emphasis*`."""
    parts = line.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"(?<![\w*])(\*\w[\w ]*\*)(?![\w*])|([*|])", _keep_or_escape, parts[index])
    return "`".join(parts)


def _keep_or_escape(match: re.Match[str]) -> str:
    return match[1] or f"\\{match[2]}"

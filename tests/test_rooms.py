"""The arrows between rooms: who may import whom, read off the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_function", "pytree", "typing", "_stored", "_kept", "_host", "_signals"),
    ("axes", "trace", "masks", "loss"),
    ("_watch", "_per_mask"),
    ("_selfcheck",),
    ("_process",),
    ("_collective", "kernels", "_plan", "_linear", "_rms_norm", "_grouped", "_schedule", "_order", "_tiled_loss"),
    ("_planned", "_varlen", "_flex", "_kernel_check"),
    ("collectives",),
    ("_simulate", "_distribute", "_agree", "_attention", "_prepare", "_launch", "_experts", "_dispatch", "_ep_view"),
    ("ops", "remat", "_own_gradient", "_value_and_grad"),
    ("model", "sharded", "tables"),
    ("_regather", "_layout", "_across_slices"),
    ("transforms",),
    ("_context_parallel", "_memory"),
    ("huggingface",),
    ("_dtensor",),
    ("_shards",),
    ("_transformed",),
    ("_optimizer", "data"),
    ("_train_step",),
    ("_validate",),
    ("checkpoint", "_transform"),
    ("_compare",),
    ("__init__",),
    ("testing",),
    ("_cli_args", "_cli_inputs", "_cli_models", "_run_log"),
    ("_cli_ranks", "_settings"),
    ("_training",),
    ("_cli_check", "_cli_eval", "_cli_export", "_cli_mask", "_cli_plot", "_cli_train"),
    ("cli",),
    ("__main__",),
)
"""A file imports from earlier layers only, and from its own layer where `SAME` says so."""

SAME = {("typing", "pytree")}


def imports(path: Path, *, runtime_only: bool = True) -> set[str]:
    """The dotted names of fcp and models that a file imports, without those for type checkers alone."""
    tree = ast.parse(path.read_text())
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if runtime_only and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            hidden.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("fcp", "models", "optree", "rich")}


def room(name: str) -> str | None:
    """The file of fcp that a dotted import reaches: fcp.axes.bind -> axes; fcp.pytree -> pytree."""
    parts = name.split(".")
    if parts[0] != "fcp" or len(parts) == 1:
        return None
    known = {each for layer in LAYERS for each in layer}
    return parts[1] if parts[1] in known else "__init__"


def depth(name: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


FILES = sorted(path for path in (ROOT / "fcp").rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "fcp")))
def test_arrows_point_one_way(path: Path) -> None:
    """A lower room that leans on a higher one, so that neither can be read, or replaced, alone."""
    relative = path.relative_to(ROOT / "fcp")
    here = relative.parts[0].removesuffix(".py")
    wrong = []
    for name in imports(path):
        there = room(name)
        if there is None or there == here:
            continue
        if depth(there) >= depth(here) and (here, there) not in SAME:
            wrong.append(f"{here} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", sorted((ROOT / "fcp" / "transforms").glob("_*.py")), ids=lambda path: path.name)
def test_transforms_do_not_import_each_other(path: Path) -> None:
    """A transform that only works together with another one's file."""
    assert not [name for name in imports(path) if name.startswith("fcp.transforms")]


def test_one_file_imports_optree_and_one_imports_rich() -> None:
    """Two orders of one dict (torch's pytree keeps insertion order, optree sorts); output in two styles."""
    users = {
        library: [p.name for p in FILES if library in {n.split(".")[0] for n in imports(p)}]
        for library in ("optree", "rich")
    }
    assert users == {"optree": ["pytree.py"], "rich": ["tables.py"]}


def test_fcp_never_imports_models() -> None:
    """A library that cannot be installed without its examples."""
    assert not [path.name for path in FILES for name in imports(path, runtime_only=False) if name.startswith("models")]


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_know_no_axis(path: Path) -> None:
    """A model that computes differently because it knows how it is split."""
    allowed = {
        "fcp.typing",
        "fcp.masks",
        "fcp.ops",
        "fcp.model",
        "fcp.loss",
        "fcp.pytree",
        "fcp.huggingface",
        "fcp.linear",
        "fcp.rms_norm",
    }
    wrong = [
        name
        for name in imports(path)
        if name.startswith("fcp") and not any(name == each or name.startswith(each + ".") for each in allowed)
    ]
    assert not wrong


def test_the_check_sees_an_arrow_that_points_back(tmp_path: Path) -> None:
    """Mutant: a check that reads no imports, and so finds none wrong."""
    bad = tmp_path / "axes.py"
    bad.write_text("from fcp._transform import transform\nfrom fcp import masks\nimport fcp.sharded\n")
    assert {room(name) for name in imports(bad)} == {"_transform", "masks", "sharded"}
    assert depth("_transform") > depth("axes")

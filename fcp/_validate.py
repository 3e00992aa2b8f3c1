"""What `fcp.transform` refuses before anything runs, each with the numbers, the rule and the way out.

A size that does not fit fails late and far from its cause: in a reshape of the fourth layer, or not at all. So
everything that can be known from the model's config, its rules and the sizes alone is asked here first. (What only the
batch shows, rows that dp does not divide for one, the transforms refuse when they are called.)
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from fcp._context_parallel import Choice, choose, cp_impls
from fcp._order import check_layout
from fcp._transformed import Transformed
from fcp.kernels import registered
from fcp.model import dropouts
from fcp.sharded import base_model
from fcp.transforms._shard_params import indivisible

__all__ = ["check_cp", "check_mesh", "check_model", "check_rows"]


def check_model(model_fn: Any, sizes: Mapping[str, Any], kernel: str) -> None:
    """A model that can be transformed, by sizes that its rules divide by."""
    if not callable(model_fn) or isinstance(model_fn, type):
        raise ValueError(f"transform: {model_fn!r} is no model function (params, inputs, ops) -> Output")
    if isinstance(model_fn, Transformed):
        raise ValueError("transform: this model was transformed already; transform the model itself, naming every axis")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"transform: {name}={size!r} must be a number of ranks, 1 or more")
    if kernel != "auto" and kernel not in registered:
        raise ValueError(f"transform: no attention kernel {kernel!r}; registered are auto, {', '.join(registered)}")
    base: Any = base_model(cast(Any, model_fn))
    dropout = dropouts(getattr(base, "config", None))
    if dropout:
        raise ValueError(f"transform: the config has {dropout}; dropout is not part of a pure function. Set it to 0.")
    if sizes["tp"] > 1:
        rules = getattr(base, "rules", None)
        if rules is None:
            raise ValueError(
                f"transform: tp={sizes['tp']} needs rules that say how each parameter splits, and {base!r} has none. "
                f"Wrap it as fcp.Model(config, apply, init, rules), or leave tp out."
            )
        rules = dict(rules)  # reading them may be what proves them
        wrong = indivisible(rules, "tp", sizes["tp"])
        if wrong:
            smaller = [str(size) for size in range(1, sizes["tp"]) if not indivisible(rules, "tp", size)]
            raise ValueError(f"transform: {'; '.join(wrong)}. Below {sizes['tp']}, tp may be {', '.join(smaller)}.")


def check_cp(model: Any, cp: Any, tp: int, impl: str | None, layout: str | None) -> Choice:
    """What is to bring the slices together, and in which order ranks hold them."""
    hybrid = isinstance(cp, tuple)
    size = math.prod(cp) if hybrid else cp
    for name, value in (("cp_impl", impl), ("layout", layout)):
        if value is not None and size == 1:
            raise ValueError(f"transform: {name}={value!r}, and no cp splits the sequence. Leave it out.")
    if layout is not None:
        check_layout("transform", layout)
    if impl is not None and impl != "auto" and impl not in cp_impls:
        raise ValueError(f"transform: no cp_impl {impl!r}; registered are auto, {', '.join(cp_impls)}")
    if hybrid and impl in ("auto", "ulysses"):
        raise ValueError(
            f"transform: cp={cp} is Ulysses within and another way across, and cp_impl={impl!r} is none of those; take "
            f"'ring', 'gather' or a registered one, or one number for cp"
        )
    if impl == "auto":
        return choose(getattr(model, "config", None), size, tp, layout)
    impl = impl or ("ring" if hybrid else "ulysses")
    if impl == "ulysses" and layout not in (None, "contiguous"):
        raise ValueError(
            f"transform: layout={layout!r} evens out the work of ranks that keep their own queries, and under "
            f"cp_impl='ulysses' every rank has all of them. Leave it out, or take cp_impl='ring' or 'gather'."
        )
    return Choice(impl, layout or "contiguous", "")


def check_rows(rows: str, sizes: Mapping[str, int], mesh: Any) -> tuple[str, ...]:
    """The axes whose ranks are handed their own rows."""
    if rows not in ("all", "own"):
        raise ValueError(f"transform: rows={rows!r}; it is 'all' or 'own'")
    split = tuple(name for name in ("dp", "fsdp") if sizes[name] > 1)
    if rows == "own" and (mesh is None or not split):
        lacking = "no mesh: in the simulator one process is handed every rank's rows" if split else "no dp or fsdp"
        raise ValueError(f"transform: rows='own' and {lacking}. Leave rows out.")
    return split if rows == "own" else ()


def check_mesh(mesh: Any, sizes: Mapping[str, int]) -> None:
    """A mesh whose dimensions are the axes that are asked for."""
    names = getattr(mesh, "mesh_dim_names", None) or ()
    found = {name: mesh.size(dim) for dim, name in enumerate(names)}
    wanted = {name: size for name, size in sizes.items() if size > 1 or name in found}
    if found != wanted:
        raise ValueError(
            f"transform: the mesh has the dimensions {found or 'without names'}, and {wanted} is asked for. Name and "
            f"size them alike: init_device_mesh(device, sizes, mesh_dim_names=names)"
        )

"""The axis environment: which axis names are bound here, to how many ranks, and which rank this is.

An axis is a name ("cp", "tp", ...). Code that uses one never says what the ranks are; a runtime does, by binding the
name around a call. Under `simulate` the ranks are a vmapped dimension, and the binding holds the rank index as a
tensor that is batched over that dimension and nothing else.

That index is also how a value is known to be *invariant* over an axis (every rank holds the same, so vmap left it
unbatched) or *varying* (batched at the level at which the index is). These two words are JAX's replication types; here
vmap keeps them, and `varying` only reads them off the wrappers.

The environment is a context variable: the only state in fcp besides registries. A runtime binds, collectives look
up. An unbound name is a NameError, as an unbound variable is.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._C._functorch as _functorch
from torch import Tensor

__all__ = [
    "Axes",
    "Axis",
    "axis_index",
    "axis_size",
    "bare",
    "bare_ranks",
    "batched",
    "bind",
    "bound",
    "differentiated_inside",
    "lookup",
    "names_of",
    "varying",
]

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One bound axis: its `size` in ranks and this rank's `index` (int64 scalar; None at size 1).

    Under `simulate` the index is batched over the ranks. Under `distribute` it is this process's, and `mesh` is the
    DeviceMesh whose dimension of this name the axis is.

    `used` grows by one entry with every collective that names the axis, so that a runtime can tell a requested axis
    that nothing consumed.
    """

    name: str
    size: int
    index: Tensor | None = None
    mesh: Any = None
    used: list[str] = field(default_factory=list, compare=False)


_environment: ContextVar[Mapping[str, Axis]] = ContextVar("fcp_axes", default={})  # noqa: B039 - never mutated


def bound() -> Mapping[str, Axis]:
    """The axes bound here, outermost first."""
    return _environment.get()


@contextlib.contextmanager
def bind(axis: Axis) -> Iterator[Axis]:
    """Binds one axis for the length of a `with` block; an inner binding of the same name wins."""
    token = _environment.set({**_environment.get(), axis.name: axis})
    try:
        yield axis
    finally:
        _environment.reset(token)


def names_of(axis: Axes) -> tuple[str, ...]:
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"axis {axis!r}: name each axis once, and at least one")
    return names


def lookup(axis: Axes, user: str, *, consumes: bool = True) -> tuple[Axis, ...]:
    """The bindings of `axis`, one name or several (the first slowest). `user` is who asks, for the error and `used`.

    `consumes=False` is for one who only asks how large an axis is: its ranks would still all do the same work.

    Raises:
        NameError: a name is not bound by a runtime around this call.
    """
    environment = _environment.get()
    names = names_of(axis)
    missing = [name for name in names if name not in environment]
    if missing:
        have = ", ".join(environment) or "none"
        raise NameError(
            f"{user}: axis {missing[0]!r} is not bound (bound here: {have}). "
            f"Run the function under fcp.simulate(fn, {missing[0]}=...) or fcp.distribute(fn, mesh)."
        )
    found = tuple(environment[name] for name in names)
    if consumes:
        for each in found:
            each.used.append(user)
    return found


def axis_size(axis: Axes) -> int:
    """The number of ranks of an axis, or of the product of several.

    Raises:
        NameError: a name is not bound.
    """
    size = 1
    for each in lookup(axis, "axis_size", consumes=False):
        size *= each.size
    return size


def axis_index(axis: Axes) -> Tensor:
    """This rank's index along an axis (int64 scalar, varying), or along the product of several, the first slowest.

    Raises:
        NameError: a name is not bound.
    """
    index = torch.zeros((), dtype=torch.int64)
    for each in lookup(axis, "axis_index"):
        index = index * each.size + (0 if each.index is None else each.index)
    return index


def bare(x: Tensor) -> Tensor:
    """The tensor under all wrappers of torch.func: no derivative and no rank dimension follows it."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def bare_ranks(x: Tensor) -> Tensor:
    """As `bare`, the dims that vmap levels gave it in front of its own."""
    dims = []
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            dims.append(_functorch.maybe_get_bdim(x))
        x = _functorch.get_unwrapped(x)
    for moved, dim in enumerate(reversed(dims)):  # each is counted without those below it
        x = x.movedim(dim + moved, 0)
    return x


def batched(x: Tensor) -> bool:
    """Whether any vmap level, an axis's or a caller's own, gives `x` a dim that is not seen here."""
    return bool(_batched_levels(x))


def _batched_levels(x: Tensor) -> set[int]:
    levels = set()
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            levels.add(_functorch.maybe_get_level(x))
        x = _functorch.get_unwrapped(x)
    return levels


def varying(x: Tensor) -> frozenset[str]:
    """The names of the bound axes over which `x` varies, as far as vmap can see.

    A value made varying by `pvary` alone is still the same on every rank, and is not listed.
    """
    levels = _batched_levels(x)
    if not levels:
        return frozenset()
    return frozenset(
        name
        for name, axis in _environment.get().items()
        if axis.index is not None and _batched_levels(axis.index) & levels
    )


def differentiated_inside(axes: tuple[Axis, ...]) -> bool:
    """Whether a derivative is under way inside the map of any of `axes`: each rank's own, as on processes.

    Where none is, torch differentiates the map from outside, over all ranks at once.
    """
    stack = _functorch.get_interpreter_stack() or []
    levels = set().union(*(_batched_levels(axis.index) for axis in axes if axis.index is not None))
    lowest = min(levels, default=0)
    return any(each.key() != _functorch.TransformType.Vmap and each.level() > lowest for each in stack)

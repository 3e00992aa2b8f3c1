"""What every transform returns: a model function that knows how its parameters lie over the axes.

Problem. Transforms must compose in any order, and a parameter's gradient needs exactly one sum over every axis over
which its uses differ: none is a silent error, two is a silent error. If each transform marked the parameters by
itself, whether cp had been summed would depend on which transform came first.

Idea. How a leaf lies is data, a `Placement`: the slices cut from it, the axes over which it is stored in pieces and
gathered for use, and the axes over which it is used in differing ways. A transform only *states* what it adds
(`place`), and what it does to the batch and the Ops (`run`); a `Sharded` record chains these. Only when all is known
does the outermost one act: each leaf is sharded as its placement says, and gets one `pvary` over the axes that no slice
or gather already accounts for. So the order of the transforms cannot matter.

A leaf that is stored in pieces is handed to the model as a `Piece`. It becomes a tensor in `Ops.layer` (see
`shard_params`); a model that reads a parameter outside of `ops.layer` meets the Piece, not a wrong tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._prepare import prepare
from fcp.axes import Axes, axis_size, bound, names_of
from fcp.collectives import pvary_each, shard
from fcp.ops import LOCAL, Ops
from fcp.typing import Inputs, ModelFn, Output, Params, Rules, Split

__all__ = [
    "Piece",
    "Placement",
    "Shapes",
    "Sharded",
    "add_varying",
    "base_model",
    "cut_along",
    "mark_varying",
    "pad_to",
    "pad_to_multiple",
    "piece_of",
    "slice_of",
]

Shapes = Mapping[str, tuple[int, ...]]

BUCKET = 25 * 2**20
"""Bytes of gradients that are summed in one exchange: enough that its latency is nothing, few enough to begin early."""


@dataclass(frozen=True)
class Placement:
    """How one parameter lies over the axes.

    Attributes:
        slices: (axis or axes, Split) cut from the leaf, in order; the ranks compute with their slice.
        stored: the axes over which dim 0 of that slice is stored in equal pieces and gathered for use. An axis that a
            slice is cut along stores nothing more, so a leaf may name it in both (experts do).
        varies: the axes over whose ranks the leaf's uses differ.
        sum_dtype: the dtype in which the ranks' gradients are summed; None for the leaf's own.
    """

    slices: tuple[tuple[Axes, Split], ...] = ()
    stored: tuple[str, ...] = ()
    varies: frozenset[str] = frozenset()
    sum_dtype: torch.dtype | None = None


@pytree.node("axes", "size", "alike", "sum_dtype")
@dataclass(frozen=True)
class Piece:
    """This rank's piece of a leaf stored over `axes`: `value` [ceil(size / ranks), ...] of a leaf [size, ...].

    `alike` are those of the axes whose ranks all use the leaf in the same way (nothing split their work), so that
    the ranks' gradients are copies of one and must not be summed. `sum_dtype` as in `Placement`.
    """

    value: Tensor
    axes: tuple[str, ...]
    size: int
    alike: tuple[str, ...] = ()
    sum_dtype: torch.dtype | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        raise ValueError(
            f"torch's {name} was given a parameter that is stored in pieces: the model reads it outside of ops.layer, "
            f"where nothing gathers it. Call what uses it through ops.layer(fn, its_params, ...)."
        )


Place = Callable[[dict[str, Placement], Shapes], dict[str, Placement]]
Run = Callable[[ModelFn, Params, Inputs, Ops], Output]


def _add_nothing(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
    return placements


@dataclass(frozen=True)
class Sharded:
    """A model function under transforms: global parameters and batch in, global loss and logits out.

    Attributes:
        inner: the model function that the last transform was applied to.
        name: what that transform is, as `ulysses(cp)`.
        run: (inner on local values, local params, inputs, ops) -> Output: what it does to the batch and the Ops.
        place: (placements so far, shapes) -> placements: what it adds to each leaf's placement.
    """

    inner: ModelFn
    name: str
    run: Run = field(repr=False)
    place: Place = field(default=_add_nothing, repr=False)

    def __call__(self, params: Params, inputs: Inputs | Mapping[str, Any], ops: Ops = LOCAL) -> Output:
        prepared = prepare(inputs)
        placements = self.placements(pytree.shapes(params))
        cut = pytree.map_with_path(lambda path, x: _cut(x, placements[path]), params)
        return self.on_local(mark_varying(cut, placements), prepared, ops)

    def on_local(self, params: Params, inputs: Inputs, ops: Ops) -> Output:
        """The function on parameters that are laid out already."""
        inner: Any = self.inner.on_local if isinstance(self.inner, Sharded) else self.inner
        return self.run(inner, params, inputs, ops)

    def placements(self, shapes: Shapes) -> dict[str, Placement]:
        """The placement of every leaf, by path, from the transforms' statements, innermost first."""
        chain: list[Sharded] = []
        here: Any = self
        while isinstance(here, Sharded):
            chain.append(here)
            here = here.inner
        found = {path: Placement() for path in shapes}
        for each in reversed(chain):
            found = each.place(found, shapes)
        return {
            path: replace(p, stored=tuple(n for n in p.stored if n not in cut_along(p))) for path, p in found.items()
        }

    @property
    def applied(self) -> tuple[str, ...]:
        """The transforms, innermost first, as ("shard_seq(cp)", "ulysses(cp)")."""
        before = self.inner.applied if isinstance(self.inner, Sharded) else ()
        return (*before, self.name)

    @property
    def config(self) -> Any:
        return getattr(base_model(self), "config", None)

    @property
    def rules(self) -> Rules | None:
        return getattr(base_model(self), "rules", None)


def cut_along(placement: Placement) -> set[str]:
    """The axes along which slices are cut from the leaf."""
    return {name for axis, _ in placement.slices for name in names_of(axis)}


def base_model(fn: ModelFn) -> ModelFn:
    """The model function under all transforms."""
    while isinstance(fn, Sharded):
        fn = fn.inner
    return fn


def add_varying(axis: Axes) -> Place:
    """The statement of a transform that splits the batch over `axis`: every leaf is used differently by each rank."""

    def place(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
        return {path: replace(p, varies=p.varies | set(names_of(axis))) for path, p in placements.items()}

    return place


def mark_varying(local: Params, placements: Mapping[str, Placement]) -> Params:
    """Local leaves (tensors or Pieces) made ready for use: marked varying where no slice or gather sums their gradient.

    The gradients of several leaves are summed in one exchange, in buckets of at most `BUCKET` bytes, each as soon as
    all of its gradients are there (Li et al. 2020, section 3.2.3).
    """
    values, spec = pytree.flatten(local)
    buckets: list[tuple[tuple[str, ...], torch.dtype | None, list[int]]] = []
    filling: dict[Any, tuple[int, list[int]]] = {}
    for index, (x, placement) in enumerate(zip(values, placements.values(), strict=True)):
        axes = _unaccounted(placement)
        if not axes:
            continue
        size = x.numel() * x.element_size()
        kind = (axes, x.dtype, placement.sum_dtype)
        filled, bucket = filling.get(kind, (BUCKET, []))
        if filled + size > BUCKET:
            filled, bucket = 0, []
            buckets.append((axes, placement.sum_dtype, bucket))
        bucket.append(index)
        filling[kind] = (filled + size, bucket)
    for axes, sum_dtype, bucket in buckets:
        marked = pvary_each([values[i] for i in bucket], axes, sum_dtype=sum_dtype)
        for index, x in zip(bucket, marked, strict=True):
            values[index] = x
    return pytree.unflatten(spec, values)


def _unaccounted(placement: Placement) -> tuple[str, ...]:
    """The axes over which the leaf's gradient still has to be summed."""
    accounted = {*placement.stored, *cut_along(placement)}
    rest = tuple(name for name in bound() if name in placement.varies and name not in accounted)
    unbound = sorted(placement.varies - accounted - set(rest))
    if unbound:
        axis_size(unbound[0])  # raises the NameError of an unbound axis
    return rest


def _cut(x: Tensor, placement: Placement) -> Tensor | Piece:
    """One global leaf to what this rank holds."""
    for axis, split in placement.slices:
        x = slice_of(x, axis, split)
    return _store(x, placement) if placement.stored else x


def slice_of(x: Tensor, axis: Axes, split: Split) -> Tensor:
    """This rank's slice of a whole leaf."""
    size, dim = axis_size(axis), split.dim % x.dim()
    if split.vocab:
        return shard(pad_to_multiple(x, size, dim), axis, dim=dim)
    if split.pieces is not None and size > 1:
        # [q; k; v] to rank-major order: slice r of each piece side by side, so that one equal cut gives rank r its own.
        parts = [piece.unflatten(dim, (size, -1)) for piece in x.split(split.pieces, dim)]
        x = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
    return shard(x, axis, dim=dim)


def _store(x: Tensor, placement: Placement) -> Piece:
    axes = placement.stored
    value = shard(pad_to_multiple(x, axis_size(axes), 0), axes, dim=0)
    return piece_of(value, x.shape[0], placement)


def piece_of(value: Tensor, size: int, placement: Placement) -> Piece:
    """The Piece of a leaf [size, ...] whose part on this rank is `value`."""
    alike = tuple(name for name in placement.stored if name not in placement.varies)
    return Piece(value, placement.stored, size, alike, placement.sum_dtype)


def pad_to_multiple(x: Tensor, size: int, dim: int, value: float | int | bool = 0) -> Tensor:
    """Pads the end of `dim` with `value` to the next multiple of `size`."""
    return pad_to(x, -(-x.shape[dim] // size) * size, dim, value)


def pad_to(x: Tensor, length: int, dim: int, value: float | int | bool = 0) -> Tensor:
    """Pads the end of `dim` with `value` to `length`; `x` itself where none is needed."""
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_full(shape, value)], dim)

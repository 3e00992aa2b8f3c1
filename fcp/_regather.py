"""A layer on stored parameters, on processes: gathered for the layer, freed, gathered again for its backward.

Problem. A gathered matrix is needed twice, in the layer and in the layer's backward, and must not lie in memory between
(ZeRO stage 3: Rajbhandari et al. 2020, section 5). Rematerialising the layer does that and computes the layer twice.

Idea. What autograd saved for backward points into the gathered buffers. So the buffers stay, and only their memory is
given back and taken again: emptied when the layer ends, filled again when a gradient reaches the layer's result, and
emptied for good when the parameters' gradients are complete. Two Functions mark these moments: `_Refill` lies behind
the layer's result, `_Hold` between the gathered parameters and the layer; its backward is the gather's adjoint.

A gather is issued one layer ahead of its use: forward, for the leaves that follow this layer's in the parameter tree;
backward, for the layer that ran before this one. A wrong guess costs a message, never a number.

Left out: second derivatives, whose graph would need the buffers once more. Under `torch.func.grad`, which builds that
graph, `shard_params` rematerialises instead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._function import Function
from fcp._process import start_gather
from fcp.axes import Axis, lookup
from fcp.collectives import all_gather_adjoint_each, rows_gathered
from fcp.sharded import Piece, pad_to
from fcp.trace import event_of, note

__all__ = ["Window", "by_kind", "is_piece"]


def is_piece(x: Any) -> bool:
    return isinstance(x, Piece)


def by_kind(pieces: Sequence[Piece]) -> list[list[int]]:
    """The indices of the pieces that can travel together: of one dtype, over the same axes, summed alike."""
    kinds: dict[Any, list[int]] = {}
    for index, piece in enumerate(pieces):
        kinds.setdefault((piece.axes, piece.value.dtype, piece.sum_dtype), []).append(index)
    return list(kinds.values())


@dataclass(eq=False)
class _Leaf:
    """One stored leaf: this rank's piece, and the buffer that the pieces of all ranks are gathered into.

    `users` counts the layers that compute with the buffer now; its memory is given back when there is none.
    """

    piece: Piece
    axes: tuple[Axis, ...]
    flat: Tensor
    waiting: Any = None
    full: bool = False
    users: int = 0

    def start(self) -> None:
        """Issues the gather, unless the buffer is full or being filled."""
        if not self.full and self.waiting is None:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            mesh, piece = self.axes[0].mesh, self.piece.value.detach()
            self.waiting = start_gather(rows_gathered(), piece, self.flat, mesh, self.piece.axes)

    def use(self) -> None:
        """Waits for the gather; the buffer is full until as many calls of `free`."""
        self.start()
        self.users += 1
        if self.waiting is not None:
            self.waiting()
            self.waiting, self.full = None, True

    def free(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.flat.untyped_storage().resize_(0)
            self.full = False

    @property
    def rows(self) -> int:
        """The rows of all pieces, padding too."""
        return self.piece.value.shape[0] * math.prod(axis.size for axis in self.axes)

    def whole(self) -> Tensor:
        """The leaf [size, ...], a view of the buffer; no version counter sees when that is filled again."""
        rows = self.piece.value
        return self.flat.data.view(-1, *rows.shape[1:])[: self.piece.size]


@dataclass(eq=False)
class _Layer:
    """One call of a layer: its leaves, and the layer that ran before it."""

    leaves: list[_Leaf]
    before: "_Layer | None"

    def use(self, ahead: Sequence[_Leaf], backward: bool) -> None:
        for leaf in self.leaves:
            leaf.start()
        for leaf in ahead:
            leaf.start()
        for leaf in self.leaves:
            leaf.use()
        pieces = [leaf.piece for leaf in self.leaves]
        for kind in by_kind(pieces):
            shapes = [tuple(pieces[i].value.shape) for i in kind]
            piece = pieces[kind[0]]
            note(event_of("all_gather", piece.axes, shapes, piece.value.dtype, backward))

    def free(self) -> None:
        for leaf in self.leaves:
            leaf.free()


class Window:
    """The gathered parameters of one call of a model function: the layer's at work, and those on their way."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces  # all that the model was handed, in the tree's order
        self.leaves: dict[int, _Leaf] = {}
        self.last: _Layer | None = None

    def run(self, fn: Callable[..., Any], layer_params: Any, *args: Any) -> Any:
        """fn(the gathered parameters, *args); of what was gathered, nothing lives on."""
        found, spec = pytree.flatten(layer_params, is_piece)
        at = [index for index, x in enumerate(found) if isinstance(x, Piece)]
        here = _Layer([self._leaf(found[index]) for index in at], self.last)
        here.use(self._following(found[at[-1]], len(at)) if at else (), backward=False)
        self.last = here
        for kind in by_kind([leaf.piece for leaf in here.leaves]):
            leaves = [here.leaves[i] for i in kind]
            for i, whole in zip(kind, _Hold.apply(leaves, *(leaf.piece.value for leaf in leaves)), strict=True):
                found[at[i]] = whole
        out, out_spec = pytree.flatten(fn(pytree.unflatten(spec, found), *args))
        buffers = {leaf.flat.untyped_storage().data_ptr() for leaf in here.leaves}
        for index, x in enumerate(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in buffers:
                out[index] = x.clone()  # a result that is a parameter outlives the buffer
        moving = [index for index, x in enumerate(out) if isinstance(x, Tensor) and x.requires_grad]
        if moving:
            for index, x in zip(moving, _Refill.apply(here, *(out[i] for i in moving)), strict=True):
                out[index] = x
        here.free()
        return pytree.unflatten(out_spec, out)

    def settle(self) -> None:
        """Waits for what was gathered ahead and no layer used; to be called when the model function has returned."""
        for leaf in self.leaves.values():
            if leaf.waiting is not None:
                leaf.use()
                leaf.free()

    def _leaf(self, piece: Piece) -> _Leaf:
        if id(piece) not in self.leaves:
            axes = lookup(piece.axes, "all_gather")
            flat = piece.value.new_empty(piece.value.numel() * math.prod(axis.size for axis in axes))
            flat.untyped_storage().resize_(0)
            self.leaves[id(piece)] = _Leaf(piece, axes, flat)
        return self.leaves[id(piece)]

    def _following(self, piece: Piece, count: int) -> list[_Leaf]:
        """The `count` leaves that come after `piece` in the parameter tree: most often the next layer's."""
        at = next((index for index, other in enumerate(self.pieces) if other is piece), len(self.pieces))
        return [self._leaf(each) for each in self.pieces[at + 1 : at + 1 + count]]


class _Hold(Function):
    """(leaves of one kind, *their pieces) -> the gathered leaves. Its backward, the gather's adjoint, runs when the
    layer's has: then nothing reads the buffers any more."""

    @staticmethod
    def forward(leaves: list[_Leaf], *pieces: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.whole() for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.leaves = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        leaves: list[_Leaf] = ctx.leaves
        for leaf in leaves:
            leaf.free()
        padded = [pad_to(g, leaf.rows, 0) for g, leaf in zip(gs, leaves, strict=True)]
        return None, *all_gather_adjoint_each(padded, leaves[0].axes, sum_dtype=leaves[0].piece.sum_dtype)


class _Refill(Function):
    """(layer, *its results) -> the results. Its backward runs before the layer's: what was freed is gathered again."""

    @staticmethod
    def forward(layer: _Layer, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.layer = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise ValueError(
                "shard_params: a second derivative through parameters stored on processes; take it with "
                "torch.func.grad, which keeps what it needs"
            )
        layer: _Layer = ctx.layer
        layer.use(layer.before.leaves if layer.before is not None else (), backward=True)
        return None, *gs

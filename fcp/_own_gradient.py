"""A function of all ranks with a gradient of its own: one that knows more than the derivative of its steps.

Problem. What a ring computes is a chain of exchanges and merges, and their derivatives, one after the other, would keep
every rank's keys until backward. The gradient that is known on paper keeps none. But a `torch.autograd.Function` whose
forward and backward both talk to other ranks has to say how it vmaps.

Idea. That of rematerialisation (`remat.py`). The rank indices are operands; the vmap rule, which so knows whose level
it is at, binds that axis again around `forward` and around `backward`, one level below. At the bottom, where nothing is
batched, both run on plain tensors, together with their maps.

What is left to the rule is whose gradient it is. Where the map is differentiated from outside, an operand that every
rank holds alike has one gradient, the sum of the ranks'; one that differs gets each rank's own, where its rank dim was.
Where each rank is differentiated by itself (inside the map, or on processes) no sum is taken here: that is the
adjoint of the operand's `pvary`.

Within a layer that is computed again (`remat.py`), what `forward` gave is kept where the policy keeps attention.

Left out: second derivatives, which are refused.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from fcp import pytree
from fcp._function import Function
from fcp._kept import once
from fcp._simulate import map_ranks
from fcp.axes import Axis, bind, bound

__all__ = ["own_gradient"]

Flat = Callable[..., Sequence[Tensor]]


def own_gradient(forward: Callable[..., Any], backward: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """A function with the values of `forward` and the gradients that `backward` gives.

    Args:
        forward: pytrees -> (the result, *more tensors for backward alone). It closes over no tensor.
        backward: (the result's cotangent, the result, *more, *the pytrees) -> the gradients of the pytrees' floating
            leaves, in order. It closes over no tensor.
        name: who asks, for errors.

    Returns:
        The pytrees to the result. Axes that are bound at the call are bound in both functions.

    Raises:
        ValueError: when called under a `torch.func.vmap` that is no axis of `simulate`, or differentiated twice.
    """

    def called(*args: Any) -> Tensor:
        tensors, spec = pytree.flatten(args)
        live = [axis for axis in bound().values() if axis.index is not None]
        single = [axis for axis in bound().values() if axis.index is None]  # there is no level to bind them at later

        def run(fn: Callable[..., Any], *values: Any) -> tuple[Tensor, ...]:
            with contextlib.ExitStack() as stack:
                for axis in single:
                    stack.enter_context(bind(axis))
                return tuple(fn(*values))

        count = len(tensors)
        pair = _Pair(
            lambda *values: run(forward, *pytree.unflatten(spec, list(values))),
            lambda *values: run(backward, *values[:-count], *pytree.unflatten(spec, list(values[-count:]))),
            name,
        )
        axes = tuple(replace(axis, index=None) for axis in live)
        return _Own.apply(pair, axes, count, *tensors, *(axis.index for axis in live))[0]

    return called


@dataclass(frozen=True)
class _Pair:
    """`levels` are filled by `forward`: for each map around it, innermost first, the rank dims of what it gives."""

    forward: Flat
    backward: Flat
    name: str
    levels: tuple[list[int | None], ...] = field(default=())


def _with_levels(pair: _Pair, values: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[list[int | None]]]:
    outputs = tuple(pair.forward(*values))
    return outputs, [list(dims) for dims in pair.levels]


def _own_axis(pair: _Pair, axes: tuple[Axis, ...], index_dims: Sequence[int | None]) -> Axis:
    """The axis whose level the vmap rule is at: the one whose rank index is batched there."""
    for axis, dim in zip(axes, index_dims, strict=True):
        if dim is not None:
            return axis
    raise ValueError(f"{pair.name}: it lies inside a vmap that is no axis of fcp.simulate; write the dimension out")


def _others(axes: tuple[Axis, ...], indices: Sequence[Tensor], mine: Axis) -> tuple[tuple[Axis, ...], list[Tensor]]:
    kept = [(axis, index) for axis, index in zip(axes, indices, strict=True) if axis is not mine]
    return tuple(axis for axis, _ in kept), [index for _, index in kept]


class _Own(Function):
    """(pair, axes still to bind, number of tensors, *tensors, *the axes' rank indices) -> forward(*tensors)."""

    @staticmethod
    def forward(pair: _Pair, axes: tuple[Axis, ...], count: int, *operands: Tensor) -> Any:
        outputs, levels = once("attention", _with_levels, pair, operands[:count])
        for dims, found in zip(pair.levels, levels, strict=True):
            dims[:] = found
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pair, ctx.axes, ctx.count, *operands = inputs
        ctx.outputs = len(output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output, *operands)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = unwrap_dead_wrappers(ctx.saved_tensors)  # as in rematerialisation: the level that saved them is over
        outputs, operands = saved[: ctx.outputs], saved[ctx.outputs :]
        values, indices = operands[: ctx.count], operands[ctx.count :]
        with contextlib.ExitStack() as stack:  # this may run on another thread, where nothing is bound
            for axis, index in zip(ctx.axes, indices, strict=True):
                stack.enter_context(bind(replace(axis, index=index)))
            given = (g, *outputs, *values)
            found = iter(_OwnGradient.apply(ctx.pair, ctx.axes, len(given), *given, *indices))
        return (
            None,
            None,
            None,
            *(next(found) if x.is_floating_point() else None for x in values),
            *[None] * len(indices),
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], pair: _Pair, axes: tuple[Axis, ...], count: int, *operands: Tensor
    ) -> Any:
        value_dims, index_dims = in_dims[3 : 3 + count], in_dims[3 + count :]
        axis = _own_axis(pair, axes, index_dims)
        dims: list[int | None] = []

        def forward(*values: Tensor) -> tuple[Tensor, ...]:
            out, found = map_ranks(pair.forward, axis.name, axis.size, values, value_dims, axis.used)
            dims[:] = found
            return tuple(out)

        def backward(g: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            given, of_floats = (dims[0], *dims, *value_dims), _floating(rest[len(dims) :], value_dims)
            found, found_dims = map_ranks(pair.backward, axis.name, axis.size, (g, *rest), given, axis.used)
            copies = axis.size if dims[0] is not None else 1
            return tuple(
                _as_operand(x, here, dim, axis.size, copies)
                for x, here, dim in zip(found, found_dims, of_floats, strict=True)
            )

        rest, indices = _others(axes, operands[count:], axis)
        below = _Pair(forward, backward, pair.name, (*pair.levels, dims))
        out = _Own.apply(below, rest, count, *operands[:count], *indices)
        return out, tuple(dims)


def _floating(values: Sequence[Tensor], dims: Sequence[int | None]) -> list[int | None]:
    return [dim for x, dim in zip(values, dims, strict=True) if x.is_floating_point()]


def _as_operand(g: Tensor, here: int | None, dim: int | None, size: int, copies: int) -> Tensor:
    """A gradient of all ranks, its rank dim `here`, as that of an operand whose rank dim is `dim`."""
    if dim is not None:
        return g.unsqueeze(dim).expand(*g.shape[:dim], size, *g.shape[dim:]) if here is None else g.movedim(here, dim)
    return g * copies if here is None else g.sum(here)


class _OwnGradient(Function):
    """(pair, axes still to bind, number of tensors, g, *outputs, *tensors, *indices) -> the gradients."""

    @staticmethod
    def forward(pair: _Pair, axes: tuple[Axis, ...], count: int, *operands: Tensor) -> Any:
        return tuple(pair.backward(*operands[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(
            f"{ctx.name}: it has a gradient of its own, and none of that gradient; take second derivatives through "
            f"cp_impl='ulysses' or 'gather'"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], pair: _Pair, axes: tuple[Axis, ...], count: int, *operands: Tensor
    ) -> Any:
        value_dims, index_dims = in_dims[3 : 3 + count], in_dims[3 + count :]
        axis = _own_axis(pair, axes, index_dims)
        dims: list[int | None] = []

        def backward(*values: Tensor) -> tuple[Tensor, ...]:
            out, found = map_ranks(pair.backward, axis.name, axis.size, values, value_dims, axis.used)
            dims[:] = found
            return tuple(out)

        rest, indices = _others(axes, operands[count:], axis)
        out = _OwnGradient.apply(_Pair(backward, backward, pair.name), rest, count, *operands[:count], *indices)
        return out, tuple(dims)

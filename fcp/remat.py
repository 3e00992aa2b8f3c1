"""Rematerialisation: keep a layer's inputs, compute the layer again in backward (Chen et al. 2016, section 3).

`torch.utils.checkpoint` rests on saved-tensor hooks, which torch.func does not run. So here it is a Function: forward
runs `fn` without a graph and saves the inputs, backward calls `torch.func.vjp` of `fn` on them.

Under `simulate` the inputs are batched over the ranks and the Function has to say how it vmaps: it binds the same
axis again around `fn` one level below. At the bottom it therefore saves plain tensors, and its backward replays the
function together with its map. The rank indices are operands, which is how the rule knows whose level it is at.

Inside a function that is rematerialised already, doing it again saves nothing more: a nested one is the plain call.

A tensor that `fn` closes over is not seen by any of this: its gradient would be lost without a word. One that a
gradient or a rank dimension follows is refused where it is found; pass it as an argument.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
import torch._C._functorch as _functorch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from fcp import pytree
from fcp._function import Function
from fcp._simulate import map_ranks
from fcp.axes import Axis, bind, bound

__all__ = ["rematerialize"]

_replaying: ContextVar[bool] = ContextVar("fcp_rematerializing", default=False)


def rematerialize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the same values and gradients, whose backward computes it again instead of keeping what it computed.

    (Chen et al. 2016, section 3.)

    Args:
        fn: a function of pytrees to a pytree; it closes over no tensor.

    Returns:
        A function of the same signature. Under `torch.func.grad` and `fcp.value_and_grad`, outside or inside
        `simulate`, nothing but its arguments lives until backward.

    Raises:
        ValueError: when called, if `fn` closes over a tensor that is being differentiated or varies between ranks, or
            if the call lies under a `torch.func.vmap` that is no axis of `simulate`.
    """

    def rematerialized(*args: Any) -> Any:
        if _replaying.get():
            return fn(*args)
        captured = _captured("fn", fn, set())
        if captured:
            raise ValueError(
                f"rematerialize: the function closes over the tensor {', '.join(captured[:4])}, whose gradient would "
                f"be lost; pass it as an argument"
            )
        found, spec = pytree.flatten(args)
        is_tensor = [isinstance(x, Tensor) for x in found]
        tensors = [x for x in found if isinstance(x, Tensor)]
        rest = [None if isinstance(x, Tensor) else x for x in found]
        live = [axis for axis in bound().values() if axis.index is not None]
        single = [axis for axis in bound().values() if axis.index is None]  # no level to bind them at in a replay
        out: list[Any] = []
        out_spec: Any = None

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal out_spec
            given = iter(values)
            whole = [next(given) if here else x for here, x in zip(is_tensor, rest, strict=True)]
            token = _replaying.set(True)
            try:
                with contextlib.ExitStack() as stack:
                    for axis in single:
                        stack.enter_context(bind(axis))
                    leaves, out_spec = pytree.flatten(fn(*pytree.unflatten(spec, whole)))
            finally:
                _replaying.reset(token)
            out[:] = [None if isinstance(x, Tensor) else x for x in leaves]  # keeps no tensor alive
            return tuple(x for x in leaves if isinstance(x, Tensor))

        axes = tuple(replace(axis, index=None) for axis in live)
        given = iter(_Remat.apply(flat, axes, len(tensors), *tensors, *(axis.index for axis in live)))
        return pytree.unflatten(out_spec, [next(given) if x is None else x for x in out])

    return rematerialized


def _captured(name: str, value: Any, seen: set[int]) -> list[str]:
    """The names of the tensors that `value` holds, as a closure or an argument of a partial, and that are followed."""
    if isinstance(value, Tensor):
        return [name] if value.requires_grad or _functorch.is_functorch_wrapped_tensor(value) else []
    if id(value) in seen:
        return []
    seen.add(id(value))
    held: list[tuple[str, Any]] = []
    if isinstance(value, functools.partial):
        held = [*((name, x) for x in (value.func, *value.args)), *value.keywords.items()]
    elif inspect.isfunction(value):
        for cell_name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is not assigned yet
                held.append((cell_name, cell.cell_contents))
    elif isinstance(value, dict):
        held = [(f"{name}.{key}", x) for key, x in value.items()]
    elif isinstance(value, list | tuple):
        held = [(f"{name}.{index}", x) for index, x in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [found for part in held for found in _captured(*part, seen)]


class _Remat(Function):
    """(fn, axes still to bind, number of tensors, *tensors, *the axes' rank indices) -> fn(*tensors)."""

    @staticmethod
    def forward(fn: Callable[..., tuple[Tensor, ...]], axes: tuple[Axis, ...], count: int, *operands: Tensor) -> Any:
        # A Function may not return an operand itself.
        return tuple(x.view_as(x) if any(x is y for y in operands) else x for x in fn(*operands[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fn, ctx.axes, ctx.count, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.moves = [x.is_floating_point() for x in output]
        ctx.mark_non_differentiable(*(x for x, moves in zip(output, ctx.moves, strict=True) if not moves))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # torch.func.vjp calls this after its level has ended, and what was saved there still wears the level's wrapper.
        # Operators look through a dead wrapper; the Functions inside `fn` would not.
        saved = unwrap_dead_wrappers(ctx.saved_tensors)
        values, indices = saved[: ctx.count], saved[ctx.count :]
        moving = [i for i, x in enumerate(values) if x.is_floating_point()]

        def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(moving, floats, strict=True))
            return tuple(x for x in ctx.fn(*(given.get(i, x) for i, x in enumerate(values))) if x.is_floating_point())

        with contextlib.ExitStack() as stack:  # this may run on another thread, where nothing is bound
            for axis, index in zip(ctx.axes, indices, strict=True):
                stack.enter_context(bind(replace(axis, index=index)))
            _, vjp = cast(Any, torch.func.vjp)(of_floats, *(values[i] for i in moving))
            found = vjp(
                tuple(g for g, moves in zip(cotangents, ctx.moves, strict=True) if moves),
                retain_graph=torch.is_grad_enabled(),  # a second graph only where one is wanted
            )
        grads = dict(zip(moving, found, strict=True))
        return None, None, None, *(grads.get(i) for i in range(len(values))), *(None for _ in indices)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], fn: Any, axes: Any, count: int, *operands: Tensor) -> Any:
        value_dims, index_dims = in_dims[3 : 3 + count], in_dims[3 + count :]
        mine = [axis for axis, dim in zip(axes, index_dims, strict=True) if dim is not None]
        if not mine:
            raise ValueError(
                "rematerialize: it lies inside a vmap that is no axis of fcp.simulate; leave remat off there, or write "
                "the batch dimension out"
            )
        (axis,) = mine
        dims: list[int | None] = []

        def below(*values: Tensor) -> tuple[Tensor, ...]:
            out, found = map_ranks(fn, axis.name, axis.size, values, value_dims, axis.used)
            dims[:] = found
            return tuple(out)

        kept = [(a, index) for a, index in zip(axes, operands[count:], strict=True) if a is not axis]
        out = _Remat.apply(below, tuple(a for a, _ in kept), count, *operands[:count], *(i for _, i in kept))
        return out, tuple(dims)

"""Rematerialisation: keep a layer's inputs, compute the layer again in backward (Chen et al. 2016, section 3).

`torch.utils.checkpoint` rests on saved-tensor hooks, which torch.func does not run. So here it is a Function: forward
runs `fn` without a graph and saves the inputs, backward calls `torch.func.vjp` of `fn` on them.

Under `simulate` the inputs are batched over the ranks and the Function has to say how it vmaps: it binds the same
axis again around `fn` one level below. At the bottom it therefore saves plain tensors, and its backward replays the
function together with its map. The rank indices are operands, which is how the rule knows whose level it is at.

What is kept beside the inputs is the policy's: "layer" keeps nothing but a few numbers a token, "attention" also what
attention gave, so that its kernel does not run again (`_kept.py`). Inside a function that is rematerialised already,
doing it again saves nothing more, unless it is done to parts one after the other: a nested one is the plain call where
`nested` does not say otherwise.

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
from fcp._host import to_host
from fcp._kept import Tape
from fcp._simulate import map_ranks
from fcp.axes import Axis, bind, bound

__all__ = ["POLICIES", "in_tiles_of_tokens", "rematerialize"]

POLICIES = {"layer": frozenset({"loss"}), "attention": frozenset({"loss", "attention"})}
"""What a replay reads instead of computing it, by the policy's name."""

_replaying: ContextVar[bool] = ContextVar("fcp_rematerializing", default=False)


def rematerialize(
    fn: Callable[..., Any], *, policy: str = "layer", offload: bool = False, nested: bool = False
) -> Callable[..., Any]:
    """`fn` with the same values and gradients, whose backward computes it again instead of keeping what it computed.

    (Chen et al. 2016, section 3.)

    Args:
        fn: a function of pytrees to a pytree; it closes over no tensor.
        policy: "layer" computes all of it again; "attention" keeps the output of `fcp.attention` and the log-sum-exp
            of its rows, and computes the rest.
        offload: the differentiated arguments, except those of the first (the parameters), lie in pinned host memory
            until backward. They must be on a CUDA device, and differentiated by `fcp.value_and_grad` or `backward`.
        nested: also within a function that is rematerialised already. That pays where `fn` is one of several parts.

    Returns:
        A function of the same signature. Under `torch.func.grad` and `fcp.value_and_grad`, outside or inside
        `simulate`, nothing but its arguments lives until backward.

    Raises:
        ValueError: an unknown policy; when called, if `fn` closes over a tensor that is being differentiated or varies
            between ranks, if the call lies under a `torch.func.vmap` that is no axis of `simulate`, or if what is to be
            offloaded is on the host already or under a derivative of torch.func.
    """
    if policy not in POLICIES:
        raise ValueError(f"rematerialize: policy={policy!r}; it is one of {', '.join(map(repr, POLICIES))}")

    def rematerialized(*args: Any) -> Any:
        if _replaying.get() and not nested:
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
        tape = Tape(POLICIES[policy])

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal out_spec
            given = iter(values)
            whole = [next(given) if here else x for here, x in zip(is_tensor, rest, strict=True)]
            token = _replaying.set(True)
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(tape.around())
                    for axis in single:
                        stack.enter_context(bind(axis))
                    leaves, out_spec = pytree.flatten(fn(*pytree.unflatten(spec, whole)))
            finally:
                _replaying.reset(token)
            out[:] = [None if isinstance(x, Tensor) else x for x in leaves]  # keeps no tensor alive
            return tuple(x for x in leaves if isinstance(x, Tensor))

        axes = tuple(replace(axis, index=None) for axis in live)
        apart = sum(isinstance(x, Tensor) for x in pytree.leaves(args[0])) if offload else len(tensors)
        how = _How(axes, len(tensors), apart)
        given = iter(_Remat.apply(flat, how, *tensors, *(axis.index for axis in live)))
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


@dataclasses.dataclass(frozen=True)
class _How:
    """The axes still to bind; the number of operands that are arguments of the function (the rest are the axes' rank
    indices); from which of them on those that are differentiated go to the host."""

    axes: tuple[Axis, ...]
    count: int
    apart: int


class _Remat(Function):
    """(fn, how, *tensors, *the axes' rank indices) -> fn(*tensors)."""

    @staticmethod
    def forward(fn: Callable[..., tuple[Tensor, ...]], how: _How, *operands: Tensor) -> Any:
        # A Function may not return an operand itself.
        return tuple(x.view_as(x) if any(x is y for y in operands) else x for x in fn(*operands[: how.count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fn, ctx.how, *operands = inputs
        ctx.on_host = {i: to_host(operands[i]) for i in _to_move(ctx.how, operands)}
        ctx.save_for_backward(*(None if i in ctx.on_host else x for i, x in enumerate(operands)))
        ctx.moves = [x.is_floating_point() for x in output]
        ctx.mark_non_differentiable(*(x for x, moves in zip(output, ctx.moves, strict=True) if not moves))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # torch.func.vjp calls this after its level has ended, and what was saved there still wears the level's wrapper.
        # Operators look through a dead wrapper; the Functions inside `fn` would not.
        saved = list(unwrap_dead_wrappers(ctx.saved_tensors))
        if ctx.on_host and torch.is_grad_enabled():
            raise ValueError(_WITHOUT_GRAPH)
        for i, x in ctx.on_host.items():
            saved[i] = x.back()
        count = ctx.how.count
        values, indices = saved[:count], saved[count:]
        moving = [i for i, x in enumerate(values) if x.is_floating_point()]

        def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(moving, floats, strict=True))
            return tuple(x for x in ctx.fn(*(given.get(i, x) for i, x in enumerate(values))) if x.is_floating_point())

        with contextlib.ExitStack() as stack:  # this may run on another thread, where nothing is bound
            for axis, index in zip(ctx.how.axes, indices, strict=True):
                stack.enter_context(bind(replace(axis, index=index)))
            _, vjp = cast(Any, torch.func.vjp)(of_floats, *(values[i] for i in moving))
            found = vjp(
                tuple(g for g, moves in zip(cotangents, ctx.moves, strict=True) if moves),
                retain_graph=torch.is_grad_enabled(),  # a second graph only where one is wanted
            )
        grads = dict(zip(moving, found, strict=True))
        return None, None, *(grads.get(i) for i in range(len(values))), *(None for _ in indices)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], fn: Any, how: _How, *operands: Tensor) -> Any:
        axes, count = how.axes, how.count
        value_dims, index_dims = in_dims[2 : 2 + count], in_dims[2 + count :]
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
        rest = replace(how, axes=tuple(a for a, _ in kept))
        out = _Remat.apply(below, rest, *operands[:count], *(i for _, i in kept))
        return out, tuple(dims)


_WITHOUT_GRAPH = (
    "rematerialize: inputs are offloaded to the host under a derivative of torch.func, or under one of higher order, "
    "whose graph keeps them on the device. Take first derivatives by fcp.value_and_grad, outside of simulate; or leave "
    "offload off."
)


def _to_move(how: _How, operands: list[Tensor]) -> list[int]:
    """Which operands go to the host."""
    if how.apart == how.count:
        return []
    if any(_functorch.is_functorch_wrapped_tensor(x) for x in operands):
        raise ValueError(_WITHOUT_GRAPH)
    found = [i for i in range(how.apart, how.count) if operands[i].requires_grad]
    on_host = [operands[i].device for i in found if operands[i].device.type != "cuda"]
    if on_host:
        raise ValueError(
            f"rematerialize: offload=True, and the input is on {on_host[0]}: it is on the host already, and a copy "
            f"would only cost memory. Leave offload off."
        )
    return found


def in_tiles_of_tokens(fn: Callable[..., Tensor], params: Any, x: Tensor, tile: int) -> Tensor:
    """fn(params, x [batch, seq, width]), `tile` tokens at a time, each tile computed again in backward.

    For a function of each token alone. What it computes on the way lives for one tile; the tiles' gradients of `params`
    are added up. It works so within a layer that is rematerialised too.
    """
    length = max(1, tile // x.shape[0])
    if x.shape[1] <= length:
        return fn(params, x)
    part = rematerialize(fn, nested=True)
    return torch.cat([part(params, each) for each in x.split(length, dim=1)], dim=1)

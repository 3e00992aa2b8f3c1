"""`value_and_grad`: JAX's name, torch.func.grad's values, plain backward's memory.

`torch.func.grad` builds the graph of the gradient itself, so every intermediate of the backward lives until the call
ends: 2.1 to 2.4 times the memory of `backward` on a language model. Who trains takes one derivative and wants that
memory back. Two ways lead there, and which one is right depends only on what surrounds the call:

- nothing of torch.func around it: detached leaves and `torch.autograd.grad`;
- inside a `simulate` (each rank differentiates its own function, as a process does): `torch.func.vjp` without a graph.

Inside, the second type rule is enforced: the gradient of a parameter that every rank holds alike must be one that every
rank holds alike. If it is not, a `pvary` is missing, and on processes the copies of that parameter would drift apart.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch._C._functorch as _functorch
from torch import Tensor

from fcp import pytree
from fcp.axes import varying
from fcp.typing import Output, Params

__all__ = ["value_and_grad"]


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Params]]:
    """(params, *rest) -> (fn(params, *rest), gradients of the loss in params), for one derivative at plain cost.

    Args:
        fn: returns a scalar, or an `Output` whose `loss` is differentiated.

    Returns:
        A function that gives what `fn` gives, detached, and a pytree of gradients like `params`: each of the leaf's
        shape and dtype, zeros for a leaf that the loss does not depend on, exactly as `torch.func.grad`. Integer
        leaves get None. No graph is kept, except where a `torch.func.grad` around this call is to differentiate again.

    Raises:
        ValueError: the loss is None (a batch without labels), not a scalar, or, inside `simulate`, a gradient varies
            over an axis over which its parameter does not.
    """

    @functools.wraps(fn, updated=())
    def wrapped(params: Params, *rest: Any) -> tuple[Any, Params]:
        found, spec = pytree.flatten(params)
        moving = [i for i, x in enumerate(found) if x.is_floating_point()]

        def of_floats(*floats: Tensor) -> tuple[Tensor, Any]:
            given = dict(zip(moving, floats, strict=True))
            out = fn(pytree.unflatten(spec, [given.get(i, x) for i, x in enumerate(found)]), *rest)
            return _loss(out), out

        floats = [found[i] for i in moving]
        inside = _functorch.peek_interpreter_stack() is not None
        value, grads = (_within if inside else _plainly)(of_floats, floats)
        result: list[Tensor | None] = [None] * len(found)
        for i, g in zip(moving, grads, strict=True):
            result[i] = g
        if inside:
            _check_types(pytree.paths(params), found, result)
        return value, pytree.unflatten(spec, result)

    return wrapped


def _plainly(of_floats: Callable[..., Any], floats: list[Tensor]) -> tuple[Any, list[Tensor]]:
    with torch.enable_grad():
        floats = [x.detach().requires_grad_() for x in floats]
        loss, out = of_floats(*floats)
        if not loss.requires_grad:
            return out, [torch.zeros_like(x) for x in floats]
        grads = torch.autograd.grad(loss, floats, allow_unused=True, materialize_grads=True)
    return pytree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, out), list(grads)


def _within(of_floats: Callable[..., Any], floats: list[Tensor]) -> tuple[Any, list[Tensor]]:
    out: Any = None
    spec: Any = None

    def with_aux(*floats: Tensor) -> tuple[Tensor, Any]:
        nonlocal spec
        loss, out = of_floats(*floats)
        found, spec = pytree.flatten(out)  # torch.func walks torch's own pytrees: hand it a list
        return loss, found

    loss, vjp, out = cast(Any, torch.func.vjp)(with_aux, *floats, has_aux=True)
    # A torch.func.grad around this call differentiates these gradients; without their graph it would find zeros.
    levels = _functorch.get_interpreter_stack() or []
    again = any(level.key() == _functorch.TransformType.Grad for level in levels)
    grads = vjp(torch.ones_like(loss), retain_graph=again, create_graph=again)
    return pytree.unflatten(spec, out), list(grads)


def _loss(out: Any) -> Tensor:
    loss = out.loss if isinstance(out, Output) else out
    if loss is None:
        raise ValueError("value_and_grad: the loss is None; give the batch labels")
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"value_and_grad: fn gave {what}; it must give a scalar loss or an Output")
    return loss


def _check_types(paths: list[str], params: list[Tensor], grads: list[Tensor | None]) -> None:
    wrong: dict[str, list[str]] = {}
    for path, x, g in zip(paths, params, grads, strict=True):
        for name in frozenset() if g is None else varying(g) - varying(x):
            wrong.setdefault(name, []).append(path or "the parameter")
    for name, leaves in wrong.items():
        raise ValueError(
            f"value_and_grad: the gradient of {', '.join(leaves[:4])}{', ...' if len(leaves) > 4 else ''} differs "
            f"between the ranks of axis {name!r}, and the parameter does not: each rank has only its own part of the "
            f"sum. Put fcp.pvary(parameter, {name!r}) before the work that differs between the ranks."
        )

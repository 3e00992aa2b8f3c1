"""Function: torch's autograd.Function without what it costs to call one.

Every Function of fcp has a `setup_context`, because torch.func asks for it. Where that is so, torch's `apply` fills in
the default arguments of `forward`, and to find them inspects and binds its signature anew at each call. That takes
longer than a small operation itself, and a step of a small model has two hundred calls: 4 of 20 ms of overhead.

No `forward` here has a default argument. Python looks for a signature that a function carries (`__signature__`, PEP
362) before it inspects one, so each subclass leaves one there that binds all arguments as they come. What `apply` does
is otherwise torch's own.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["Function"]


class Function(torch.autograd.Function):
    """`torch.autograd.Function`; subclasses define forward, without default arguments, setup_context and the rest.

    Raises:
        TypeError: at the definition of a subclass whose forward has a default argument.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        forward: Any = cls.forward
        signature = _AsGiven(list(inspect.signature(forward).parameters.values()))
        if any(each.default is not each.empty for each in signature.parameters.values()):
            raise TypeError(f"{cls.__name__}.forward{signature}: default arguments are not filled in; write them out")
        forward.__signature__ = signature


class _AsGiven(inspect.Signature):
    """A signature whose `bind` hands the arguments back."""

    def bind(self, *args: Any) -> Any:  # type: ignore[override]
        return SimpleNamespace(args=args, kwargs={}, apply_defaults=lambda: None)

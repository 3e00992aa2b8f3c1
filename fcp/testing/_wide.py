"""Everything in float64: a module's own casts to float32 as well.

Many modules compute norms, softmaxes, routers or rotary tables in float32, whatever their parameters' dtype. In float64
that rounding is all that a comparison would see: two orders of summation that differ by 1e-16 before a cast may differ
by 6e-8 after it. `wide()` runs a module as if float32 were float64, so that a comparison can be held to what float64
can tell. Both sides of a comparison run under it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["wide"]


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Within it, a cast to float32 is one to float64, and new tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)

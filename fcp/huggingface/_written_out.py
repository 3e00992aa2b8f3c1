"""Attention that a module writes out itself, recognised by what it computes.

Older modules do not use transformers' attention interface: they multiply queries with keys, scale, add the mask, take
the softmax, and multiply with the values. Those five steps are attention whoever writes them, so they are followed. A
product of queries and keys is not computed at once but stands there as `Scores`; what may happen to scores on the way
to attention is listed below, and where their softmax meets the values, `Ops.attention` is called.

Nothing is assumed. Scores that something else happens to before they meet the mask (`Opaque`) become the tensor that
they stand for, and then adding the mask refuses, as it does without this file. After the mask, whatever is not listed
refuses. Old modules also carry a triangle of ones as a buffer; it is read, whole, for the window it says (`Triangle`),
since a slice of it would say nothing about what lies further back than the slice is long.

Left out: dropout of weights (refused above zero in training), and biases.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from fcp.axes import bare, batched
from fcp.huggingface._interfaces import Opaque, attend

__all__ = ["Following", "Triangle", "read_triangles"]

PRODUCTS = ("matmul", "__matmul__", "bmm")


class Triangle:
    """A buffer [..., n, n] of ones on and below the diagonal, or in a band there: its window, and nothing else."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getitem__(self, index: Any) -> "Triangle":
        return self

    def to(self, *args: Any, **kwargs: Any) -> "Triangle":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name == "where" and len(args) == 3 and isinstance(args[0], cls) and isinstance(args[1], Scores):
            return args[1].within(args[0], args[2])
        raise ValueError(_refusal(f"{name} with a triangle of ones"))


def read_triangles(module: nn.Module) -> None:
    """Replaces the triangles among the buffers of a private copy by what they say."""
    for each in module.modules():
        for name, x in list(each._buffers.items()):
            if x is None or x.dim() < 2 or not 1 < x.shape[-1] == x.shape[-2] == x.numel() ** 0.5:
                continue
            ones, n = x.reshape(x.shape[-2:]) != 0, x.shape[-1]
            window = int(ones[-1].sum())
            band = torch.ones(n, n, dtype=torch.bool, device=x.device).tril() & ~torch.ones_like(ones).tril(-window)
            if window and torch.equal(ones, band):
                del each._buffers[name]
                setattr(each, name, Triangle(None if window == n else window))


class Scores:
    """queries [..., seq, dim] times keys^T [..., dim, seq] times a scale; not computed, then masked, normalised."""

    def __init__(self, who: Any, queries: Tensor, keys: Tensor, scale: float = 1.0, shape: Any = None) -> None:
        self._who, self._queries, self._keys, self._scale = who, queries, keys, scale
        lead = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        self.shape = torch.Size((*lead, queries.shape[-2], keys.shape[-1])) if shape is None else shape
        self.dtype, self.device, self.ndim = queries.dtype, queries.device, len(self.shape)
        self._mask: Opaque | None = None
        self._triangle: Triangle | None = None
        self._normalised = False

    def _changed(self, **changes: Any) -> "Scores":
        new = Scores(self._who, self._queries, self._keys, self._scale, self.shape)
        new._mask, new._triangle, new._normalised = self._mask, self._triangle, self._normalised
        for name, value in changes.items():
            setattr(new, name, value)
        new.ndim = len(new.shape)
        return new

    # --- on the way to attention

    def times(self, number: float) -> "Scores":
        if self._mask is not None:
            raise ValueError(_refusal("a factor after the mask"))
        return self._changed(_scale=self._scale * number)

    def within(self, triangle: Triangle, other: Any) -> "Scores":
        number = _number(other)
        if self._normalised or number is None or number > -1e4:
            raise ValueError(_refusal("a triangle of ones that does not mask"))
        return self._changed(_triangle=triangle)

    def masked(self, mask: Opaque) -> "Scores":
        if self._mask is not None:
            raise ValueError(_refusal("two masks"))
        return self._changed(_mask=mask)

    def softmax(self, dim: int = -1, **_: Any) -> "Scores":
        if self._mask is None:
            return torch.softmax(self.tensor(), dim)  # type: ignore[return-value]
        if self._normalised or dim % self.ndim != self.ndim - 1:
            raise ValueError(_refusal("a softmax over another dim"))
        return self._changed(_normalised=True)

    def view(self, *shape: Any) -> Any:
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        wanted = torch.empty(self.shape, device="meta").view(shape).shape
        if wanted[-2:] == self.shape[-2:] and len(wanted) in (3, 4):
            return self._changed(shape=wanted)
        if self._mask is None:
            return self.tensor().reshape(shape)
        raise ValueError(_refusal("another shape"))

    reshape = view

    def to(self, *args: Any, **kwargs: Any) -> "Scores":
        return self

    float = type_as = type = contiguous = clone = to

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def attend(self, values: Tensor) -> Tensor:
        """The end of it: [..., seq, dim] by `Ops.attention`."""
        if self._mask is None or not self._normalised:
            raise ValueError(_refusal("a product without a mask or a softmax"))
        mask = self._mask
        if self._triangle is not None and self._triangle.window is not None:
            mask = mask.narrowed(self._triangle.window)

        # Some multiply queries and keys in float32 and cast the weights back: the widest of the three serves all.
        wide = torch.promote_types(self._queries.dtype, values.dtype)

        def heads(x: Tensor) -> Tensor:
            return (x if x.dim() == 4 else x.unflatten(0, (mask.shape[0], -1))).to(wide)

        keys = self._keys.transpose(-1, -2)
        out, _ = attend(self._who, heads(self._queries), heads(keys), heads(values), mask, scaling=self._scale)
        out = out.transpose(1, 2).to(values.dtype)
        return out if values.dim() == 4 else out.flatten(0, 1)

    def tensor(self) -> Tensor:
        """What it stands for."""
        if self._mask is not None or self._triangle is not None:
            raise ValueError(_refusal("an operation that is not known"))
        return ((self._queries @ self._keys) * self._scale).reshape(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    # --- as functions and operators

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        first, second = (args[0] if args else None), (args[1] if len(args) > 1 else None)
        if isinstance(first, cls):
            if name in PRODUCTS and first._normalised and isinstance(second, Tensor):
                return first.attend(second)
            if name == "softmax":
                return first.softmax(kwargs.get("dim", second))
            if name == "dropout" and first._mask is not None:
                p = kwargs.get("p", second if second is not None else 0.5)
                if p and kwargs.get("training", args[2] if len(args) > 2 else True):
                    raise ValueError(_refusal(f"dropout of weights ({p})"))
                return first
            if name in ("max", "maximum") and first._mask is not None and _number(second) == _lowest(first.dtype):
                return first  # a floor at the smallest number there is
        plain = [x.tensor() if isinstance(x, cls) else x for x in args]
        return function(*plain, **{key: x.tensor() if isinstance(x, cls) else x for key, x in kwargs.items()})

    def __add__(self, other: Any) -> Any:
        return self.masked(other) if isinstance(other, Opaque) else self.tensor() + other

    def __mul__(self, other: Any) -> Any:
        number = _number(other)
        return self.tensor() * other if number is None else self.times(number)

    def __truediv__(self, other: Any) -> Any:
        number = _number(other)
        return self.tensor() / other if not number else self.times(1 / number)

    def __matmul__(self, values: Tensor) -> Tensor:
        return self.attend(values) if self._normalised else self.tensor() @ values

    __radd__, __rmul__ = __add__, __mul__


class Following(TorchFunctionMode):
    """Within it, products of a module `who` that look like queries and keys stand there as `Scores`."""

    def __init__(self, who: Any) -> None:
        super().__init__()
        self._who = who

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in PRODUCTS and not kwargs and _squares(*args[:2]):
            return Scores(self._who, args[0], args[1])
        if name == "baddbmm" and len(args) == 3 and _squares(*args[1:]) and _nothing(args[0]):
            return Scores(self._who, args[1], args[2], float(kwargs.get("alpha", 1)))
        return func(*args, **kwargs)


def _squares(*pair: Any) -> bool:
    """Whether these are [..., n, d] and [..., d, n]."""
    if len(pair) != 2 or not all(isinstance(x, Tensor) and x.dim() in (3, 4) for x in pair):
        return False
    return pair[0].dim() == pair[1].dim() and pair[0].shape[-2] == pair[1].shape[-1]


def _nothing(x: Any) -> bool:
    """Whether it is a tensor of zeros that all ranks hold alike."""
    if not isinstance(x, Tensor) or batched(x):
        return False
    with temporarily_clear_interpreter_stack():
        return not bool(bare(x).any())


def _number(x: Any) -> float | None:
    """A number, or a tensor that holds one that all ranks hold alike and that is no parameter."""
    if isinstance(x, int | float):
        return float(x)
    if not isinstance(x, Tensor) or x.dim() or batched(x) or bare(x).requires_grad:
        return None
    with temporarily_clear_interpreter_stack():
        found = float(bare(x))
    return found if math.isfinite(found) else None


def _lowest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)


def _refusal(what: str) -> str:
    return f"huggingface: the module writes out its attention, with {what} in it, which is not known here"

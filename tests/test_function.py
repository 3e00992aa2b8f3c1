"""Function: what torch's autograd.Function computes, without the inspection at each call."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp._function import Function


class _Scaled(Function):
    """x, factor -> factor x."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _Scaled.apply(g, ctx.factor), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, factor: float) -> tuple[Tensor, int]:
        return _Scaled.apply(x, factor), in_dims[0]


def test_it_differentiates_and_vmaps_as_torch_does() -> None:
    """A Function that is called more cheaply and no longer reaches torch's own apply: grad, vmap, or their product."""
    x = torch.arange(12, dtype=torch.float64).view(3, 4)  # no rounding
    assert torch.equal(_Scaled.apply(x, 3.0), 3 * x)
    grads = torch.func.vmap(torch.func.grad(lambda row: (_Scaled.apply(row, 3.0) ** 2).sum()))(x)
    assert torch.equal(grads, 18 * x)
    x.requires_grad_()
    (plain,) = torch.autograd.grad((_Scaled.apply(x, 3.0) ** 2).sum(), x)
    assert torch.equal(plain, grads)


def test_its_signature_is_not_inspected_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: `__signature__` is left off, and each of 200 calls a step inspects `forward` anew."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("inspected")

    monkeypatch.setattr(inspect, "_signature_from_function", refuse)
    assert torch.equal(_Scaled.apply(torch.ones(2), 2.0), torch.full((2,), 2.0))


def test_a_default_argument_is_refused() -> None:
    """A default that nobody fills in, so that forward gets one argument too few."""
    with pytest.raises(TypeError, match="default arguments"):

        class Defaulted(Function):
            @staticmethod
            def forward(x: Tensor, factor: float = 1.0) -> Tensor:
                return x * factor

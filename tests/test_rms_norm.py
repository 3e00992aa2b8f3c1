"""fcp.rms_norm: the formula, at every level of ranks, with its derivatives, keeping x alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from tests.tolerances import FLOAT64
from tests.toys import LEVELS, error_at_two_levels, worst_error

X = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
EPS = 0.1
"""Large, so that one that is misplaced shows."""


def formula(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return fcp.rms_norm(x, weight, EPS)


def gradients(of: Any, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return torch.func.grad(lambda x, w: torch.sin(of(x, w)).sum(), (0, 1))(x, w)


@pytest.mark.parametrize("x", [X, X[0, 0], X.transpose(1, 2), X.mT.contiguous().mT, X[:0]], ids=range(5))
def test_is_its_formula(x: Tensor) -> None:
    """One row alone, rows that do not lie one after the other, none."""
    w = W if x.shape[-1] == 4 else torch.arange(6.0, dtype=torch.float64)
    assert fcp.relative_error(formula(x, w), norm(x, w)) < FLOAT64
    assert worst_error(gradients(formula, x, w), gradients(norm, x, w)) < FLOAT64


def test_one_gradient_alone() -> None:
    """A frozen weight, or an input that nothing is asked of."""
    for argument in (0, 1):
        found, wanted = (
            torch.func.grad(lambda x, w, of=of: torch.sin(of(x, w)).sum(), argument)(X, W) for of in (norm, formula)
        )
        assert fcp.relative_error(wanted, found) < FLOAT64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_exact_to_their_rounding(dtype: torch.dtype) -> None:
    """A mean in bfloat16, a result or a gradient of another dtype than its operand's; as exact as the formula."""
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype) for shape in ((64, 512), (512,)))
    exact = (formula(x.double(), w.double()), *gradients(formula, x.double(), w.double()))
    plain, found = ((of(x, w), *gradients(of, x, w)) for of in (formula, norm))
    for right, one, other in zip(exact, plain, found, strict=True):
        assert other.dtype == dtype
        assert fcp.relative_error(right, other) < 1.5 * fcp.relative_error(right, one) + 1e-7


def test_a_wider_weight_widens() -> None:
    """bfloat16 activations under a float32 weight: as the formula, not rounded back."""
    x, w = X.bfloat16(), W.float()
    assert norm(x, w).dtype == torch.float32
    assert torch.equal(norm(x, w), formula(x, w))
    assert [g.dtype for g in gradients(norm, x, w)] == [torch.bfloat16, torch.float32]


DIMS = [(x, w) for x in (None, 0, 1, -1) for w in (None, 0, 1, -1) if (x, w) != (None, None)]


@pytest.mark.parametrize(("x_dim", "w_dim"), DIMS)
@pytest.mark.parametrize("inside", [False, True])
def test_vmap_is_a_loop(x_dim: int | None, w_dim: int | None, inside: bool) -> None:
    """A fold that pairs one rank's rows with another's weight, forward or backward."""
    x = X if x_dim is None else torch.stack([X, X * 2 + 1, X - 3], x_dim)
    w = W if w_dim is None else torch.stack([W, W * 3 - 1, W + 2], w_dim)

    def found(of: Any) -> tuple[Tensor, ...]:
        if inside:
            return torch.func.vmap(lambda x, w: gradients(of, x, w), (x_dim, w_dim))(x, w)
        return gradients(torch.func.vmap(of, (x_dim, w_dim)), x, w)

    assert worst_error(found(formula), found(norm)) < FLOAT64


@pytest.mark.parametrize("dims", LEVELS, ids=str)
def test_two_levels(dims: tuple[int | None, ...]) -> None:
    """Weights of one level laid along the other's."""
    assert error_at_two_levels(formula, norm, X, W, dims) < FLOAT64


def test_second_derivative() -> None:
    """A backward that takes the root for a constant."""

    def second(of: Any) -> Any:
        return torch.func.grad(lambda x, w: sum((g**2).sum() for g in gradients(of, x, w)), (0, 1))(X, W)

    assert worst_error(second(formula), second(norm)) < FLOAT64


def test_keeps_its_operands_alone() -> None:
    """A tensor of x's size that is kept beside x: one a norm, two norms a layer."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x, w)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4)])
def test_a_weight_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    """A weight that broadcasts: one number for all of the width, or a row for each of the batch."""
    with pytest.raises(ValueError, match=r"rms_norm: weight .* for x \(2, 6, 4\); it must be \[4\]"):
        norm(X, torch.ones(shape, dtype=torch.float64))

"""fcp.linear: torch's linear, at every level of ranks, and without an activation copied once a rank."""

from typing import Any

import pytest
import torch
from torch.nn.functional import linear as torch_linear

import fcp
from fcp import _linear
from tests.tolerances import FLOAT64
from tests.toys import LEVELS, error_at_two_levels, worst_error

X = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
B = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_is_torch_linear() -> None:
    """A transposed weight, or a bias that is dropped."""
    assert fcp.relative_error(torch_linear(X, W, B), fcp.linear(X, W, B)) < FLOAT64
    assert torch.equal(fcp.linear(X, W), torch_linear(X, W))


DIMS = [(x, w) for x in (None, 0, 1, -1) for w in (None, 0, 1, -1) if (x, w) != (None, None)]


@pytest.mark.parametrize(("x_dim", "w_dim"), DIMS)
@pytest.mark.parametrize("inside", [False, True])
def test_vmap_is_a_loop(x_dim: int | None, w_dim: int | None, inside: bool) -> None:
    """A fold that pairs one rank's activation with another's weight, forward or backward."""
    x = X if x_dim is None else torch.stack([X, X * 2 + 1, X - 3], x_dim)
    w = W if w_dim is None else torch.stack([W, W * 3 - 1, W + 2], w_dim)

    def gradients(of: Any, x: Any, w: Any) -> Any:
        return torch.func.grad(lambda x, w: torch.sin(of(x, w)).sum(), (0, 1))(x, w)

    if inside:
        found = torch.func.vmap(lambda x, w: gradients(fcp.linear, x, w), (x_dim, w_dim))(x, w)
        wanted = torch.func.vmap(lambda x, w: gradients(torch_linear, x, w), (x_dim, w_dim))(x, w)
    else:
        found = gradients(torch.func.vmap(fcp.linear, (x_dim, w_dim)), x, w)
        wanted = gradients(torch.func.vmap(torch_linear, (x_dim, w_dim)), x, w)
    assert worst_error(wanted, found) < FLOAT64


@pytest.mark.parametrize("dims", LEVELS, ids=str)
def test_two_levels(dims: tuple[int | None, ...]) -> None:
    """Groups of one level mistaken for rows of the other."""
    assert error_at_two_levels(torch_linear, fcp.linear, X, W, dims) < FLOAT64


def test_second_derivative() -> None:
    """A backward that is right once and cannot be differentiated again."""

    def second(of: Any) -> Any:
        first = torch.func.grad(lambda x, w: torch.sin(of(x, w)).sum(), (0, 1))
        return torch.func.grad(lambda x, w: sum((g**2).sum() for g in first(x, w)), (0, 1))(X, W)

    assert worst_error(second(torch_linear), second(fcp.linear)) < FLOAT64


def test_ranks_share_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation copied once a tensor-parallel rank: what reaches the bottom is the unsharded product."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    forward = _linear._Linear.forward

    def watched(x: Any, weight: Any) -> Any:
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return forward(x, weight)

    monkeypatch.setattr(_linear._Linear, "forward", staticmethod(watched))

    def column_parallel(x: Any, w: Any) -> Any:
        y = fcp.linear(fcp.pvary(fcp.shard(x, "cp", dim=1), "tp"), fcp.pvary(fcp.shard(w, "tp", dim=0), "cp"))
        return fcp.unshard(fcp.unshard(y, "tp", dim=-1), "cp", dim=1)

    y = fcp.simulate(column_parallel, cp=2, tp=2)(X, W)
    assert fcp.relative_error(torch_linear(X, W), y) < FLOAT64
    assert seen == [((2, 2, 3, 4), (8, 4))]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 5)])
def test_a_weight_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    """A batch of weights, which would be taken for groups; a backend's words about two matrices in place of ours."""
    with pytest.raises(ValueError, match=r"linear: weight .* for x \(2, 5\); it must be \[out, 5\]"):
        fcp.linear(torch.zeros(2, 5), torch.zeros(shape))

"""Expert compute against a loop over tokens: values, every gradient, under vmap in both modes, empty experts."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import _grouped, pytree
from fcp._experts import experts_over
from tests.tolerances import FLOAT64
from tests.toys import worst_error

EXPERTS, HIDDEN, WIDTH, K = 6, 5, 7, 2
LOADS = ("uneven", "all to one", "one unused", "some choose none")


def expert(rows: Tensor, params: Any, project: Any) -> Tensor:
    return project(torch.tanh(project(rows, params["up"], params["up_bias"])), params["down"].mT, params["down_bias"])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def arguments(load: str, batch: int = 2, seq: int = 12) -> tuple[dict[str, Any], Tensor]:
    params = {
        "x": draw(batch, seq, HIDDEN, seed=1),
        "weights": draw(batch, seq, K, seed=2),
        "experts": {
            "up": draw(EXPERTS, WIDTH, HIDDEN, seed=3),
            "up_bias": draw(EXPERTS, WIDTH, seed=4),
            "down": draw(EXPERTS, WIDTH, HIDDEN, seed=5),
            "down_bias": draw(EXPERTS, HIDDEN, seed=6),
        },
    }
    scores = draw(batch, seq, EXPERTS, seed=7)
    if load == "one unused":
        scores[..., 4] = -100
    if load == "all to one":
        scores[..., 3] = 100
    indices = scores.topk(K).indices
    return params, torch.where(scores[..., :K] > 0, -1, indices) if load == "some choose none" else indices


def by_token(params: Any, indices: Tensor) -> Tensor:
    """The definition, a token and a choice at a time."""
    rows = []
    for x, weights, chosen in zip(
        params["x"].flatten(0, 1), params["weights"].flatten(0, 1), indices.flatten(0, 1).tolist(), strict=True
    ):
        y = torch.zeros_like(x)
        for weight, index in zip(weights, chosen, strict=True):
            if index >= 0:
                p = pytree.map(lambda leaf, index=index: leaf[index], params["experts"])
                y = y + weight * (torch.tanh(p["up"] @ x + p["up_bias"]) @ p["down"] + p["down_bias"])
        rows.append(y)
    return torch.stack(rows).view_as(params["x"])


def local(params: Any, indices: Tensor) -> Tensor:
    return fcp.LOCAL.experts(params["x"], params["weights"], indices, params["experts"], expert)


def scalar(y: Tensor) -> Tensor:
    return (torch.sin(y) * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum()


@pytest.mark.parametrize("load", LOADS)
def test_equals_a_loop_over_tokens(load: str) -> None:
    """Rows put back in another order, a weight at another row, a bias of another expert, a segment off by one."""
    params, indices = arguments(load)
    assert worst_error(by_token(params, indices), local(params, indices)) < FLOAT64
    expected = torch.func.grad(lambda p: scalar(by_token(p, indices)))(params)
    assert worst_error(expected, torch.func.grad(lambda p: scalar(local(p, indices)))(params)) < FLOAT64
    assert worst_error(expected, fcp.value_and_grad(lambda p: scalar(local(p, indices)))(params)[1]) < FLOAT64


def test_an_expert_that_nobody_chose_has_a_gradient_of_zeros() -> None:
    """A missing gradient, which an optimiser would skip, or whatever memory held."""
    params, indices = arguments("one unused")
    grads = fcp.value_and_grad(lambda p: scalar(local(p, indices)))(params)[1]["experts"]
    assert all(bool((g[4] == 0).all()) and bool((g[3] != 0).any()) for g in pytree.leaves(grads))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("inside", [False, True])
def test_ranks_with_other_tokens(load: str, inside: bool) -> None:
    """Tokens of one rank that meet another rank's choices; experts' gradients of one rank alone."""
    params, indices = arguments(load)

    def split(p: Any) -> Tensor:
        mine = {name: fcp.shard(p[name], "cp", dim=1) for name in ("x", "weights")}
        mine["experts"] = pytree.map(lambda leaf: fcp.pvary(leaf, "cp"), p["experts"])
        y = fcp.unshard(local(mine, fcp.shard(indices, "cp", dim=1)), "cp", dim=1)
        return scalar(y)

    expected = torch.func.grad(lambda p: scalar(by_token(p, indices)))(params)
    if inside:
        found = fcp.simulate(fcp.value_and_grad(split), cp=3)(params)[1]
    else:
        found = torch.func.grad(fcp.simulate(split, cp=3))(params)
    assert worst_error(expected, found) < FLOAT64


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_with_other_experts(inside: bool) -> None:
    """Choices of one rank that count another's experts: each rank has two of six, the others' choices are none."""
    params, indices = arguments("uneven")

    def split(p: Any) -> Tensor:
        mine = {name: fcp.pvary(p[name], "ep") for name in ("x", "weights")}
        mine["experts"] = pytree.map(lambda leaf: fcp.shard(leaf, "ep", dim=0), p["experts"])
        here = indices - 2 * fcp.axis_index("ep")
        return scalar(fcp.psum(local(mine, torch.where((here >= 0) & (here < 2), here, -1)), "ep"))

    expected = torch.func.grad(lambda p: scalar(by_token(p, indices)))(params)
    if inside:
        found = fcp.simulate(fcp.value_and_grad(split), ep=3)(params)[1]
    else:
        found = torch.func.grad(fcp.simulate(split, ep=3))(params)
    assert worst_error(expected, found) < FLOAT64


@pytest.mark.parametrize("own_tokens", [True, False])
def test_models_that_a_caller_maps_over(own_tokens: bool) -> None:
    """A caller's own vmap, two deep, over models with experts of their own: choices that count another model's."""
    params, indices = arguments("some choose none")
    several = pytree.map(
        lambda leaf: torch.stack([torch.stack([leaf * (1 + i + 3 * j) for i in range(3)]) for j in range(2)]), params
    )
    if not own_tokens:
        several = {**several, "x": params["x"], "weights": params["weights"]}
    dims: Any = {"x": 0 if own_tokens else None, "weights": 0 if own_tokens else None, "experts": 0}
    found = torch.func.vmap(torch.func.vmap(lambda p: local(p, indices), (dims,)), (dims,))(several)
    for j in range(2):
        for i in range(3):
            one = {n: pytree.map(lambda x, j=j, i=i: x[j, i], t) if dims[n] == 0 else t for n, t in several.items()}
            assert fcp.relative_error(by_token(one, indices), found[j, i]) < FLOAT64


def test_a_jacobian() -> None:
    """A gradient that a caller's own vmap runs batched."""
    params, indices = arguments("uneven", batch=1, seq=3)
    expected = torch.func.jacrev(lambda p: by_token(p, indices))(params)
    assert worst_error(expected, torch.func.jacrev(lambda p: local(p, indices))(params)) < FLOAT64


@pytest.mark.parametrize("load", ["uneven", "one unused"])
def test_the_grouped_product_is_the_loop(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segment ends, transposes or operands handed to torch's grouped product otherwise than to the loop."""
    x, counts = draw(24, 8, seed=1).float(), [9, 0, 15] if load == "one unused" else [5, 7, 12]
    weight, seen = draw(3, 12, 8, seed=2).float(), []

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return scalar(_grouped._Grouped.apply(x, weight, counts))

    loop = torch.func.grad_and_value(value, (0, 1))(x, weight)
    grouped_mm = _grouped.grouped_mm
    monkeypatch.setattr(_grouped, "GROUPED_ON", {"cpu"})
    monkeypatch.setattr(_grouped, "grouped_mm", lambda *a, **k: seen.append(1) or grouped_mm(*a, **k))
    grouped = torch.func.grad_and_value(value, (0, 1))(x, weight)
    assert len(seen) == 3  # the product, and its two gradients
    assert worst_error(list(loop[0]), list(grouped[0])) < 1e-5 and fcp.relative_error(loop[1], grouped[1]) < 1e-5


def test_refusals() -> None:
    """Shapes that do not fit, all named."""
    params, indices = arguments("uneven")
    odd = {**params["experts"], "up": params["experts"]["up"][:4]}
    with pytest.raises(ValueError, match=r"experts: parameters of .*'up': 4.*; x, weights and indices of shapes"):
        experts_over(params["x"], params["weights"][:, 1:], indices, odd, expert, ())

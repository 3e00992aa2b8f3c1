"""torch.optim's classes as pure pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree

ALL = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


def _tree(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"a": {"weight": draw(3, 4)}, "norm": [draw(4), draw(2)]}


@pytest.mark.parametrize("donate", [False, True], ids=["copied", "donated"])
@pytest.mark.parametrize("name", ALL)
def test_steps_are_those_of_torch(name: str, donate: bool) -> None:
    """A moment that is lost between steps, or a step count that starts anew: the second step differs."""
    cls = getattr(torch.optim, name)
    pure = fcp.optimizer(cls, lr=0.1, **({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}))
    expected = [torch.nn.Parameter(x.clone()) for x in pytree.leaves(_tree(0))]
    stateful = cls(expected, lr=0.1, **({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}))
    params = _tree(0)
    state = pure.init(params)
    for seed in range(1, 5):
        for x, g in zip(expected, pytree.leaves(_tree(seed)), strict=True):
            x.grad = g
        stateful.step()
        params, state = pure.update(params, _tree(seed), state, donate=donate)
    assert all(torch.equal(a, b) for a, b in zip(expected, pytree.leaves(params), strict=True))


def test_update_changes_nothing_it_was_given() -> None:
    """A moment or a parameter that is written in place; and a donation that copies all the same."""
    adam = fcp.optimizer(torch.optim.AdamW, lr=0.1)
    params, state = adam.update(_tree(0), _tree(1), adam.init(_tree(0)))
    grads = _tree(2)
    before = pytree.map(torch.clone, (params, grads, state))
    after, later = adam.update(params, grads, state)
    same = zip(pytree.leaves(before), pytree.leaves((params, grads, state)), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    again, once_more = adam.update(params, grads, state, donate=True)
    pairs = zip(pytree.leaves((after, later)), pytree.leaves((again, once_more)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert again["a"]["weight"].data_ptr() == params["a"]["weight"].data_ptr()
    assert all(not x.requires_grad for x in pytree.leaves((again, once_more)))


def test_schedule_and_weight_decay_by_path() -> None:
    """A schedule that is asked one step late; a decay that reaches the norms."""
    asked = []
    pure = fcp.optimizer(
        torch.optim.SGD,
        lr=lambda step: asked.append(step) or 1.0 / (step + 1),  # type: ignore[func-returns-value]
        weight_decay={"norm.*": 0.0, "*": 0.5},
    )
    asked.clear()
    params, zeros = _tree(0), pytree.map(torch.zeros_like, _tree(0))
    one, state = pure.update(params, zeros, pure.init(params))
    two, _ = pure.update(one, zeros, state)
    assert asked == [0, 1]
    assert torch.allclose(two["a"]["weight"], params["a"]["weight"] * 0.5 * 0.75, rtol=1e-12)
    assert torch.equal(two["norm"][0], params["norm"][0])


def test_a_leaf_without_gradient_stays() -> None:
    """Weight decay of a leaf that no gradient reached; an integer leaf that breaks the update."""
    params = {"w": torch.ones(2, dtype=torch.float64), "ids": torch.arange(3)}
    pure = fcp.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    after, _ = pure.update(params, {"w": torch.ones(2, dtype=torch.float64), "ids": None}, pure.init(params))
    assert torch.equal(after["ids"], params["ids"]) and not torch.equal(after["w"], params["w"])


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (torch.optim.LBFGS, {}, "calls the loss itself"),
        (torch.optim.SparseAdam, {}, "dense"),
        (torch.optim.Muon, {}, "looks at whole leaves"),
        (torch.optim.Adafactor, {}, "looks at whole leaves"),
        (torch.optim.SGD, {"betas": 1}, "does not take"),
        (torch.optim.AdamW, {"differentiable": True}, "not for a pure step"),
    ],
)
def test_refused(cls: Any, options: dict[str, Any], words: str) -> None:
    """An optimizer of whole matrices that runs on pieces, and says nothing."""
    with pytest.raises(ValueError, match=words):
        fcp.optimizer(cls, lr=0.1, **options)


@pytest.mark.parametrize("decay", [{"norm.*": 0.1}, {"nrm.*": 0.1, "*": 0.0}], ids=str)
def test_weight_decay_that_names_nothing_is_refused(decay: dict[str, float]) -> None:
    """A pattern with a slip of the pen, or a parameter that was forgotten."""
    with pytest.raises(ValueError, match="weight_decay"):
        fcp.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=decay).init(_tree(0))


def test_gradients_of_other_parameters_are_refused() -> None:
    """A gradient that is paired with another leaf, or broadcast over it."""
    pure = fcp.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="b is unknown"):
        pure.update({"a": torch.ones(2)}, {"a": torch.ones(1), "b": torch.ones(2)}, pure.init({"a": torch.ones(2)}))

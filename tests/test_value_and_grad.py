"""value_and_grad: torch.func.grad's values, at the cost of one derivative, alone and inside a simulation."""

import pytest
import torch

import fcp
from fcp import pytree
from tests.tolerances import EXACT, FLOAT64
from tests.toys import batch_of, gradient, tokens, toy, worst_error


def params_of_all_kinds():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "layers": [{"w": draw(3, 3), "b": draw(3)}, {"w": draw(3, 3), "b": draw(3)}],
        "half": draw(3, dtype=torch.bfloat16),
        "single": draw(3, dtype=torch.float32),
        "unused": draw(2, 2),
        "scalar": draw(),
    }


def loss_of(params, x):
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    x = x * params["half"].double() * params["single"].double()
    return (x * params["scalar"]).square().sum()


def on_ranks(params, x):
    params = pytree.map(lambda leaf: fcp.pvary(leaf, "a"), params)
    return fcp.psum(loss_of(params, fcp.shard(x, "a", dim=0)), "a")


X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
WAYS = {
    "alone": fcp.value_and_grad(loss_of),
    "around": fcp.value_and_grad(fcp.simulate(on_ranks, a=2)),
    "inside": fcp.simulate(fcp.value_and_grad(on_ranks), a=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_torch_func_grad(way):
    """Catches a gradient paired with another leaf, of another dtype, or missing where the loss ignores the leaf."""
    params = params_of_all_kinds()
    wanted, value = torch.func.grad_and_value(loss_of)(params, X)
    loss, grads = WAYS[way](params, X)
    assert fcp.relative_error(value, loss) <= FLOAT64
    assert pytree.paths(grads) == pytree.paths(params)
    for leaf, g, w in zip(*(pytree.leaves(tree) for tree in (params, grads, wanted)), strict=True):
        assert g.dtype == leaf.dtype and g.shape == leaf.shape
        assert fcp.relative_error(w, g) <= max(FLOAT64, torch.finfo(g.dtype).eps)
    assert torch.equal(grads["unused"], torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("way", WAYS)
def test_it_keeps_no_graph(way):
    """Catches results that hold the whole forward, and gradients written into the caller's parameters."""
    params = pytree.map(lambda x: x.requires_grad_(), params_of_all_kinds())
    loss, grads = WAYS[way](pytree.map(torch.Tensor.detach, params) if way == "inside" else params, X)
    for result in (loss, *pytree.leaves(grads)):
        assert result.grad_fn is None and not result.requires_grad
    assert all(leaf.grad is None and leaf.requires_grad for leaf in pytree.leaves(params))


@pytest.mark.parametrize("way", WAYS)
def test_integer_leaves_get_none(way):
    """Catches a table of ids in the parameters that stops the derivative of all others."""
    params = {**params_of_all_kinds(), "ids": torch.tensor([1, 2])}
    loss, grads = WAYS[way](params, X)
    assert grads["ids"] is None
    assert set(grads) == set(params)
    assert fcp.relative_error(torch.func.grad(loss_of)(params_of_all_kinds(), X)["scalar"], grads["scalar"]) <= FLOAT64
    assert fcp.relative_error(loss_of(params, X), loss) <= FLOAT64


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_without_parameters_gives_zeros(inside):
    """Catches an error, or a None, where the loss depends on nothing."""

    def fn(params, x):
        return x.sum() if not inside else fcp.psum(x.sum(), "a") / 2

    both = fcp.simulate(fcp.value_and_grad(fn), a=2) if inside else fcp.value_and_grad(fn)
    loss, grads = both({"w": torch.ones(3)}, torch.ones(2))
    assert loss == 2 and not loss.requires_grad
    assert torch.equal(grads["w"], torch.zeros(3))


@pytest.mark.parametrize("inside", [False, True])
def test_an_output_is_differentiated_by_its_loss(inside):
    """Catches logits that are differentiated, dropped, or returned with their graph."""

    def fn(params, x):
        scores = x * params["w"]
        return fcp.Output(scores.square().sum() * (1 if not inside else fcp.psum(torch.ones(()), "a") / 2), scores)

    both = fcp.simulate(fcp.value_and_grad(fn), a=2) if inside else fcp.value_and_grad(fn)
    out, grads = both({"w": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0]))
    assert isinstance(out, fcp.Output)
    assert out.loss == 9 + 64 and torch.equal(out.logits, torch.tensor([3.0, 8.0]))
    assert not out.loss.requires_grad and not out.logits.requires_grad
    assert torch.equal(grads["w"], torch.tensor([18.0, 64.0]))
    out, _ = fcp.value_and_grad(lambda p, x: fcp.Output((p * x).sum(), None))(torch.ones(2), torch.ones(2))
    assert out.logits is None


@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"tp": 2}, {"fsdp": 2, "cp": 2}])
def test_it_is_the_models_gradient(mesh):
    """Catches a difference that only a whole model shows (masks, ids and None among its inputs)."""
    model, params = toy()
    batch = batch_of(tokens(2, 8))
    wanted = gradient(model, params, batch)
    sharded = fcp.transform(model, **mesh)
    assert worst_error(wanted, fcp.value_and_grad(sharded)(params, batch)[1]) <= FLOAT64
    if mesh:
        inside = fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)
        out, grads = inside(params, fcp.prepare(batch))
        assert worst_error(wanted, grads) <= FLOAT64
        assert fcp.relative_error(model(params, batch).logits, out.logits) <= FLOAT64


def test_grad_mode_of_the_caller_does_not_matter():
    """Catches a training step under no_grad that finds zeros, and a grad mode that is left switched."""
    params = params_of_all_kinds()
    wanted = torch.func.grad(loss_of)(params, X)
    with torch.no_grad():
        _, grads = fcp.value_and_grad(loss_of)(params, X)
        assert not torch.is_grad_enabled()
    assert worst_error(pytree.map(torch.Tensor.double, wanted), pytree.map(torch.Tensor.double, grads)) <= FLOAT64


def test_more_arguments_are_not_differentiated():
    """Catches a batch that is taken for parameters."""
    x = torch.ones(3, requires_grad=True)
    _, grads = fcp.value_and_grad(lambda p, x, scale: (p * x).sum() * scale)(torch.ones(3), x, 2.0)
    assert torch.equal(grads, torch.full((3,), 2.0))
    assert x.grad is None


def test_a_tensor_used_twice_as_two_leaves_has_two_gradients():
    """Catches two leaves that share a tensor and each get the sum."""
    w = torch.tensor([2.0])
    _, grads = fcp.value_and_grad(lambda p: (p["a"] * 3 + p["b"] * 5).sum())({"a": w, "b": w})
    assert grads == {"a": 3.0, "b": 5.0}


def test_a_gradient_around_it_differentiates_again():
    """Catches zeros, and no error, where the gradients found here are differentiated by torch.func."""

    def fn(p):
        return (p**3).sum()

    p = torch.tensor([1.0, 2.0])
    assert torch.equal(torch.func.grad(lambda p: fcp.value_and_grad(fn)(p)[1].sum())(p), 6 * p)
    assert torch.equal(torch.func.grad(lambda p: fcp.value_and_grad(fn)(p)[0])(p), 3 * p**2)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_no_scalar_loss_is_refused(inside):
    """Catches a sum taken over whatever came, a batch without labels, and a tuple whose first entry is meant."""

    def attempt(result):
        def fn(p):
            return result(fcp.psum(p, "a") if inside else p)

        both = fcp.value_and_grad(fn)
        return (fcp.simulate(both, a=2) if inside else both)(torch.ones(2))

    with pytest.raises(ValueError, match=r"the loss is None; give the batch labels"):
        attempt(lambda x: fcp.Output(None, x.reshape(1, 1, 2)))
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\); it must give a scalar loss or an Output"):
        attempt(lambda x: x)
    with pytest.raises(ValueError, match=r"fn gave a tuple; it must give a scalar"):
        attempt(lambda x: (x.sum(), x))
    with pytest.raises(ValueError, match=r"fn gave a float"):
        attempt(lambda x: 1.0)


def test_a_gradient_that_differs_between_ranks_is_refused():
    """Catches each rank's part of a gradient taken for the whole; every such leaf and its axis is named."""

    def fn(params, x):
        x = fcp.shard(x, "a", dim=0)
        return fcp.psum((x @ params["bad"]["w"] + x @ fcp.pvary(params["good"], "a")).sum(), "a")

    params = {"bad": {"w": torch.ones(3, 3).double()}, "good": torch.ones(3, 3).double()}
    with pytest.raises(ValueError, match=r"the gradient of bad\.w differs between the ranks of axis 'a'.*fcp\.pvary"):
        fcp.simulate(fcp.value_and_grad(fn), a=2)(params, X)
    with pytest.raises(ValueError, match=r"the gradient of the parameter differs between the ranks of axis 'a'"):
        fcp.simulate(fcp.value_and_grad(lambda w, x: fcp.psum((fcp.shard(x, "a", dim=0) * w).sum(), "a")), a=2)(
            torch.ones(3).double(), X
        )


def test_a_parameter_that_varies_has_a_gradient_that_varies():
    """Catches a refusal of parameters stored in pieces, whose gradients are meant to differ."""

    def fn(w, x):
        mine = fcp.shard(w, "a", dim=0)
        both = fcp.value_and_grad(lambda w: fcp.psum((fcp.pvary(x, "a") * fcp.all_gather(w, "a", dim=0)).sum(), "a"))
        loss, g = both(mine)
        return loss, fcp.unshard(g, "a", dim=0)

    w, x = torch.arange(4.0), torch.arange(4.0) + 1
    loss, g = fcp.simulate(fn, a=2)(w, x)
    assert loss == 2 * (w * x).sum()
    assert torch.equal(g, 2 * x)


def _scaled(fn):
    def faulty(params, x):
        loss, grads = fn(params, x)
        return loss, pytree.map(lambda g: g / 2, grads)

    return faulty


def _first_leaf_lost(fn):
    def faulty(params, x):
        loss, grads = fn(params, x)
        return loss, {**grads, "scalar": torch.zeros_like(grads["scalar"])}

    return faulty


@pytest.mark.parametrize(("name", "mutant"), [("divided by the ranks", _scaled), ("a leaf lost", _first_leaf_lost)])
def test_the_comparison_notices(name, mutant):
    """Catches a comparison with torch.func.grad that passes whatever the gradients are."""
    params = params_of_all_kinds()
    wanted = torch.func.grad(loss_of)(params, X)
    right, wrong = WAYS["around"](params, X)[1], mutant(WAYS["around"])(params, X)[1]
    assert fcp.relative_error(wanted["scalar"], right["scalar"]) - FLOAT64 <= EXACT
    assert fcp.relative_error(wanted["scalar"], wrong["scalar"]) > 1e-6

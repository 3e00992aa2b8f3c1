"""Rematerialisation: the same values and gradients, nothing kept between forward and backward, each layer run twice."""

import itertools
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fcp
from fcp import pytree
from fcp import remat as remat_module
from tests.tolerances import FLOAT64
from tests.toys import batch_of, gradient, tokens, toy, worst_error

STORED = ("fsdp", "cp")


def plain_layer(params, x):
    """A mixing MLP: x + down(cumsum over the sequence of tanh(up x))."""
    return x + torch.tanh(x @ params["up"].mT).cumsum(1) @ params["down"].mT


def sharded_layer(params, x):
    """The same with rows over fsdp, the sequence over cp, the width over tp, and parameters stored over fsdp x cp."""
    params = {name: fcp.all_gather(piece, STORED, dim=0) for name, piece in params.items()}
    hidden = torch.tanh(fcp.pvary(x, "tp") @ params["up"].mT)
    hidden = fcp.all_to_all(hidden, "cp", split_dim=2, concat_dim=1).cumsum(1)
    hidden = fcp.all_to_all(hidden, "cp", split_dim=1, concat_dim=2)
    return x + fcp.psum(hidden @ params["down"].mT, "tp")


def plain(params, x):
    for layer in params:
        x = plain_layer(layer, x)
    return x.square().sum()


def sharded(params, x, remat=fcp.rematerialize, layer_fn=sharded_layer, at_the_end=lambda: None):
    x = fcp.shard(fcp.shard(x, "fsdp", dim=0), "cp", dim=1)
    for layer in params:
        up, down = fcp.shard(layer["up"], "tp", dim=0), fcp.shard(layer["down"], "tp", dim=1)
        pieces = {"up": fcp.shard(up, STORED, dim=0), "down": fcp.shard(down, STORED, dim=0)}
        x = remat(layer_fn)(pieces, x)
    at_the_end()
    return fcp.psum(x.square().sum(), STORED)


def inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 2

    return [{"up": draw(8, 4), "down": draw(4, 8)} for _ in range(2)], draw(2, 4, 4)


def by_autograd(fn):
    def both(params, x):
        params = pytree.map(lambda leaf: leaf.detach().requires_grad_(), params)
        found, spec = pytree.flatten(params)
        return pytree.unflatten(spec, torch.autograd.grad(fn(params, x), found))

    return both


def second(both):
    return lambda params, x: both(params, x)[1]


WAYS = {
    "torch.func.grad outside": lambda fn, mesh: torch.func.grad(fcp.simulate(fn, **mesh)),
    "value_and_grad outside": lambda fn, mesh: second(fcp.value_and_grad(fcp.simulate(fn, **mesh))),
    "torch.autograd outside": lambda fn, mesh: by_autograd(fcp.simulate(fn, **mesh)),
    "torch.func.grad inside": lambda fn, mesh: fcp.simulate(torch.func.grad(fn), **mesh),
    "value_and_grad inside": lambda fn, mesh: fcp.simulate(second(fcp.value_and_grad(fn)), **mesh),
}
FULL = {"cp": 2, "tp": 2, "fsdp": 2}
MESHES = [
    *({name: FULL[name] for name in order} for order in itertools.permutations(FULL)),
    {"cp": 1, "tp": 1, "fsdp": 1},
    {"cp": 2, "tp": 1, "fsdp": 1},
    {"tp": 1, "fsdp": 2, "cp": 1},
    {"fsdp": 1, "cp": 1, "tp": 4},
]


def _id(mesh):
    return "*".join(f"{name}{size}" for name, size in mesh.items())


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", MESHES, ids=_id)
def test_gradients_are_those_of_the_plain_function(mesh, way):
    """Catches a replay that binds its axes in another order, at another level, or not at all."""
    params, x = inputs()
    wanted = torch.func.grad(plain)(params, x)
    assert worst_error(wanted, WAYS[way](sharded, mesh)(params, x)) <= FLOAT64


@pytest.mark.parametrize("mesh", MESHES, ids=_id)
def test_values_are_those_of_the_plain_function(mesh):
    """Catches a result whose rank dim is lost or repeated on the way out of the Function."""
    params, x = inputs()
    assert fcp.relative_error(plain(params, x), fcp.simulate(sharded, **mesh)(params, x)) <= FLOAT64


@pytest.mark.parametrize("mesh", [{"cp": 2, "remat": True}, {"cp": 2, "tp": 2, "remat": True}, {"fsdp": 2, "cp": 2}])
def test_a_model_keeps_its_gradients(mesh):
    """Catches what only a whole layer shows: integer positions, a mask without tensors, attention inside the replay."""
    model, params = toy()
    batch = batch_of(tokens(2, 8))
    wanted = gradient(model, params, batch)
    spread = fcp.transform(model, **mesh)
    assert worst_error(wanted, gradient(spread, params, batch)) <= FLOAT64
    _, inside = fcp.simulate(fcp.value_and_grad(spread.model_fn), **spread.axes)(params, fcp.prepare(batch))
    assert worst_error(wanted, inside) <= FLOAT64


@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "cp": 2, "fsdp": 2}], ids=["plain", "simulated"])
def test_second_derivatives(mesh):
    """Catches a backward whose own graph is thrown away although torch.func asks for it."""
    params, x = inputs()

    def squared(fn):
        return lambda p: sum(g.square().sum() for g in pytree.leaves(torch.func.grad(fn)(p, x)))

    def replayed(p, x):
        for layer in p:
            x = fcp.rematerialize(plain_layer)(layer, x)
        return x.square().sum()

    fn = fcp.simulate(sharded, **mesh) if mesh else replayed
    wanted = torch.func.grad(squared(plain))(params)
    assert worst_error(wanted, torch.func.grad(squared(fn))(params)) <= FLOAT64


# --- nothing kept, everything run twice -------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Weak references to the memory of every tanh below all levels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.tanh:
            self.seen.append(StorageWeakRef(out.untyped_storage()))
        return out

    def alive(self):
        return sum(not each.expired() for each in self.seen)


def _kept(remat, way, mesh):
    """How many of the layers' intermediates live when the forward pass ends, of how many."""
    counts = []
    params, x = inputs()
    with Watch() as watch:
        fn = partial(sharded, remat=remat, at_the_end=lambda: counts.append((watch.alive(), len(watch.seen))))
        WAYS[way](fn, mesh)(params, x)
    return counts[0]


def _no_remat(fn):
    return fn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", [{"cp": 1, "tp": 1, "fsdp": 1}, {"tp": 2, "fsdp": 2, "cp": 2}], ids=_id)
def test_nothing_of_a_layer_lives_until_backward(mesh, way):
    """Catches a graph, a saved output or a closure that keeps what was to be computed again."""
    assert _kept(fcp.rematerialize, way, mesh) == (0, 2)
    assert _kept(_no_remat, way, mesh) == (2, 2)  # the mutant: the layers as they are


def _calls(way, mesh, remat=fcp.rematerialize, inner=_no_remat):
    """How often a layer runs until forward ends, and until backward ends; `inner` wraps its inner half."""
    calls, at_the_end = [], []
    params, x = inputs()

    def half(pieces, x):
        calls.append(1)
        return sharded_layer(pieces, x)

    def layer(pieces, x):
        return inner(half)(pieces, x)

    fn = partial(sharded, remat=remat, layer_fn=layer, at_the_end=lambda: at_the_end.append(len(calls)))
    WAYS[way](fn, mesh)(params, x)
    return at_the_end[0], len(calls)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", [{"cp": 1, "tp": 1, "fsdp": 1}, {"tp": 2, "fsdp": 2, "cp": 2}], ids=_id)
def test_backward_runs_each_layer_once_more(mesh, way, monkeypatch):
    """Catches a layer that runs once a rank or once a level, and a nested one that runs a third time."""
    assert _calls(way, mesh) == (2, 4)
    assert _calls(way, mesh, inner=fcp.rematerialize) == (2, 4)
    assert _calls(way, mesh, remat=_no_remat) == (2, 2)  # the mutant: never again

    class Never:
        def get(self):
            return False

        def set(self, value):
            return None

        def reset(self, token):
            return None

    monkeypatch.setattr(remat_module, "_replaying", Never())  # the mutant: a nested one does not know that it is nested
    assert _calls(way, mesh, inner=fcp.rematerialize)[1] > 4


def test_without_a_gradient_it_runs_once():
    """Catches a replay where nothing is differentiated."""
    params, x = inputs()
    calls = []

    def layer(pieces, x):
        calls.append(1)
        return sharded_layer(pieces, x)

    fcp.simulate(partial(sharded, layer_fn=layer), **FULL)(params, x)
    assert len(calls) == 2


# --- whatever goes in and comes out -----------------------------------------------------------------------------------


def _mixed(params, ids, nothing, scale, x):
    table = params["table"]
    rows = table[ids] * scale
    assert nothing is None
    return (rows * x, {"ids": ids + 1, "same": x}), [rows.sum(), None, "word", 3], rows > 0


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("size", [1, 2])
def test_any_arguments_and_results(size, where):
    """Catches integers that are differentiated, a None or a word that is lost, and an argument returned as it is."""
    table = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7
    ids, x = torch.tensor([1, 3, 3, 0]), torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    seen = []

    def fn(table, x, call):
        table, own_ids, own_x = fcp.pvary(table, "a"), fcp.shard(ids, "a", dim=0), fcp.shard(x, "a", dim=0)
        (product, more), rest, positive = call(_mixed)({"table": table}, own_ids, None, 2.0, own_x)
        seen.append((rest[1:], more["ids"].dtype, positive.dtype))
        loss = (product * more["same"] * positive).sum() + rest[0].square() + (more["ids"] * own_x[:, 0]).sum()
        return fcp.psum(loss, "a")

    def gradients(call):
        def of(table, x):
            return fn(table, x, call)

        if where == "outside":
            return torch.func.grad(fcp.simulate(of, a=size), argnums=(0, 1))(table, x)

        return fcp.simulate(torch.func.grad(of, argnums=(0, 1)), a=size)(table, x)

    wanted, found = gradients(_no_remat), gradients(fcp.rematerialize)
    assert worst_error(wanted, found) <= FLOAT64
    assert all(each == ([None, "word", 3], torch.int64, torch.bool) for each in seen)
    assert wanted[0].abs().sum() > 0 and wanted[1].abs().sum() > 0


def test_an_argument_without_gradient_and_one_twice():
    """Catches a gradient given to the wrong argument where some need none or two are the same tensor."""

    def fn(a, b, c):
        return a * b + c

    x, y = torch.tensor(2.0), torch.tensor(5.0)
    assert torch.func.grad(lambda x: fcp.rematerialize(fn)(x, x, y))(x) == 4
    assert torch.func.grad(lambda x: fcp.rematerialize(fn)(y, x, y))(x) == 5
    assert torch.func.grad(lambda y: fcp.rematerialize(fn)(x, x, y))(y) == 1
    assert fcp.rematerialize(fn)(x, y, y) == 15


def test_the_same_result_twice():
    """Catches a result that is handed out twice and whose gradient counts once."""

    def fn(x):
        y = x * 3
        return y, y, x

    def loss(call, x):
        a, b, c = call(fn)(x)
        return (a * 1 + b * 10 + c * 100).sum()

    x = torch.ones(2)
    assert torch.equal(
        torch.func.grad(partial(loss, fcp.rematerialize))(x), torch.func.grad(partial(loss, _no_remat))(x)
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_under_the_callers_own_vmap_it_is_refused():
    """Catches a batch dimension of the caller's that a replay takes for the ranks."""
    x = torch.arange(6.0).reshape(3, 2)

    def row(x):
        return fcp.rematerialize(torch.sin)(x).sum()

    with pytest.raises(ValueError, match=r"rematerialize: it lies inside a vmap that is no axis of fcp\.simulate"):
        torch.func.vmap(row)(x)
    with pytest.raises(ValueError, match="no axis of"):
        fcp.simulate(lambda x: fcp.psum(torch.func.vmap(row)(fcp.shard(x, "a", dim=0)).sum(), "a"), a=3)(x)
    with pytest.raises(ValueError, match="no axis of"):
        torch.func.vmap(fcp.simulate(lambda x: fcp.psum(row(fcp.shard(x, "a", dim=0)), "a"), a=2))(x)


@pytest.mark.parametrize(
    "closing_over",
    [
        lambda w: lambda x: (w * x).sum(),
        lambda w: partial(lambda weight, x: (weight * x).sum(), w),
        lambda w: partial(lambda x, *, w: (w * x).sum(), w=w),
        lambda w: (lambda held: lambda x: (held["deep"][0] * x).sum())({"deep": [w]}),
        lambda w: (lambda fn: lambda x: fn(x))(lambda x: (w * x).sum()),
    ],
    ids=["closure", "partial", "keyword", "container", "function in a closure"],
)
def test_a_tensor_in_a_closure_is_refused(closing_over):
    """Catches a gradient that is silently zero because its tensor did not come as an argument."""
    x = torch.arange(4.0)

    def loss(w):
        return fcp.rematerialize(closing_over(w))(x)

    words = r"rematerialize: the function closes over the tensor .*; pass it as an argument"
    with pytest.raises(ValueError, match=words):
        torch.func.grad(loss)(torch.ones(4))
    with pytest.raises(ValueError, match=words):
        loss(torch.ones(4, requires_grad=True))
    with pytest.raises(ValueError, match=words):
        torch.func.vmap(loss)(torch.ones(2, 4))
    with pytest.raises(ValueError, match=words):
        fcp.simulate(lambda w: fcp.psum(loss(fcp.shard(w, "a", dim=0)), "a"), a=2)(torch.ones(2, 4))
    assert loss(torch.ones(4)) == 6  # a constant harms nobody


def test_the_tensor_in_a_closure_is_named():
    """Catches a refusal that does not say which of a layer's many names is meant."""
    weight, not_yet = torch.ones(2, requires_grad=True), None

    def fn(x):
        return (weight * x).sum() if not_yet is None else not_yet

    with pytest.raises(ValueError, match="closes over the tensor weight, whose gradient"):
        fcp.rematerialize(fn)(torch.ones(2))


# --- the checks notice faults -----------------------------------------------------------------------------------------


def _half_gradients(fn):
    return lambda pieces, x: (lambda y: y.detach() + (y - y.detach()) / 2)(fcp.rematerialize(fn)(pieces, x))


def _loses_the_parameters(fn):
    return lambda pieces, x: fcp.rematerialize(fn)(pytree.map(torch.Tensor.detach, pieces), x)


@pytest.mark.parametrize(("name", "mutant"), [("halved", _half_gradients), ("detached", _loses_the_parameters)])
@pytest.mark.parametrize("way", ["torch.func.grad outside", "value_and_grad inside"])
def test_the_comparison_notices(way, name, mutant):
    """Catches a comparison with the plain function that a wrong gradient would pass."""
    params, x = inputs()
    wanted = torch.func.grad(plain)(params, x)
    assert worst_error(wanted, WAYS[way](partial(sharded, remat=mutant), FULL)(params, x)) > 1e-6

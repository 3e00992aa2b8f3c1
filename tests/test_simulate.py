"""The simulator: what enters and leaves, what is computed once, and the two forgotten marks that it must refuse."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fcp
from fcp import collectives
from fcp._simulate import map_ranks
from tests.tolerances import EXACT, FLOAT64


class Pair(NamedTuple):
    loss: Any
    rest: Any


class Shapes(TorchDispatchMode):
    """Every (operator, shape of its result) that reaches the bottom, below all levels of torch.func."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, tuple(out.shape)))
        return out

    def of(self, *names):
        return [shape for name, shape in self.seen if name in names]


def mlp_params():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"up": draw(12, 4), "down": draw(4, 12), "scale": draw(4)}


def plain_mlp(params, x):
    hidden = torch.tanh((x * params["scale"]) @ params["up"].mT)
    return (hidden @ params["down"].mT).square().sum()


def sharded_mlp(params, x, mark=fcp.pvary, total=fcp.psum):
    """The MLP with rows over dp and columns over tp."""
    x = fcp.shard(x, "dp", dim=0)
    params = {name: mark(leaf, "dp") for name, leaf in params.items()}
    up, down = fcp.shard(params["up"], "tp", dim=0), fcp.shard(params["down"], "tp", dim=1)
    hidden = torch.tanh(mark(x * params["scale"], "tp") @ up.mT)
    return total(total(hidden @ down.mT, "tp").square().sum(), "dp")


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_psum_of_an_unbatched_value_counts_once_a_rank(size):
    """Catches a sum over ranks that takes a value no rank changed for one that is summed already."""
    fn = fcp.simulate(lambda x: fcp.psum(x, "a"), a=size)
    assert torch.equal(fn(torch.arange(3.0)), size * torch.arange(3.0))
    product = fcp.simulate(lambda x: fcp.psum(x, ("a", "b")), a=size, b=3)
    assert product(torch.tensor(2.0)) == 6 * size


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 3}, {"dp": 3, "tp": 1}])
def test_a_sharded_function_is_the_plain_one(order, sizes):
    """Catches a value or gradient that depends on the mesh, on the order of the axes, or on where grad is taken."""
    params, x = mlp_params(), torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    wanted, value = torch.func.grad_and_value(plain_mlp)(params, x)
    mesh = {name: sizes[name] for name in order}
    sharded = fcp.simulate(sharded_mlp, **mesh)
    ways = {
        "outside": torch.func.grad_and_value(sharded)(params, x),
        "value_and_grad outside": fcp.value_and_grad(sharded)(params, x)[::-1],
        "inside": fcp.simulate(torch.func.grad_and_value(sharded_mlp), **mesh)(params, x),
        "value_and_grad inside": fcp.simulate(fcp.value_and_grad(sharded_mlp), **mesh)(params, x)[::-1],
    }
    for way, (grads, loss) in ways.items():
        assert fcp.relative_error(value, loss) <= FLOAT64, way
        for name in params:
            assert fcp.relative_error(wanted[name], grads[name]) <= FLOAT64, (way, name)


def test_the_order_of_three_axes_does_not_matter():
    """Catches an exchange between two levels that shifts a third."""
    x = torch.arange(2.0 * 12 * 12).reshape(2, 12, 12)

    def fn(x):
        x = fcp.shard(x, ("c", "a"), dim=1)
        x = fcp.all_to_all(x, "a", split_dim=2, concat_dim=1)
        x = fcp.psum(x * (1 + fcp.axis_index("b")), "b")
        return fcp.unshard(fcp.unshard(x, "a", dim=2), "c", dim=1)

    found = [
        fcp.simulate(fn, **{name: {"a": 2, "b": 3, "c": 2}[name] for name in order})(x)
        for order in itertools.permutations("abc")
    ]
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].sum() == 6 * x.sum()


def test_nested_calls_bind_another_axis():
    """Catches a simulate inside a simulate whose values the outer axis does not see."""
    inner = fcp.simulate(lambda x: fcp.psum(fcp.shard(x, "b", dim=0).sum() * (1 + fcp.axis_index("a")), "b"), b=2)
    outer = fcp.simulate(lambda x: fcp.psum(inner(x), "a"), a=3)
    assert outer(torch.ones(4)) == 4 * (1 + 2 + 3)


def test_whatever_is_no_tensor_passes_through():
    """Catches a leaf that vmap refuses, a None that is lost, and a record that comes back as a tuple."""

    def fn(x, word, nothing, *, keyword):
        return Pair({"sum": fcp.psum(x, "a"), "word": word}, (3, None, nothing, [keyword, torch.tensor(5)]))

    found = fcp.simulate(fn, a=2)(torch.ones(()), "text", None, keyword=7.5)
    assert isinstance(found, Pair)
    assert found == Pair({"sum": 2, "word": "text"}, (3, None, None, [7.5, 5]))
    assert fcp.simulate(lambda x: fcp.psum(x, "a") and None, a=2)(torch.ones(())) is None


def test_outputs_that_nothing_changed_are_the_inputs():
    """Catches a copy, or a repetition by rank, of what only passes through."""
    x, ids = torch.ones(3), torch.arange(3)
    total, same, also = fcp.simulate(lambda x, ids: (fcp.psum(x, "a"), x, ids), a=2)(x, ids)
    assert same is x and also is ids
    assert total.shape == x.shape


def test_the_name_of_the_function_is_kept():
    """Catches a wrapper that hides what it wraps."""
    assert fcp.simulate(plain_mlp, a=2).__name__ == "plain_mlp"


def test_map_ranks_says_which_outputs_vary():
    """Catches an output given a rank dim that it has not, which would repeat it, or the reverse."""

    def fn(x, y):
        return x, y, x + y, fcp.psum(x, "a"), 3, None, fcp.pvary(y, "a")

    x, y = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    found, dims = map_ranks(fn, "a", 3, (x, y), (1, None))
    assert dims == [0, None, 0, None, None, None, None]
    assert torch.equal(found[0], x.T) and found[1] is y
    assert torch.equal(found[2], (x + y[:, None]).T)
    assert torch.equal(found[3], x.sum(1))
    assert found[4:6] == [3, None]
    found, dims = map_ranks(fn, "a", 1, (x[:, 0], y), (None, None))
    assert dims == [None] * 7


# --- computed once ----------------------------------------------------------------------------------------------------


def test_invariant_work_is_done_once_and_not_once_a_rank():
    """Catches inputs that enter batched, a pvary or all_gather that expands, and a psum that comes out batched."""
    w, x = torch.ones(5, 7, dtype=torch.float64), torch.ones(8, 7, dtype=torch.float64)

    def fn(w, x):
        w = torch.sin(w)  # before anything varies
        parts = fcp.shard(x, "a", dim=0)
        mine = torch.tanh(torch.cos(fcp.pvary(w, "a")))  # a copy on every rank
        whole = torch.exp(fcp.all_gather(parts, "a", dim=0))  # the same whole on every rank
        total = torch.sigmoid(fcp.psum((parts @ mine.mT).sum(), "a"))  # after the sum
        return total + fcp.psum(whole.sum(), "a")

    with Shapes() as below:
        fcp.simulate(fn, a=4)(w, x)
    assert below.of("sin") == below.of("cos") == below.of("tanh") == [(5, 7)]
    assert below.of("exp") == [(8, 7)]
    assert below.of("sigmoid") == [()]


def _weight_gradients(pvary):
    w, x = torch.ones(5, 7, dtype=torch.float64), torch.ones(8, 7, dtype=torch.float64)

    def fn(w, x):
        return fcp.psum((fcp.shard(x, "a", dim=0) @ pvary(w, "a").mT).square().sum(), "a")

    with Shapes() as below:
        torch.func.grad(fcp.simulate(fn, a=4))(w, x)
    return below.of("mm", "bmm", "matmul", "addmm", "baddbmm")


def _pvary_that_expands(x, axis):
    return x + 0 * fcp.axis_index(axis)


def test_a_weight_used_by_all_ranks_has_one_gradient():
    """Catches a pvary that expands: a weight gradient a rank, at the size of the ranks times the weight."""
    assert (4, 5, 7) not in _weight_gradients(fcp.pvary) and (4, 7, 5) not in _weight_gradients(fcp.pvary)
    assert {(5, 7), (7, 5)} & set(_weight_gradients(fcp.pvary))
    mutant = _weight_gradients(_pvary_that_expands)
    assert {(4, 5, 7), (4, 7, 5)} & set(mutant)


# --- refusals: what the caller asked for ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, True])
def test_sizes_that_are_no_number_of_ranks_are_refused(size):
    """Catches a mesh of no ranks, which would give empty sums."""
    with pytest.raises(ValueError, match=r"simulate: cp=.* must be a number of ranks, 1 or more"):
        fcp.simulate(plain_mlp, cp=size)


def test_no_axis_is_refused():
    """Catches a simulation of nothing."""
    with pytest.raises(ValueError, match="name at least one axis"):
        fcp.simulate(plain_mlp)


def test_an_axis_that_nothing_consumes_is_refused():
    """Catches a transform that was forgotten: all ranks would do the same work and the numbers would be right."""
    for idle in (lambda x: x.sum(), lambda x: x.sum() / fcp.axis_size("cp")):
        with pytest.raises(ValueError, match=r"nothing consumed axis 'cp'.*its 2 ranks did the same work"):
            fcp.simulate(idle, cp=2)(torch.ones(4))
    with pytest.raises(ValueError, match="nothing consumed axis 'tp'"):
        fcp.simulate(lambda x: fcp.psum(x, "cp"), cp=2, tp=2)(torch.ones(4))
    assert fcp.simulate(lambda x: x.sum(), cp=1)(torch.ones(4)) == 4
    assert fcp.simulate(lambda x: fcp.rematerialize(lambda y: fcp.psum(y, "cp"))(x), cp=2)(torch.ones(())) == 2


def test_an_axis_that_is_bound_already_is_refused():
    """Catches an inner axis that takes the outer one's collectives."""
    inner = fcp.simulate(lambda x: fcp.psum(x, "cp"), cp=2)
    with pytest.raises(ValueError, match=r"axis 'cp' is bound already"):
        fcp.simulate(lambda x: fcp.psum(inner(x), "cp"), cp=3)(torch.ones(()))
    assert fcp.simulate(lambda x: fcp.psum(inner(x), "tp"), tp=3)(torch.ones(())) == 6


def test_an_axis_of_one_rank_is_bound():
    """Catches a mesh of one rank that raises where a larger one runs."""
    fn = fcp.simulate(lambda x: (fcp.psum(x, "a"), fcp.axis_size("a"), fcp.axis_index("a")), a=1)
    assert fn(torch.tensor(3.0)) == (3, 1, 0)


# --- refusals: a forgotten psum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("forgotten", ["dp", "tp"])
def test_a_forgotten_psum_is_refused(order, forgotten):
    """Catches a loss that differs between ranks: on processes each would train on its own."""

    def total(x, axis):
        return x if axis == forgotten else fcp.psum(x, axis)

    mesh = dict.fromkeys(order, 2)
    with pytest.raises(ValueError, match=rf"varies over axis '{forgotten}'.*fcp\.psum\(loss, '{forgotten}'\)"):
        fcp.simulate(lambda p, x: sharded_mlp(p, x, total=total), **mesh)(mlp_params(), torch.ones(4, 4).double())


def test_the_leaf_that_still_varies_is_named():
    """Catches an error that leaves the reader to guess which of many results it means."""

    def fn(x):
        mine = fcp.shard(x, "cp", dim=0)
        return {"out": fcp.Output(fcp.psum(mine.sum(), "cp"), mine[None, :, None]), "count": 3}

    with pytest.raises(ValueError, match=r"simulate: out\.logits still varies over axis 'cp'.*fcp\.unshard"):
        fcp.simulate(fn, cp=2)(torch.ones(4))
    with pytest.raises(ValueError, match=r"simulate: 0, 1, 2, 3, \.\.\. still varies"):
        fcp.simulate(lambda x: [fcp.shard(x, "cp", dim=0)] * 5, cp=2)(torch.ones(4))
    with pytest.raises(ValueError, match=r"simulate: the result still varies"):
        fcp.simulate(lambda x: fcp.shard(x, "cp", dim=0), cp=2)(torch.ones(4))


# --- refusals: a forgotten pvary --------------------------------------------------------------------------------------


def _no_mark(x, axis):
    return x


def test_a_forgotten_pvary_of_a_parameter_is_refused_inside():
    """Catches a parameter whose gradient is only each rank's part: the copies would drift apart on processes."""

    def mark(x, axis):
        return x if axis == "dp" else fcp.pvary(x, axis)

    params, x = mlp_params(), torch.ones(4, 4).double()
    words = r"gradient of down, scale, up differs between the ranks of axis 'dp'.*fcp\.pvary\(parameter, 'dp'\)"
    with pytest.raises(ValueError, match=words):
        fcp.simulate(fcp.value_and_grad(lambda p, x: sharded_mlp(p, x, mark=mark)), dp=2, tp=2)(params, x)
    with pytest.raises(ValueError, match=r"scale, up still varies over axis 'dp'.*fcp\.pvary"):
        fcp.simulate(torch.func.grad(lambda p, x: sharded_mlp(p, x, mark=mark)), dp=2, tp=2)(params, x)


def test_a_forgotten_pvary_of_an_activation_is_refused_inside():
    """Catches split work whose input's gradient is not summed, though no parameter's own mark is missing."""

    def fn(params, x):
        hidden = fcp.psum(fcp.pvary(params["scale"], "dp") * fcp.shard(x, "dp", dim=0), "dp")  # the same on every rank
        return fcp.psum((hidden * (1 + fcp.axis_index("dp"))).sum(), "dp")  # used without pvary

    params, x = mlp_params(), torch.ones(4, 4).double()
    for differentiate in (fcp.value_and_grad, torch.func.grad):
        with pytest.raises(ValueError, match=r"a gradient differs between the ranks of axis 'dp'.*Put fcp\.pvary"):
            fcp.simulate(differentiate(fn), dp=2)(params, x)
    torch.func.grad(fcp.simulate(fn, dp=2))(params, x)  # outside the map it is harmless


@pytest.mark.parametrize("place", ["parameters", "activations"])
def test_the_check_notices_a_dropped_pvary(place):
    """Catches a simulator that would let the mutant pass: every pvary of one kind is dropped."""

    def mark(x, axis):
        dropped = axis == ("dp" if place == "parameters" else "tp")
        return x if dropped else fcp.pvary(x, axis)

    params, x = mlp_params(), torch.ones(4, 4).double()
    fcp.simulate(fcp.value_and_grad(sharded_mlp), dp=2, tp=2)(params, x)
    with pytest.raises(ValueError, match="differs between the ranks of axis"):
        fcp.simulate(fcp.value_and_grad(lambda p, x: sharded_mlp(p, x, mark=mark)), dp=2, tp=2)(params, x)


def test_the_gradient_of_redundant_work_needs_its_mark_too():
    """Catches the one forgotten pvary that leaves nothing varying: the two ways of differentiating then disagree."""
    x = torch.tensor([1.0, 2.0])

    def marked(x):
        return fcp.psum(fcp.pvary(x, "a").square().sum(), "a")

    def forgotten(x):
        return fcp.psum(x.square().sum(), "a")

    for fn, inside in ((marked, 4 * x), (forgotten, 2 * x)):
        assert torch.equal(torch.func.grad(fcp.simulate(fn, a=2))(x), 4 * x)
        assert torch.equal(fcp.simulate(fcp.value_and_grad(fn), a=2)(x)[1], inside)


# --- the checks notice faults -----------------------------------------------------------------------------------------


def _mean(x, size, rule):
    return x.mean(0)


def _sum_of_what_is_batched(x, axis):
    return collectives.psum(x, axis) if fcp.axes.varying(x) else x


def test_the_checks_notice_a_sum_that_is_none(monkeypatch):
    """Catches a comparison with the plain function that a mean, or a sum that skips unbatched values, would pass."""
    params, x = mlp_params(), torch.ones(4, 4).double()
    wanted = plain_mlp(params, x)
    assert fcp.relative_error(wanted, fcp.simulate(sharded_mlp, dp=2, tp=2)(params, x)) <= FLOAT64
    with monkeypatch.context() as patch:
        patch.setattr(collectives, "_dense_sum", _mean)
        assert fcp.relative_error(wanted, fcp.simulate(sharded_mlp, dp=2, tp=2)(params, x)) > 1e-6
    counted = fcp.simulate(lambda x: fcp.psum(x, "a") + 0 * _sum_of_what_is_batched(x, "a"), a=3)(torch.ones(()))
    skipped = fcp.simulate(lambda x: 0 * fcp.psum(x, "a") + _sum_of_what_is_batched(x, "a"), a=3)(torch.ones(()))
    assert counted - 3 == EXACT and abs(skipped - 3) > 1e-6

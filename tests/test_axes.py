"""The axis environment: binding, size, index, who varies, and the errors of names that are not bound."""

import pytest
import torch

import fcp
from fcp.axes import Axis, bind, bound, lookup, names_of, varying


def _everywhere(fn, **sizes):
    """The values that `fn()` has on the ranks, in a tensor of one dim an axis, without any collective."""
    names, shape = list(sizes), tuple(sizes.values())

    def under(left, indices):
        if not left:
            return fn()
        name = left[0]

        def per_rank(index):
            with bind(Axis(name, sizes[name], index)):
                return under(left[1:], (*indices, index)) + 0 * index

        return torch.func.vmap(per_rank)(torch.arange(sizes[name]))

    return under(names, ()).reshape(shape)


def test_nothing_is_bound_outside():
    """Catches a binding that outlives its call."""
    assert dict(bound()) == {}
    fcp.simulate(lambda x: fcp.psum(x, "cp"), cp=2)(torch.ones(2))
    assert dict(bound()) == {}
    with pytest.raises(ValueError, match="boom"), bind(Axis("cp", 2)):
        raise ValueError("boom")
    assert dict(bound()) == {}


def test_the_inner_binding_wins_and_ends():
    """Catches an environment that is written into instead of replaced."""
    with bind(Axis("cp", 2)):
        with bind(Axis("tp", 3)), bind(Axis("cp", 5)):
            assert fcp.axis_size("cp") == 5
            assert list(bound()) == ["cp", "tp"]
        assert fcp.axis_size("cp") == 2
        assert list(bound()) == ["cp"]


def test_the_outermost_name_is_first():
    """Catches an order of axes that depends on anything but the nesting."""
    seen = []

    def fn(x):
        seen.append(tuple(bound()))
        return fcp.psum(x, ("cp", "tp"))

    fcp.simulate(fn, tp=2, cp=2)(torch.ones(()))
    fcp.simulate(fn, cp=2, tp=2)(torch.ones(()))
    assert seen == [("tp", "cp"), ("cp", "tp")]


def test_size_of_one_name_and_of_a_product():
    """Catches a product that drops a factor."""
    with bind(Axis("a", 2)), bind(Axis("b", 3)), bind(Axis("c", 1)):
        assert fcp.axis_size("b") == 3
        assert fcp.axis_size(("a", "b")) == 6
        assert fcp.axis_size(("c", "b", "a")) == 6


@pytest.mark.parametrize(("order", "names"), [(o, n) for o in ("ab", "ba") for n in ("ab", "ba")])
def test_index_of_a_product_has_the_first_name_slowest(order, names):
    """Catches ranks of a tuple counted by the nesting of the levels, or with the first name fastest."""
    sizes = {"a": 2, "b": 3}
    found = _everywhere(lambda: fcp.axis_index(tuple(names)), **{name: sizes[name] for name in order})
    for a in range(2):
        for b in range(3):
            rank = a * 3 + b if names == "ab" else b * 2 + a
            assert found[(a, b) if order == "ab" else (b, a)] == rank


def test_index_of_an_axis_of_one_rank_is_zero():
    """Catches a size-1 axis that has no index."""
    with bind(Axis("a", 1)):
        assert fcp.axis_index("a") == 0
        assert fcp.axis_index("a").dtype == torch.int64


def test_unbound_names_say_what_is_bound():
    """Catches a KeyError, or a message that does not name the axis, the function, or what there is."""
    for ask in (fcp.axis_size, fcp.axis_index):
        with pytest.raises(NameError, match=rf"{ask.__name__}.*'cp' is not bound.*none.*fcp\.simulate\(fn, cp="):
            ask("cp")
    with bind(Axis("tp", 2)), pytest.raises(NameError, match=r"'cp' is not bound \(bound here: tp\)"):
        fcp.axis_size(("tp", "cp"))


def test_repeated_and_missing_names_are_refused():
    """Catches a tuple that counts one axis twice, and an empty one taken for one rank."""
    assert names_of("cp") == ("cp",)
    assert names_of(("fsdp", "cp")) == ("fsdp", "cp")
    for wrong in (("cp", "cp"), ("a", "b", "a"), ()):
        with pytest.raises(ValueError, match="name each axis once"):
            names_of(wrong)
    with bind(Axis("cp", 2)), pytest.raises(ValueError, match="name each axis once"):
        fcp.axis_size(("cp", "cp"))


def test_asking_for_the_size_is_no_use_of_an_axis():
    """Catches an axis that counts as used although its ranks all did the same work."""
    axis = Axis("cp", 2)
    with bind(axis):
        fcp.axis_size("cp")
        assert axis.used == []
        lookup("cp", "psum")
        assert axis.used == ["psum"]


def test_varying_lists_the_axes_over_which_ranks_differ():
    """Catches an invariant value taken for a varying one, through a grad level and the caller's own vmap too."""
    seen = {}

    def fn(x):
        over_a = fcp.shard(x, "a", dim=0)
        over_both = fcp.shard(over_a, "b", dim=1)
        seen["x"], seen["a"], seen["ab"] = varying(x), varying(over_a), varying(over_both)
        seen["sum"], seen["index"] = varying(fcp.psum(over_both, "a")), varying(fcp.axis_index("b"))
        seen["copies"] = varying(fcp.pvary(x, "a"))

        def inner(y):
            seen["grad"] = varying(y)
            return y.sum()

        torch.func.grad(inner)(over_a)
        torch.func.vmap(lambda row: seen.update(own=varying(row)) or row)(x)
        return fcp.psum(over_both, ("a", "b"))

    fcp.simulate(fn, a=2, b=2)(torch.ones(2, 2))
    assert {name: set(axes) for name, axes in seen.items()} == {
        "x": set(),
        "a": {"a"},
        "ab": {"a", "b"},
        "sum": {"b"},
        "index": {"b"},
        "copies": set(),
        "grad": {"a"},
        "own": set(),
    }
    assert varying(torch.ones(2)) == frozenset()

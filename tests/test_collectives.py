"""Every collective against a list of all ranks' tensors, and its backward against the adjoint of that list.

A *case* is a collective with its arguments and its reference: a plain function from the list of the ranks' tensors to
the list of the ranks' results, which knows neither axes nor vmap. A *mesh* is the levels of `simulate`, outermost
first, and the axis (or tuple) that the collective runs over; axes of the mesh that are not named vary at the same time
and split the ranks into groups. Everything is rank-coded integers in float64, so every comparison is exact.

The adjoint of the reference comes from plain autograd of `split`, `cat` and `+`. The collective's own is measured in
four ways: torch.func.vjp around the map, torch.autograd around the map, torch.func.vjp inside the map, and a vjp
between two levels of a tuple.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fcp
from fcp import collectives
from tests.tolerances import EXACT

# --- the references: one list of tensors, a rank each, to another -----------------------------------------------------


def shard_of(xs, dim):
    return [x.tensor_split(len(xs), dim)[rank] for rank, x in enumerate(xs)]


def join_of(xs, dim):
    return [torch.cat(xs, dim)] * len(xs)


def same_of(xs):
    return list(xs)


def sum_of(xs):
    return [sum(xs[1:], xs[0])] * len(xs)


def sum_scatter_of(xs, dim):
    return shard_of(sum_of(xs), dim)


def exchange_of(xs, split_dim, concat_dim):
    pieces = [x.tensor_split(len(xs), split_dim) for x in xs]
    return [torch.cat([sent[rank] for sent in pieces], concat_dim) for rank in range(len(xs))]


def permute_of(xs, perm):
    out = [0 * x for x in xs]
    for source, target in perm:
        out[target] = xs[source]
    return out


def max_of(xs):
    return [torch.stack(list(xs)).amax(0)] * len(xs)


# --- cases and meshes -------------------------------------------------------------------------------------------------

INVARIANT, VARYING = "invariant", "varying"


@dataclass(frozen=True)
class Case:
    """`apply(x, axis, n)` on one of n ranks, `reference(xs)` on the list; `shape(n)` of what one rank hands in."""

    name: str
    takes: str
    gives: str
    apply: Callable[..., Tensor]
    reference: Callable[[list[Tensor]], list[Tensor]]
    shape: Callable[[int], tuple[int, ...]]


def ring(n):
    return [(rank, (rank + 1) % n) for rank in range(n)]


def partial_perm(n):
    """Rank 0 receives from the last, the last from none but itself being sent away."""
    return [(n - 1, 0)]


CASES = [
    Case(
        "shard",
        INVARIANT,
        VARYING,
        lambda x, axis, n: fcp.shard(x, axis, dim=1),
        lambda xs: shard_of(xs, 1),
        lambda n: (2, 2 * n, 3),
    ),
    Case(
        "shard first",
        INVARIANT,
        VARYING,
        lambda x, axis, n: fcp.shard(x, axis, dim=0),
        lambda xs: shard_of(xs, 0),
        lambda n: (n, 2),
    ),
    Case(
        "shard last",
        INVARIANT,
        VARYING,
        lambda x, axis, n: fcp.shard(x, axis, dim=-1),
        lambda xs: shard_of(xs, 2),
        lambda n: (2, 3, 2 * n),
    ),
    Case(
        "unshard",
        VARYING,
        INVARIANT,
        lambda x, axis, n: fcp.unshard(x, axis, dim=1),
        lambda xs: join_of(xs, 1),
        lambda n: (2, 3, 2),
    ),
    Case(
        "unshard last",
        VARYING,
        INVARIANT,
        lambda x, axis, n: fcp.unshard(x, axis, dim=-1),
        lambda xs: join_of(xs, 2),
        lambda n: (2, 1, 3),
    ),
    Case(
        "pvary",
        INVARIANT,
        VARYING,
        lambda x, axis, n: fcp.pvary(x, axis),
        same_of,
        lambda n: (2, 3),
    ),
    Case(
        "psum",
        VARYING,
        INVARIANT,
        lambda x, axis, n: fcp.psum(x, axis),
        sum_of,
        lambda n: (2, 3),
    ),
    Case(
        "psum scalar",
        VARYING,
        INVARIANT,
        lambda x, axis, n: fcp.psum(x, axis),
        sum_of,
        lambda n: (),
    ),
    Case(
        "all_gather",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.all_gather(x, axis, dim=1),
        lambda xs: join_of(xs, 1),
        lambda n: (2, 3, 2),
    ),
    Case(
        "all_gather last",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.all_gather(x, axis, dim=-2),
        lambda xs: join_of(xs, 0),
        lambda n: (2, 3),
    ),
    Case(
        "psum_scatter",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.psum_scatter(x, axis, dim=1),
        lambda xs: sum_scatter_of(xs, 1),
        lambda n: (2, 2 * n, 3),
    ),
    Case(
        "psum_scatter last",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.psum_scatter(x, axis, dim=-1),
        lambda xs: sum_scatter_of(xs, 1),
        lambda n: (3, n),
    ),
    Case(
        "all_to_all",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.all_to_all(x, axis, split_dim=1, concat_dim=2),
        lambda xs: exchange_of(xs, 1, 2),
        lambda n: (2, 2 * n, 3),
    ),
    Case(
        "all_to_all back",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.all_to_all(x, axis, split_dim=-1, concat_dim=-3),
        lambda xs: exchange_of(xs, 2, 0),
        lambda n: (2, 3, 2 * n),
    ),
    Case(
        "all_to_all of equal sizes",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.all_to_all(x, axis, split_dim=2, concat_dim=1),
        lambda xs: exchange_of(xs, 2, 1),
        lambda n: (n, n, n),
    ),
    Case(
        "ppermute",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.ppermute(x, axis, perm=ring(n)),
        lambda xs: permute_of(xs, ring(len(xs))),
        lambda n: (2, 3),
    ),
    Case(
        "ppermute of some",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.ppermute(x, axis, perm=partial_perm(n)),
        lambda xs: permute_of(xs, partial_perm(len(xs))),
        lambda n: (2, 3),
    ),
    Case(
        "ppermute of none",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.ppermute(x, axis, perm=[]),
        lambda xs: permute_of(xs, []),
        lambda n: (2,),
    ),
    Case(
        "own_slice",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.own_slice(x, axis, dim=1),
        lambda xs: shard_of(xs, 1),
        lambda n: (2, 2 * n, 3),
    ),
    Case(
        "own_slice last",
        VARYING,
        VARYING,
        lambda x, axis, n: fcp.own_slice(x, axis, dim=-1),
        lambda xs: shard_of(xs, 1),
        lambda n: (2, 2 * n),
    ),
]

AFTER_PVARY = [
    # The simulator leaves these operands unbatched; they must count once a rank all the same.
    replace(
        case,
        name=f"pvary, {case.name}",
        takes=INVARIANT,
        apply=lambda x, axis, n, f=case.apply: f(fcp.pvary(x, axis), axis, n),
    )
    for case in CASES
    if case.takes == VARYING
]


def under_vmap(case: Case, dim: int) -> Case:
    """The case with one more dimension, over which the caller's own vmap runs inside the map."""

    def apply(x, axis, n):
        return torch.func.vmap(lambda one: case.apply(one, axis, n), in_dims=dim, out_dims=dim)(x)

    def reference(xs):
        by_row = [case.reference(list(row)) for row in zip(*(x.unbind(dim) for x in xs), strict=True)]
        return [torch.stack(list(rank), dim) for rank in zip(*by_row, strict=True)]

    def shape(n):
        inner = case.shape(n)
        return (*inner[:dim], 3, *inner[dim:])

    return replace(case, name=f"vmap, {case.name}", apply=apply, reference=reference, shape=shape)


Mesh = tuple[dict[str, int], str | tuple[str, ...]]

ONE_AXIS: list[Mesh] = [
    ({"a": 2}, "a"),
    ({"a": 3}, "a"),
    ({"a": 2}, ("a",)),
    ({"a": 3, "u": 2}, "a"),
    ({"u": 2, "a": 3}, "a"),
    ({"a": 2, "one": 1}, ("one", "a")),
]
TWO_AXES: list[Mesh] = [
    *(({x: {"a": 2, "b": 3}[x] for x in order}, tuple(names)) for order in ("ab", "ba") for names in ("ab", "ba")),
    ({"a": 2, "u": 2, "b": 2}, ("b", "a")),
    ({"u": 2, "b": 2, "a": 3}, ("a", "b")),
]
THREE_AXES: list[Mesh] = [
    ({x: {"a": 2, "b": 3, "c": 2}[x] for x in order}, names)
    for order in itertools.permutations("abc")
    for names in (("a", "b", "c"), ("c", "a", "b"))
]
MESHES = ONE_AXIS + TWO_AXES + THREE_AXES


def _id(value):
    if isinstance(value, Case):
        return value.name
    sizes, axis = value
    levels = "*".join(f"{name}{size}" for name, size in sizes.items())
    return f"{levels}:{axis if isinstance(axis, str) else '+'.join(axis)}"


# --- the measurements -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One case on one mesh. Global tensors are [groups, ranks of a group, ...]; on an invariant side [groups, ...]."""

    case: Case
    mesh: Mesh

    @property
    def names(self) -> tuple[str, ...]:
        axis = self.mesh[1]
        return (axis,) if isinstance(axis, str) else axis

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(name for name in self.mesh[0] if name not in self.names)

    def count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh[0][name] for name in names)

    def along(self, side: str) -> tuple[str, ...]:
        """The axes over which that side of the case varies, in the order of the global tensor's ranks."""
        return self.others if side == INVARIANT else self.others + self.names

    def x(self) -> Tensor:
        lead = (self.count(self.others),) if self.case.takes == INVARIANT else (self.count(self.others), self.n)
        shape = (*lead, *self.case.shape(self.n))
        return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)

    def y(self) -> Tensor:
        like = self.expected(self.x())
        return (torch.arange(like.numel(), dtype=torch.float64) * 7 % 101 - 50).reshape(like.shape)

    @property
    def n(self) -> int:
        return self.count(self.names)

    def expected(self, x: Tensor) -> Tensor:
        """The reference, group by group."""
        groups = []
        for group in x:
            out = self.case.reference([group] * self.n if self.case.takes == INVARIANT else list(group))
            groups.append(out[0] if self.case.gives == INVARIANT else torch.stack(out))
        return torch.stack(groups)

    def expected_adjoint(self, y: Tensor) -> Tensor:
        x = self.x().requires_grad_()
        (found,) = torch.autograd.grad((self.expected(x) * y).sum(), x, materialize_grads=True, allow_unused=True)
        return found

    def apply(self, x: Tensor) -> Tensor:
        return self.case.apply(x, self.mesh[1], self.n)

    def enter(self, x: Tensor, side: str) -> Tensor:
        names = self.along(side)
        x = x if side == INVARIANT else x.flatten(0, 1)
        return fcp.shard(x, names, dim=0)[0] if names else x[0]

    def leave(self, x: Tensor, side: str) -> Tensor:
        names = self.along(side)
        x = fcp.unshard(x[None], names, dim=0) if names else x[None]
        return x if side == INVARIANT else x.unflatten(0, (-1, self.n))

    def simulate(self, fn):
        return fcp.simulate(fn, **self.mesh[0])

    def run(self, x: Tensor) -> Tensor:
        return self.simulate(lambda x: self.leave(self.apply(self.enter(x, self.case.takes)), self.case.gives))(x)

    def adjoint_outside(self, y: Tensor) -> Tensor:
        return torch.func.vjp(self.run, self.x())[1](y)[0]

    def adjoint_autograd(self, y: Tensor) -> Tensor:
        x = self.x().requires_grad_()
        out = self.run(x)
        if not out.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(out, x, y, allow_unused=True, materialize_grads=True)[0]

    def adjoint_inside(self, y: Tensor) -> Tensor:
        def on_a_rank(x, y):
            _, pull = torch.func.vjp(self.apply, self.enter(x, self.case.takes))
            return self.leave(pull(self.enter(y, self.case.gives))[0], self.case.takes)

        return self.simulate(on_a_rank)(self.x(), y)

    def adjoint_between(self, y: Tensor, above: int) -> Tensor:
        """A vjp with `above` levels of the tuple around it and the others inside."""
        sizes, _ = self.mesh
        outer = tuple(name for name in self.names if name in list(sizes)[:above])
        inner = tuple(name for name in self.names if name not in outer)
        shape = tuple(sizes[name] for name in self.names)
        order = [self.names.index(name) for name in outer + inner]
        back = [(outer + inner).index(name) for name in self.names]
        count = len(order)

        def split(x, side):  # [1, n, ...] to one outer rank's [ranks of inner, ...]
            if side == INVARIANT:
                return x[0]
            x = x[0].unflatten(0, shape).permute(*order, *range(count, count + x.dim() - 2))
            return fcp.shard(x.flatten(0, len(outer) - 1), outer, dim=0)[0].flatten(0, len(inner) - 1)

        def join(x, side):
            if side == INVARIANT:
                return x[None]
            x = fcp.unshard(x[None], outer, dim=0).flatten(0, 1).unflatten(0, [shape[index] for index in order])
            return x.permute(*back, *range(count, x.dim())).flatten(0, count - 1)[None]

        def on_inner(x):
            local = x if self.case.takes == INVARIANT else fcp.shard(x, inner, dim=0)[0]
            out = self.apply(local)
            return out if self.case.gives == INVARIANT else fcp.unshard(out[None], inner, dim=0)

        below = {name: size for name, size in sizes.items() if name in inner}

        def on_outer(x, y):
            _, pull = torch.func.vjp(fcp.simulate(on_inner, **below), split(x, self.case.takes))
            return join(pull(split(y, self.case.gives))[0], self.case.takes)

        return fcp.simulate(on_outer, **{name: size for name, size in sizes.items() if name in outer})(self.x(), y)

    def error(self) -> float:
        """The worst difference of the forward, and of the adjoint outside and inside, from the reference."""
        y = self.y()
        wanted = self.expected_adjoint(y)
        pairs = [
            (self.run(self.x()), self.expected(self.x())),
            (self.adjoint_outside(y), wanted),
            (self.adjoint_inside(y), wanted),
        ]
        return max(difference(a, b) for a, b in pairs)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else float("inf")


# --- against the list of ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [({"a": 3}, "a"), *TWO_AXES[:4]], ids=_id)
def test_shard_and_unshard_agree_with_the_rank_index(mesh):
    """Catches ranks numbered one way by shard and unshard and another by axis_index, which a round trip would hide."""
    bench = Bench(CASES[0], mesh)

    def off(x):
        mine = x.index_select(0, fcp.axis_index(mesh[1]).reshape(1))
        return fcp.psum((fcp.shard(x, mesh[1], dim=0) - mine).abs().sum(), mesh[1])

    assert fcp.simulate(off, **mesh[0])(torch.arange(1.0, bench.n + 1)) == EXACT
    ranks = fcp.simulate(lambda: fcp.unshard(fcp.axis_index(mesh[1]).reshape(1), mesh[1], dim=0), **mesh[0])()
    assert ranks.tolist() == list(range(bench.n))


PAIRS = [(case, mesh) for case in CASES for mesh in MESHES]
PAIRS += [(case, mesh) for case in AFTER_PVARY for mesh in [ONE_AXIS[1], ONE_AXIS[3], *TWO_AXES, THREE_AXES[7]]]


@pytest.mark.parametrize(("case", "mesh"), PAIRS, ids=_id)
def test_forward_and_adjoint_are_the_references(case, mesh):
    """Catches a wrong slice, order, sum or target, and a gradient that misses a sum, has two, or goes astray."""
    bench = Bench(case, mesh)
    x, y = bench.x(), bench.y()
    out = bench.run(x)
    assert difference(out, bench.expected(x)) == EXACT
    wanted = bench.expected_adjoint(y)
    for way in (bench.adjoint_outside, bench.adjoint_inside):
        found = way(y)
        assert difference(found, wanted) == EXACT, way.__name__
        assert (out * y).sum() == (x * found).sum(), way.__name__


@pytest.mark.parametrize("mesh", [ONE_AXIS[3], TWO_AXES[2], THREE_AXES[7]], ids=_id)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_plain_autograd_finds_the_same_adjoint(case, mesh):
    """Catches a collective that works under torch.func alone."""
    bench = Bench(case, mesh)
    assert difference(bench.adjoint_autograd(bench.y()), bench.expected_adjoint(bench.y())) == EXACT


BETWEEN = [(mesh, 1) for mesh in TWO_AXES[:4]] + [(mesh, above) for mesh in THREE_AXES[3::4] for above in (1, 2)]


@pytest.mark.parametrize(
    ("mesh", "above"), BETWEEN, ids=lambda value: _id(value) if isinstance(value, tuple) else str(value)
)
@pytest.mark.parametrize("case", CASES + AFTER_PVARY, ids=_id)
def test_backward_between_the_levels_of_a_tuple(case, mesh, above):
    """Catches a gradient where only some axes of the tuple are folded: a sum or a copy too many or too few."""
    for each in (case, under_vmap(case, 0)):
        bench = Bench(each, mesh)
        assert difference(bench.adjoint_between(bench.y(), above), bench.expected_adjoint(bench.y())) == EXACT


@pytest.mark.parametrize("mesh", [ONE_AXIS[1], ONE_AXIS[4], *TWO_AXES[:5], THREE_AXES[5]], ids=_id)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "psum scalar"], ids=_id)
def test_under_the_callers_own_vmap_inside(case, dim, mesh):
    """Catches a dimension number that is off by one where a vmap level that is no axis lies above the collective."""
    bench = Bench(under_vmap(case, dim), mesh)
    y = bench.y()
    assert difference(bench.run(bench.x()), bench.expected(bench.x())) == EXACT
    for way in (bench.adjoint_outside, bench.adjoint_inside):
        assert difference(way(y), bench.expected_adjoint(y)) == EXACT, way.__name__


@pytest.mark.parametrize("mesh", [ONE_AXIS[1], TWO_AXES[1], TWO_AXES[2], TWO_AXES[4]], ids=_id)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_under_the_callers_own_vmap_outside(case, mesh):
    """Catches a rule that takes the caller's vmap level around the whole map for one of its axes."""
    bench = Bench(case, mesh)
    xs = torch.stack([bench.x(), -2 * bench.x() + 5, bench.x().flip(0) + 1], 1)
    ys = torch.stack([bench.y(), 3 * bench.y(), bench.y() - 1])
    found = torch.func.vmap(bench.run, in_dims=1)(xs)
    for row, x in zip(found, xs.unbind(1), strict=True):
        assert difference(row, bench.expected(x)) == EXACT
    for way in (bench.adjoint_outside, bench.adjoint_inside):
        for row, y in zip(torch.func.vmap(way)(ys), ys, strict=True):
            assert difference(row, bench.expected_adjoint(y)) == EXACT, way.__name__


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_under_a_vmap_between_two_levels_of_a_tuple(case):
    """Catches a caller's vmap between the levels of a tuple that shifts the folded axes, not the tensor's dims."""
    if case.takes == INVARIANT or case.gives == INVARIANT:
        case = replace(
            case,
            takes=VARYING,
            gives=VARYING,
            apply=lambda x, axis, n, f=case: (
                f.apply(x, axis, n) if f.takes == VARYING else f.apply(fcp.unshard(x[None], axis, dim=0)[0], axis, n)
            ),
            reference=lambda xs, f=case: f.reference(xs if f.takes == VARYING else [xs[0]] * len(xs)),
        )
    for outer, inner, names in itertools.chain(
        (("a", "b", n) for n in ("ab", "ba")), (("b", "a", n) for n in ("ab", "ba"))
    ):
        sizes = {"a": 2, "b": 3}
        bench = Bench(case, ({outer: sizes[outer], inner: sizes[inner]}, tuple(names)))
        xs = torch.stack([bench.x()[0], 3 * bench.x()[0] - 1])  # [rows, n, ...]
        shape = tuple(sizes[name] for name in names)

        def on_inner(x, bench=bench, inner=inner):
            return fcp.unshard(bench.apply(fcp.shard(x, inner, dim=0)[0])[None], inner, dim=0)

        below = fcp.simulate(on_inner, **{inner: sizes[inner]})

        def on_outer(xs, outer=outer, shape=shape, names=names, below=below):
            first = xs.unflatten(1, shape).movedim(1 + names.index(outer), 0)
            mine = fcp.shard(first, outer, dim=0)[0]
            return fcp.unshard(torch.func.vmap(below)(mine)[None], outer, dim=0)

        out = fcp.simulate(on_outer, **{outer: sizes[outer]})(xs)
        found = out.movedim(0, 1 + names.index(outer)).flatten(1, 2)
        for row, x in zip(found, xs, strict=True):
            assert difference(row[None], bench.expected(x[None])) == EXACT


@pytest.mark.parametrize("mesh", [ONE_AXIS[1], TWO_AXES[1], TWO_AXES[4]], ids=_id)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_the_adjoint_of_the_adjoint_is_the_collective(case, mesh):
    """Catches a backward that is right once and cannot itself be differentiated, or to another map."""
    bench = Bench(case, mesh)
    for way in (bench.adjoint_outside, bench.adjoint_inside):
        found = torch.func.vjp(way, bench.y())[1](bench.x())[0]
        assert difference(found, bench.expected(bench.x())) == EXACT, way.__name__


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_copy_of_the_cotangent_on_every_rank_counts_once_a_rank(case):
    """Catches an unbatched cotangent of a varying result that the adjoint counts once instead of once a rank."""
    bench = Bench(case, ({"a": 3}, "a"))
    like = bench.expected(bench.x())
    once = bench.y()[:, :1] if case.gives == VARYING else bench.y()

    def on_a_rank(x, y):
        _, pull = torch.func.vjp(bench.apply, bench.enter(x, case.takes))
        return bench.leave(pull(y)[0], case.takes)

    found = bench.simulate(on_a_rank)(bench.x(), once[0, 0] if case.gives == VARYING else once[0])
    assert difference(found, bench.expected_adjoint(once.expand(like.shape))) == EXACT


# --- more of what each promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=_id)
def test_pmax_is_the_largest_and_passes_no_gradient(mesh):
    """Catches a maximum over the wrong axis, and a maximum that routes a gradient to some rank."""
    case = Case("pmax", VARYING, INVARIANT, lambda x, axis, n: fcp.pmax(x, axis), max_of, lambda n: (2, 3))
    bench = Bench(case, mesh)
    x = (bench.x() * 37) % 101
    assert difference(bench.run(x), bench.expected(x)) == EXACT
    for way in (bench.adjoint_outside, bench.adjoint_inside, bench.adjoint_autograd):
        assert way(bench.y()).abs().max() == EXACT
    vmapped = Bench(under_vmap(case, 1), mesh)
    x = -((vmapped.x() * 37) % 101)
    assert difference(vmapped.run(x), vmapped.expected(x)) == EXACT


@pytest.mark.parametrize("case", CASES, ids=_id)
@pytest.mark.parametrize("mesh", [({"a": 1}, "a"), ({"a": 1, "b": 1}, ("b", "a"))], ids=_id)
def test_an_axis_of_one_rank_is_the_identity(case, mesh):
    """Catches work, or a change of shape, where there is nobody to talk to."""
    bench = Bench(case, mesh)
    x, y = bench.x(), bench.y()
    assert difference(bench.run(x), bench.expected(x)) == EXACT
    assert difference(bench.adjoint_outside(y), bench.expected_adjoint(y)) == EXACT
    assert difference(bench.adjoint_inside(y), bench.expected_adjoint(y)) == EXACT
    if case.name != "ppermute of none":
        local = x[0] if case.takes == INVARIANT else x[0, 0]
        seen = []
        bench.simulate(lambda: seen.append(bench.apply(local)) or 0)()
        assert seen[0] is local


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("name", ["shard", "unshard", "pvary", "all_gather", "all_to_all", "ppermute", "own_slice"])
def test_layouts_keep_the_dtype(name, dtype):
    """Catches token ids, masks or half floats that come back as another dtype, or not at all."""
    (case,) = [case for case in CASES if case.name == name]
    bench = Bench(case, TWO_AXES[1])
    x = (bench.x() % 5).to(dtype)
    found = bench.run(x)
    assert found.dtype == dtype
    assert torch.equal(found, bench.expected(x))


@pytest.mark.parametrize("mesh", [ONE_AXIS[1], *TWO_AXES[:4]], ids=_id)
def test_pairs_that_undo_each_other(mesh):
    """Catches an exchange whose way back is another one (batch and heads mixed up where their sizes are equal)."""
    sizes, axis = mesh
    n = math.prod(sizes.values())
    x = torch.arange(2.0 * n * n * 3).reshape(2, n, n, 3)

    def exchange_and_back(x):
        local = fcp.shard(x, axis, dim=1)
        there = fcp.all_to_all(local, axis, split_dim=2, concat_dim=1)
        by_heads = fcp.unshard(there, axis, dim=2)
        return fcp.unshard(fcp.all_to_all(there, axis, split_dim=1, concat_dim=2), axis, dim=1), by_heads

    for found in fcp.simulate(exchange_and_back, **sizes)(x):
        assert torch.equal(found, x)
    perm = [(rank, (3 * rank + 1) % n) for rank in range(n)] if n % 3 else ring(n)
    back = [(target, source) for source, target in perm]
    there = fcp.simulate(
        lambda x: fcp.unshard(fcp.ppermute(fcp.shard(x, axis, dim=1), axis, perm=perm), axis, dim=1), **sizes
    )
    again = fcp.simulate(
        lambda x: fcp.unshard(fcp.ppermute(fcp.shard(x, axis, dim=1), axis, perm=back), axis, dim=1), **sizes
    )
    assert torch.equal(again(there(x)), x)
    assert not torch.equal(there(x), x)


def test_own_slice_after_pvary_moves_the_gradient_of_shard():
    """Catches the pair used wrongly: shard after pvary counts every gradient once a rank."""
    case = Case(
        "pvary, own_slice",
        INVARIANT,
        VARYING,
        lambda x, axis, n: fcp.own_slice(fcp.pvary(x, axis), axis, dim=1),
        lambda xs: shard_of(xs, 1),
        lambda n: (2, 2 * n),
    )
    for mesh in MESHES:
        assert Bench(case, mesh).error() == EXACT
    shard_instead = replace(case, apply=lambda x, axis, n: fcp.shard(fcp.pvary(x, axis), axis, dim=1))
    bench = Bench(shard_instead, ({"a": 3}, "a"))
    assert difference(bench.adjoint_inside(bench.y()), 3 * bench.expected_adjoint(bench.y())) == EXACT


# --- refusals ---------------------------------------------------------------------------------------------------------

UNARY = {
    "shard": lambda x, axis: fcp.shard(x, axis, dim=0),
    "unshard": lambda x, axis: fcp.unshard(x, axis, dim=0),
    "pvary": fcp.pvary,
    "psum": fcp.psum,
    "all_gather": lambda x, axis: fcp.all_gather(x, axis, dim=0),
    "psum_scatter": lambda x, axis: fcp.psum_scatter(x, axis, dim=0),
    "all_to_all": lambda x, axis: fcp.all_to_all(x, axis, split_dim=0, concat_dim=1),
    "ppermute": lambda x, axis: fcp.ppermute(x, axis, perm=[]),
    "pmax": fcp.pmax,
    "own_slice": lambda x, axis: fcp.own_slice(x, axis, dim=0),
}


@pytest.mark.parametrize("name", UNARY)
def test_an_unbound_axis_is_a_name_error(name):
    """Catches a collective that does nothing where no runtime bound its axis."""
    with pytest.raises(NameError, match=rf"{name}: axis 'cp' is not bound"):
        UNARY[name](torch.ones(4, 4), "cp")
    with pytest.raises(NameError, match=rf"{name}: axis 'cp' is not bound \(bound here: tp\)"):
        fcp.simulate(lambda x: UNARY[name](x, ("tp", "cp")), tp=2)(torch.ones(4, 4))


@pytest.mark.parametrize("name", UNARY)
def test_a_repeated_axis_is_refused(name):
    """Catches a tuple that would sum or split twice over one axis."""
    with pytest.raises(ValueError, match="name each axis once"):
        fcp.simulate(lambda x: UNARY[name](x, ("cp", "cp")), cp=2)(torch.ones(4, 4))


@pytest.mark.parametrize("name", ["shard", "psum_scatter", "all_to_all", "own_slice"])
def test_a_size_that_the_ranks_do_not_divide_is_refused(name):
    """Catches entries that are cut off without a word; the message has the shape, the ranks and the way out."""
    with pytest.raises(ValueError, match=rf"{name}: dim 0 of shape \(4, 4\) has 4 entries, which a=3 .* multiple of 3"):
        fcp.simulate(lambda x: UNARY[name](x, "a"), a=3)(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"a=2 x b=4 ranks do not divide; pad it to a multiple of 8"):
        fcp.simulate(lambda x: UNARY[name](x, ("a", "b")), a=2, b=4)(torch.ones(4, 4))


@pytest.mark.parametrize("dim", [2, -3])
@pytest.mark.parametrize("name", ["shard", "unshard", "all_gather", "psum_scatter", "own_slice"])
def test_a_dim_that_the_tensor_does_not_have_is_refused(name, dim):
    """Catches a dim that wraps around to another one."""
    with pytest.raises(ValueError, match=rf"{name}: dim {dim} of a tensor of shape \(4, 4\)"):
        fcp.simulate(lambda x: getattr(fcp, name)(x, "a", dim=dim), a=2)(torch.ones(4, 4))


def test_all_to_all_refuses_wrong_dims():
    """Catches a split and a concatenation along one dim, also where one of them is written negative."""
    for split, concat, words in ((1, -1, "both 1; they must differ"), (2, 0, "dim 2"), (0, -3, "dim -3")):
        with pytest.raises(ValueError, match=rf"all_to_all: .*{words}"):
            fcp.simulate(lambda x, s=split, c=concat: fcp.all_to_all(x, "a", split_dim=s, concat_dim=c), a=2)(
                torch.ones(4, 4)
            )


@pytest.mark.parametrize(
    ("perm", "words"),
    [
        ([(0, 1), (0, 0)], r"sources \[0, 0\] over axis 'a' must be different ranks of 0\.\.1"),
        ([(0, 1), (1, 1)], r"targets \[1, 1\]"),
        ([(0, 2)], r"targets \[2\]"),
        ([(-1, 0)], r"sources \[-1\]"),
    ],
)
def test_ppermute_refuses_what_is_no_permutation(perm, words):
    """Catches two senders to one rank (one is lost), and rank numbers that wrap around."""
    with pytest.raises(ValueError, match=f"ppermute: {words}"):
        fcp.simulate(lambda x: fcp.ppermute(x, "a", perm=perm), a=2)(torch.ones(4))


@pytest.mark.parametrize("name", ["shard", "pvary"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_varies_already_is_refused(name, inside):
    """Catches a second split or mark over one axis, whose gradient would be summed twice."""

    def fn(x):
        return fcp.psum(UNARY[name](fcp.shard(x, "a", dim=0), "a").sum(), "a")

    fn = fcp.value_and_grad(fn) if inside else fn
    with pytest.raises(
        ValueError, match=rf"{name} over axis 'a' takes .* every rank holds alike.*drop the second {name}"
    ):
        fcp.simulate(fn, a=2)(torch.ones(4, 4))
    over_another = fcp.simulate(
        lambda x: fcp.psum(UNARY[name](fcp.shard(x, "a", dim=0), "b").sum(), ("a", "b")), a=2, b=2
    )
    assert over_another(torch.ones(4, 4)) == (16 if name == "shard" else 32)


def test_a_collective_after_its_simulation_has_ended():
    """Catches a function that runs on dead ranks: the error says what happened."""
    kept = []

    def fn(x):
        kept.append(fcp.axes.bound())
        return fcp.psum(x, "a")

    fcp.simulate(fn, a=2)(torch.ones(2))
    with (
        pytest.raises(RuntimeError, match=r"psum: axis 'a' has no ranks here; .* already returned"),
        fcp.axes.bind(kept[0]["a"]),
    ):
        fcp.psum(torch.ones(2), "a")


# --- the checks notice faults -----------------------------------------------------------------------------------------


RIGHT = collectives.__dict__.copy()


def _mean(x, size, rule):
    return x.mean(0)


def _mean_scatter(x, size, rule):
    return RIGHT["_dense_shard"](x.mean(0), size, rule)


def _tiled_exchange(x, size, rule):
    split, concat = rule.dims
    x = x.unflatten(split + 1, (-1, size)).movedim(split + 2, 0)
    return x.movedim(1, concat + 1).flatten(concat + 1, concat + 2)


def _interleaved_exchange(x, size, rule):
    split, concat = rule.dims
    x = x.unflatten(split + 1, (size, -1)).movedim(split + 1, 0)
    return x.movedim(1, concat + 2).flatten(concat + 1, concat + 2)


def _interleaved_shard(x, size, rule):
    (dim,) = rule.dims
    return x.unflatten(dim, (-1, size)).movedim(dim + 1, 0)


def _reversed_join(x, size, rule):
    return RIGHT["_dense_join"](x.flip(0), size, rule)


def _reversed_lookup(axis, user, **more):
    return RIGHT["lookup"](axis, user, **more)[::-1]


def _unlike(adjoint, change):
    """A row's adjoint whose dense map is changed."""

    def made(rule):
        right = RIGHT[adjoint](rule)
        return replace(right, dense=lambda x, size, rule: change(right.dense, x, size, rule))

    return made


def _half(dense, x, size, rule):
    return dense(x, size, rule) / 2


def _from_others(dense, x, size, rule):
    return dense(x.flip(0), size, rule)


# The fault, what it replaces, what stands in, and the case that must notice.
MUTANTS = [
    ("psum is a mean", "_dense_sum", _mean, "psum"),
    ("psum_scatter is a mean", "_dense_sum_scatter", _mean_scatter, "psum_scatter"),
    ("all_to_all is tiled", "_dense_exchange", _tiled_exchange, "all_to_all"),
    ("all_to_all interleaves the senders", "_dense_exchange", _interleaved_exchange, "all_to_all back"),
    ("shard takes every nth entry", "_dense_shard", _interleaved_shard, "shard"),
    ("unshard stacks in reverse", "_dense_join", _reversed_join, "unshard"),
    ("the first name is fastest", "lookup", _reversed_lookup, "unshard"),
    ("own_slice has the first name fastest", "axis_index", lambda axis: fcp.axis_index(axis[::-1]), "own_slice"),
    ("own_slice is always rank 0's", "axis_index", lambda axis: 0 * fcp.axis_index(axis), "own_slice"),
    ("the adjoint of psum is psum", "_to_pvary", RIGHT["_to_psum"], "psum"),
    ("the adjoint of psum is halved", "_to_pvary", _unlike("_to_pvary", _half), "psum"),
    ("the adjoint of pvary misses its sum", "_to_psum", RIGHT["_to_pvary"], "pvary"),
    ("the adjoint of pvary is halved", "_to_psum", _unlike("_to_psum", _half), "pvary"),
    ("the adjoint of shard is halved", "_to_unshard", _unlike("_to_unshard", _half), "shard"),
    ("the adjoint of unshard is psum_scatter", "_to_shard", RIGHT["_to_psum_scatter"], "unshard"),
    ("the adjoint of all_gather is halved", "_to_psum_scatter", _unlike("_to_psum_scatter", _half), "all_gather"),
    ("the adjoint of all_gather is shard", "_to_psum_scatter", RIGHT["_to_shard"], "all_gather"),
    ("the adjoint of psum_scatter is halved", "_to_all_gather", _unlike("_to_all_gather", _half), "psum_scatter"),
    ("the adjoint of all_to_all errs in the rank", "_to_exchange", _unlike("_to_exchange", _from_others), "all_to_all"),
    ("the adjoint of ppermute is ppermute", "_to_permute", lambda rule: rule, "ppermute"),
]


def _error_or_refusal(bench: Bench) -> float:
    try:
        return bench.error()
    except ValueError as refusal:
        return math.inf if "differs between the ranks of axis" in str(refusal) else 0.0


@pytest.mark.parametrize(("where", "mutant", "case"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_the_checks_notice(where, mutant, case, monkeypatch):
    """Catches a check that would pass whatever a collective or its adjoint did."""
    (case,) = [each for each in CASES if each.name == case]

    def faulty(x, axis, n):  # the fault is in the collective alone, not in how the harness moves values in and out
        with monkeypatch.context() as patch:
            patch.setattr(collectives, where, mutant)
            return case.apply(x, axis, n)

    mesh = ({"a": 2, "b": 3}, ("a", "b"))
    assert Bench(case, mesh).error() == EXACT
    assert _error_or_refusal(Bench(replace(case, apply=faulty), mesh)) > 1e-6


# --- several tensors in one exchange ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 3}, {"b": 3, "a": 2}], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_tensors_that_travel_together_are_those_that_travel_alone(sizes, inside):
    """A leaf split over another axis that its neighbour in the bucket is not; gradients given to the wrong leaf."""
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 2), (), (6,))]

    def loss_of(mark):
        def fn(leaves):
            one, two = mark(leaves[:2], "b")
            one, two, three = mark([one, two, fcp.shard(leaves[2], "b", dim=0)], "a")
            rank = 1 + fcp.axis_index("a")
            return fcp.psum(rank * (torch.sin(rank * one).sum() * torch.cos(two) + torch.exp(three).sum()), ("a", "b"))

        return fn

    found, sums = [], []
    for mark in (collectives.pvary_each, lambda xs, axis: [fcp.pvary(x, axis) for x in xs]):
        fn = loss_of(mark)
        run = fcp.simulate(fcp.value_and_grad(fn), **sizes) if inside else fcp.value_and_grad(fcp.simulate(fn, **sizes))
        plain = run(leaves)
        with fcp.record() as events:
            found.append(run(leaves))
        assert all(torch.equal(a, b) for a, b in zip(plain[1], found[-1][1], strict=True))
        sums.append({e.shape for e in events if e.name == "psum" and e.backward and e.axis == ("a",)})
    (value, grads), (expected, expected_grads) = found
    assert torch.equal(value, expected)
    assert all(torch.allclose(g, e, rtol=1e-12, atol=0) for g, e in zip(grads, expected_grads, strict=True))
    assert sums == [{(6 + 1 + 2,)}, {(3, 2), (), (2,)}]

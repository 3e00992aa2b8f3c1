"""The record of collectives: what each event says, and that the backward ones do not depend on where grad is taken."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import fcp
from fcp import trace
from tests.toys import batch_of, tokens, toy


def counted(events):
    return Counter((event.name, event.axis, event.shape, event.backward) for event in events)


def only(events, *, backward):
    return [event for event in events if event.backward == backward]


def every_collective(x):
    """One of each, over two axes and their product, with the shapes all different."""
    x = fcp.shard(fcp.shard(x, "a", dim=0), "b", dim=1)
    x = fcp.all_to_all(x, ("b", "a"), split_dim=2, concat_dim=0)
    x = fcp.psum_scatter(fcp.all_gather(x, "b", dim=1), "b", dim=1)
    x = fcp.ppermute(x, "a", perm=[(0, 1), (1, 0)])
    x = x - fcp.pmax(x, "b")
    x = fcp.pvary(fcp.unshard(x, ("a", "b"), dim=1), ("a", "b")) * (1 + fcp.axis_index("a"))
    return fcp.psum(fcp.psum(x.sum(), "a"), "b")


FORWARD = [
    ("shard", ("a",), (4, 12, 12)),
    ("shard", ("b",), (2, 12, 12)),
    ("all_to_all", ("b", "a"), (2, 4, 12)),
    ("all_gather", ("b",), (12, 4, 2)),
    ("psum_scatter", ("b",), (12, 12, 2)),
    ("ppermute", ("a",), (12, 4, 2)),
    ("pmax", ("b",), (12, 4, 2)),
    ("unshard", ("a", "b"), (12, 4, 2)),
    ("pvary", ("a", "b"), (12, 24, 2)),
    ("psum", ("a",), ()),
    ("psum", ("b",), ()),
]
BACKWARD = [
    ("pvary", ("b",), ()),
    ("pvary", ("a",), ()),
    ("psum", ("a", "b"), (12, 24, 2)),
    ("shard", ("a", "b"), (12, 24, 2)),
    ("ppermute", ("a",), (12, 4, 2)),
    ("all_gather", ("b",), (12, 4, 2)),
    ("psum_scatter", ("b",), (12, 12, 2)),
    ("all_to_all", ("b", "a"), (12, 4, 2)),
    ("unshard", ("b",), (2, 4, 12)),
    ("unshard", ("a",), (2, 12, 12)),
]
SIZES = {"a": 2, "b": 3}
X = torch.linspace(0, 1, 4 * 12 * 12, dtype=torch.float64).reshape(4, 12, 12)
WAYS = {
    "torch.func.grad outside": lambda **mesh: torch.func.grad(fcp.simulate(every_collective, **mesh)),
    "value_and_grad outside": lambda **mesh: fcp.value_and_grad(fcp.simulate(every_collective, **mesh)),
    "torch.func.grad inside": lambda **mesh: fcp.simulate(torch.func.grad(every_collective), **mesh),
    "value_and_grad inside": lambda **mesh: fcp.simulate(fcp.value_and_grad(every_collective), **mesh),
}


def _listed(events):
    return [(event.name, event.axis, event.shape) for event in events]


# --- one event --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_forward_pass_is_listed_in_order(order):
    """Catches a collective that is missing, listed once a rank or level, or with the shape of all ranks together."""
    with fcp.record() as events:
        fcp.simulate(every_collective, **{name: SIZES[name] for name in order})(X)
    assert _listed(events) == FORWARD
    assert not any(event.backward for event in events)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("way", WAYS)
def test_the_backward_pass_is_the_adjoints_in_reverse(way, order):
    """Catches an adjoint that is listed twice or not at all, or with the shape of what it gives."""
    with fcp.record() as events:
        WAYS[way](**{name: SIZES[name] for name in order})(X)
    assert _listed(only(events, backward=False)) == FORWARD
    assert _listed(only(events, backward=True)) == BACKWARD
    assert [event.backward for event in events] == [False] * len(FORWARD) + [True] * len(BACKWARD)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8), (torch.bool, 1)]
)
def test_bytes_are_what_one_rank_hands_in(dtype, size):
    """Catches a volume that counts all ranks, or elements instead of bytes."""
    with fcp.record() as events:
        fcp.simulate(lambda x: fcp.unshard(fcp.shard(x, "a", dim=0), "a", dim=0), a=2)(torch.ones(4, 3).to(dtype))
    assert [(event.dtype, event.bytes) for event in events] == [(dtype, 12 * size), (dtype, 6 * size)]


def test_a_scalar_has_the_bytes_of_one_number():
    """Catches an empty shape that counts as nothing."""
    assert fcp.Event("psum", ("a",), (), torch.float32, False).bytes == 4


def test_other_levels_are_no_part_of_the_shape():
    """Catches a shape that grows by the ranks of another axis, or by the caller's own vmap."""

    def fn(x):
        rows = fcp.shard(x, "other", dim=0)
        return fcp.psum(torch.func.vmap(lambda row: fcp.psum(row, "a"))(rows).sum(), "other")

    with fcp.record() as events:
        torch.func.vmap(fcp.simulate(fn, other=2, a=3))(torch.ones(5, 4, 7))
    assert _listed(events) == [("shard", ("other",), (4, 7)), ("psum", ("a",), (7,)), ("psum", ("other",), ())]


def test_an_axis_of_one_rank_is_not_listed():
    """Catches a volume for messages that nobody sends."""
    with fcp.record() as events:
        fcp.simulate(lambda x: fcp.psum(fcp.psum(x, ("one", "a")), "one"), one=1, a=2)(torch.ones(3))
    assert _listed(events) == [("psum", ("a",), (3,))]


def test_what_is_not_differentiated_has_no_backward():
    """Catches adjoints that are listed because they could run."""
    with fcp.record() as events:
        torch.func.grad(fcp.simulate(lambda w, x: w * fcp.psum(fcp.shard(x, "a", dim=0).sum(), "a"), a=2))(
            torch.ones(()), torch.ones(4)
        )
    assert _listed(only(events, backward=True)) == []
    assert len(events) == 2


def test_recomputed_collectives_are_listed_again():
    """Catches a trace that hides what rematerialisation costs: forward collectives run a second time in backward."""

    def layer(piece, x):
        return torch.tanh(x * fcp.all_gather(piece, "a", dim=0))

    def fn(w, x):
        y = fcp.rematerialize(layer)(fcp.shard(w, "a", dim=0), fcp.shard(x, "a", dim=0))
        return fcp.psum(y.sum(), "a")

    w, x = torch.ones(4), torch.ones(2, 4)
    for gradient in (torch.func.grad(fcp.simulate(fn, a=2)), fcp.simulate(fcp.value_and_grad(fn), a=2)):
        with fcp.record() as events:
            gradient(w, x)
        names = Counter((event.name, event.backward) for event in events)
        assert names[("all_gather", False)] == 2
        assert names[("psum_scatter", True)] == 1


# --- the recording ----------------------------------------------------------------------------------------------------


def test_recording_ends_with_its_block():
    """Catches events that go on into a list that was read, and a recording that an error leaves on."""
    fn = fcp.simulate(lambda x: fcp.psum(x, "a"), a=2)
    with fcp.record() as events:
        fn(torch.ones(1))
    fn(torch.ones(1))
    assert len(events) == 1
    with pytest.raises(ValueError, match="boom"), fcp.record() as broken:
        raise ValueError("boom")
    fn(torch.ones(1))
    assert broken == []


def test_the_inner_recording_takes_its_part():
    """Catches an event in two lists, or an outer list that is lost to the inner one."""
    fn = fcp.simulate(lambda x: fcp.psum(x, "a"), a=2)
    with fcp.record() as outer:
        fn(torch.ones(1))
        with fcp.record() as inner:
            fn(torch.ones(2))
        fn(torch.ones(3))
    assert [event.shape for event in outer] == [(1,), (3,)]
    assert [event.shape for event in inner] == [(2,)]


def test_recording_changes_no_number():
    """Catches a trace that takes part in what it watches."""
    for way in ("torch.func.grad outside", "torch.func.grad inside"):
        plain = WAYS[way](**SIZES)(X)
        with fcp.record():
            assert torch.equal(WAYS[way](**SIZES)(X), plain)


# --- a model ----------------------------------------------------------------------------------------------------------

MESHES = [
    {"cp": 2},
    {"cp": 4},
    {"tp": 2},
    {"dp": 2},
    {"fsdp": 2},
    {"cp": 2, "tp": 2},
    {"fsdp": 2, "cp": 2},
    {"cp": 2, "tp": 2, "remat": True},
    {"dp": 2, "fsdp": 2, "cp": 2, "tp": 2},
]


def _model_events(mesh):
    model, params = toy()
    batch = batch_of(tokens(4, 8))
    sharded = fcp.transform(model, **mesh)
    inputs = fcp.prepare(batch)
    ways = {
        "torch.func.grad outside": lambda: torch.func.grad(lambda p: sharded(p, batch).loss)(params),
        "value_and_grad outside": lambda: fcp.value_and_grad(sharded)(params, batch),
        "value_and_grad inside": lambda: fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(
            params, inputs
        ),
    }
    found = {}
    for way, run in ways.items():
        with fcp.record() as events:
            run()
        found[way] = events
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "*".join(f"{name}{size}" for name, size in mesh.items()))
def test_a_model_has_the_same_events_wherever_it_is_differentiated(mesh):
    """Catches a simulated step that runs other collectives than the processes, which differentiate inside, would."""
    outside, value_and_grad, inside = (counted(events) for events in _model_events(mesh).values())
    assert outside == inside
    assert value_and_grad == inside
    assert any(backward for *_, backward in inside) and any(not backward for *_, backward in inside)


def _silent_tap(x, event):
    return x


def _noted_twice(event):
    trace.note(event)
    if event.name == "psum_scatter":
        trace.note(event)


@pytest.mark.parametrize(
    ("name", "where", "mutant"),
    [
        ("the outer gradient is not noted", "_collective.tap", _silent_tap),
        ("one collective is noted twice", "_collective.note", _noted_twice),
        (
            "backward is noted as forward",
            "_collective.tap",
            lambda x, event: trace.tap(x, replace(event, backward=False)),
        ),
    ],
)
def test_the_checks_notice(name, where, mutant, monkeypatch):
    """Catches a comparison of traces that two wrong ones would pass."""
    monkeypatch.setattr(f"fcp.{where}", mutant)
    with fcp.record() as events:
        WAYS["torch.func.grad outside"](**SIZES)(X)
    assert counted(events) != Counter([(*each, False) for each in FORWARD] + [(*each, True) for each in BACKWARD])

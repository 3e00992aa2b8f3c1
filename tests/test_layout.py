"""Where a rank's part of a leaf lies: the arithmetic says what the collectives do."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fcp
from fcp import sharded
from fcp._layout import Part, part_of, put, take
from fcp.sharded import Piece, Placement

AXES = ("fsdp", "cp", "tp")


@st.composite
def leaves(draw: Any) -> Any:
    """A shape, what cuts it (plain values: the records check theirs at random), and the sizes of the axes."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    shape = [draw(st.integers(1, 7)) for _ in range(draw(st.integers(1, 3)))]
    split = None
    if draw(st.booleans()):
        dim, size = draw(st.integers(-len(shape), len(shape) - 1)), sizes["tp"]
        kind = draw(st.sampled_from(["even", "pieces", "vocab"]))
        split = {"dim": dim}
        if kind == "vocab":
            split["vocab"] = shape[dim]
        elif kind == "even":
            shape[dim] *= size
        else:
            split["pieces"] = tuple(size * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3))))
            shape[dim] = sum(split["pieces"])
    return tuple(shape), split, draw(st.sampled_from([(), ("fsdp",), ("fsdp", "cp")])), sizes


@settings(deadline=None)
@given(leaves())
def test_a_part_is_what_the_collectives_cut(leaf: Any) -> None:
    """A rank that reads other rows of a file than it would have been handed; padding in the middle; pieces mixed up."""
    shape, split, stored, sizes = leaf
    placement = Placement(() if split is None else (("tp", fcp.Split(**split)),), stored)
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)

    def every_rank(x: torch.Tensor) -> torch.Tensor:
        local = sharded._cut(x, placement)
        local = local.value if isinstance(local, Piece) else local
        found = local.unsqueeze(0)
        for axis in reversed(AXES):  # a copy from each rank, the first axis slowest
            found = fcp.all_gather(found, axis, dim=0) * (1 + 0 * fcp.axis_index(axis))
        return fcp.pmax(found, AXES)

    cut = fcp.simulate(every_rank, **sizes)(whole)
    again = torch.zeros_like(whole)
    for index, expected in enumerate(cut):
        place, rest = {}, index
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, sizes[axis])
        part = part_of(shape, placement, sizes, place)
        local = take(whole, part)
        assert part.shape == tuple(expected.shape)
        assert torch.equal(local, expected)
        put(again, part, local)
    assert torch.equal(again, whole)


def test_a_part_holds_no_more_than_itself() -> None:
    """A shard that is a view keeps the whole parameter alive."""
    whole = torch.randn(8, 4)
    local = take(whole, part_of((8, 4), Placement(stored=("fsdp",)), {"fsdp": 4}, {"fsdp": 1}))
    assert local.untyped_storage().nbytes() == whole.untyped_storage().nbytes() // 4
    assert local.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_nothing_splits_is_whole(shape: tuple[int, ...]) -> None:
    """A scalar has no dim to cut."""
    x = torch.randn(shape)
    part = part_of(shape, Placement(), {}, {})
    assert part == Part(tuple(((0, n),) for n in shape), shape, shape)
    assert torch.equal(take(x, part), x)
    again = torch.zeros(shape)
    put(again, part, x)
    assert torch.equal(again, x)

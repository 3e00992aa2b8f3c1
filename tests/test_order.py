"""The order in which ranks hold a sequence: a permutation that evens out the work, and that everything follows."""

import pytest
import torch
from torch.func import vmap

import fcp
from fcp._order import LAYOUTS, count_keys, multiple_of, order_of
from fcp.masks import Mask, count_pairs, describe, materialize
from tests.toys import PACK8, batch_of, gradient, tokens, toy, worst_error


def uneven(num: int, seq: int, seed: int = 0) -> list[int]:
    """The lengths of `num` documents that fill a row."""
    cuts = torch.randperm(seq - 1, generator=torch.Generator().manual_seed(seed))[: num - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([seq])).tolist()


def packed(lengths: list[int]) -> Mask:
    return describe(torch.cat([torch.arange(n) for n in lengths])[None])


def work(mask: Mask, layout: str, size: int) -> torch.Tensor:
    """The (query, key) pairs that each rank computes where it keeps its own queries."""
    multiple = multiple_of(layout, mask.seq, size)
    assert mask.seq % multiple == 0
    order = order_of(layout, mask, size, multiple // size)
    keys = count_keys(mask)
    keys = keys if order is None else keys.gather(1, order)
    return keys.unflatten(1, (size, -1)).sum((0, 2)).double()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "seq"), [(2, 12), (3, 18), (4, 32), (8, 1024)])
def test_a_permutation_of_every_row(layout: str, size: int, seq: int) -> None:
    """A token that two ranks hold, and one that none does."""
    positions = torch.stack([torch.arange(seq), torch.cat([torch.arange(seq // 3), torch.arange(seq - seq // 3)])])
    mask = describe(positions)
    multiple = multiple_of(layout, seq, size)
    assert seq % multiple == 0
    order = order_of(layout, mask, size, multiple // size)
    if layout == "contiguous":
        assert order is None
    else:
        assert torch.equal(order.sort(1).values, torch.arange(seq).expand(2, -1))
        assert bool((order.unflatten(1, (size, -1)).diff(dim=2) > 0).all()), "a rank's tokens are not in their order"


def test_zigzag_is_a_pair_from_both_ends() -> None:
    """Pieces in another order than rank r: r and 2 size - 1 - r."""
    order = order_of("zigzag", describe(torch.arange(12)[None]), 3, 4)
    assert order.tolist() == [[0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]]


def test_keys_are_counted() -> None:
    """Work counted over padding or other documents."""
    masks = [
        describe(torch.arange(9)[None]),
        describe(torch.tensor([PACK8])),
        describe(torch.arange(9).repeat(2, 1), valid=torch.tensor([[0] * 3 + [1] * 6, [1] * 5 + [0] * 4]).bool()),
    ]
    for mask in masks:
        allowed = materialize(mask)
        full = torch.ones(mask.seq, mask.seq, dtype=torch.bool).tril() if allowed is None else allowed[:, 0]
        assert torch.equal(count_keys(mask), full.sum(-1).expand(mask.positions.shape))
        assert int(count_keys(mask).sum()) == count_pairs(mask)


def test_work_is_even() -> None:
    """The claim: on 37 uneven documents at cp 8 the busiest rank has at most 1.05 of the mean; in order, far more."""
    for seed in range(5):
        mask = packed(uneven(37, 8192, seed))
        shares = {layout: work(mask, layout, 8) for layout in LAYOUTS}
        worst = {layout: float(x.max() / x.mean()) for layout, x in shares.items()}
        assert worst["balanced"] <= 1.05
        assert worst["contiguous"] > 1.3
    plain = describe(torch.arange(8192)[None])
    assert float(work(plain, "zigzag", 8).max() / work(plain, "zigzag", 8).mean()) == 1.0
    assert float(work(plain, "contiguous", 8).max() / work(plain, "contiguous", 8).mean()) > 1.8


def test_rows_are_ordered_by_their_own_documents_under_vmap() -> None:
    """One row's order for all rows of a batch that another axis splits."""
    rows = torch.stack([torch.cat([torch.arange(n) for n in uneven(5, 64, seed)]) for seed in range(4)])
    whole = order_of("balanced", describe(rows), 2, 2)

    def one(positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return order_of("balanced", Mask(positions[None], documents[None], None, True), 2, 2)[0]

    mask = describe(rows)
    assert torch.equal(vmap(one)(mask.positions, mask.documents), whole)


def test_a_mask_that_does_not_follow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the description of the row's own order, while the ranks hold another."""
    model, params = toy()
    batch = batch_of(tokens(1, 8), position_ids=torch.tensor([PACK8]))
    sharded = fcp.transform(model, cp=2, cp_impl="gather", layout="zigzag")
    expected = gradient(model, params, batch)
    assert worst_error(expected, gradient(sharded, params, batch)) < 1e-10
    take = Mask.take

    def forgetful(self: Mask, at: torch.Tensor) -> Mask:
        return self if at.shape[-1] == self.seq else take(self, at)

    monkeypatch.setattr(Mask, "take", forgetful)
    assert worst_error(expected, gradient(sharded, params, batch)) > 1e-6

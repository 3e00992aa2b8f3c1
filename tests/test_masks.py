"""Masks: the description, and what it materialises to, against a double loop over queries and keys."""

from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fcp
from fcp.masks import Mask, count_pairs, describe, materialize
from tests.toys import PACK8


def row(*values: int) -> Tensor:
    return torch.tensor([values])


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shape annotations off, as they are for users: the library's own message is what is tested."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- the reference: a double loop, from the definition in words -------------------------------------------------------


def allowed_by_hand(
    positions: list[int],
    documents: list[int] | None,
    valid: list[bool],
    window: int | None,
    chunk: int | None,
) -> Tensor:
    """[seq, seq], one row of a batch."""
    if documents is None:
        documents, current = [], -1
        for i, p in enumerate(positions):
            if i == 0 or p != positions[i - 1] + 1:
                current += 1
            documents.append(current)
    seq = len(positions)
    found = torch.zeros(seq, seq, dtype=torch.bool)
    for q in range(seq):
        for k in range(seq):
            found[q, k] = (
                k <= q
                and valid[k]
                and documents[q] == documents[k]
                and (window is None or positions[q] - positions[k] < window)
                and (chunk is None or positions[q] // chunk == positions[k] // chunk)
            )
    return found


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, object]:
    """Rows of positions, documents and validity of every kind that a batch may hold."""
    seq = draw(st.integers(1, 9))
    batch = draw(st.integers(1, 2))

    def positions() -> list[int]:
        kind = draw(st.sampled_from(["whole", "shifted", "restarting", "irregular"]))
        if kind == "irregular":
            return draw(st.lists(st.integers(-3, 12), min_size=seq, max_size=seq))
        first = 0 if kind == "whole" else draw(st.integers(-4, 4))
        found = list(range(first, first + seq))
        if kind == "restarting":
            for start in sorted(draw(st.sets(st.integers(0, seq - 1)))):
                found[start:] = range(seq - start)
        return found

    def validity() -> list[bool]:
        kind = draw(st.sampled_from(["all", "left", "right", "scattered", "none"]))
        edge = draw(st.integers(0, seq))
        if kind == "scattered":
            return draw(st.lists(st.booleans(), min_size=seq, max_size=seq))
        return [{"all": True, "left": i >= edge, "right": i < edge, "none": False}[kind] for i in range(seq)]

    explicit = draw(st.booleans())
    some_valid = draw(st.booleans())
    # Few ids over many tokens: ids stay, change, and return after another.
    ids = st.lists(st.integers(0, 2), min_size=seq, max_size=seq)
    return {
        "positions": [positions() for _ in range(batch)],
        "documents": [draw(ids) for _ in range(batch)] if explicit else None,
        "valid": [validity() for _ in range(batch)] if some_valid else None,
        "window": draw(st.none() | st.integers(1, seq + 2)),
        "chunk": draw(st.none() | st.integers(1, seq + 2)),
    }


def slices(seq: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, seq), st.integers(0, seq)).map(lambda ends: slice(min(ends), max(ends)))


def check(case: dict[str, object], q_slice: slice, k_slice: slice, under_test: Callable[..., Tensor | None]) -> bool:
    """Whether the materialised slice is the double loop's."""
    positions, documents, valid = case["positions"], case["documents"], case["valid"]
    window, chunk = case["window"], case["chunk"]
    mask = describe(
        torch.tensor(positions),
        documents=None if documents is None else torch.tensor(documents),
        valid=None if valid is None else torch.tensor(valid),
    )
    seq = mask.seq
    wanted = torch.stack(
        [
            allowed_by_hand(
                positions[r],
                None if documents is None else documents[r],
                [True] * seq if valid is None else valid[r],
                window,
                chunk,
            )
            for r in range(len(positions))
        ]
    )[:, None, q_slice, k_slice]
    got = under_test(mask, q_slice, k_slice, window=window, chunk=chunk)
    if got is None:
        got = torch.ones(seq, seq, dtype=torch.bool).tril()[q_slice, k_slice].expand_as(wanted)
    return got.dtype == torch.bool and torch.equal(got, wanted)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mask_is_the_double_loop_on_every_slice(data: st.DataObject) -> None:
    """Catches a clause of `allowed` that is wrong, dropped, or taken from the slice instead of from the whole row."""
    case = data.draw(descriptions())
    seq = len(case["positions"][0])
    q_slice = data.draw(st.just(slice(None)) | slices(seq))
    k_slice = data.draw(st.just(q_slice) | slices(seq))
    assert check(case, q_slice, k_slice, materialize)


def _inclusive_window(mask: Mask, *where: slice, window: int | None, chunk: int | None) -> Tensor | None:
    return materialize(mask, *where, window=None if window is None else window + 1, chunk=chunk)


def _dropped_window(mask: Mask, *where: slice, window: int | None, chunk: int | None) -> Tensor | None:
    return materialize(mask, *where, chunk=chunk)


def _dropped_chunk(mask: Mask, *where: slice, window: int | None, chunk: int | None) -> Tensor | None:
    return materialize(mask, *where, window=window)


def _window_always_dropped_when_long(mask: Mask, *where: slice, window: int | None, chunk: int | None) -> Tensor | None:
    consecutive = Mask(mask.positions, mask.documents, mask.valid, consecutive=True)
    return materialize(consecutive, *where, window=window, chunk=chunk)


def _documents_of_the_slice(
    mask: Mask, q_slice: slice, k_slice: slice, *, window: int | None, chunk: int | None
) -> Tensor | None:
    """Documents numbered anew from each slice's own positions: the slice's first token always starts document 0."""
    whole = Mask(mask.positions, None, mask.valid, mask.consecutive)
    allowed = materialize(whole, q_slice, k_slice, window=window, chunk=chunk)
    q_documents, k_documents = (describe(mask.positions[:, where]).documents for where in (q_slice, k_slice))
    if allowed is None:
        allowed = torch.ones(mask.seq, mask.seq, dtype=torch.bool).tril()[q_slice, k_slice]
    zero = torch.zeros((), dtype=torch.int64)
    return allowed & (
        (zero if q_documents is None else q_documents[:, None, :, None])
        == (zero if k_documents is None else k_documents[:, None, None, :])
    )


def _query_validity(mask: Mask, *where: slice, window: int | None, chunk: int | None) -> Tensor | None:
    """Padding hidden by its queries instead of by its keys."""
    allowed = materialize(Mask(mask.positions, mask.documents, None, mask.consecutive), *where, window=window)
    if allowed is None:
        allowed = torch.ones(1, 1, mask.seq, mask.seq, dtype=torch.bool).tril()[..., where[0], where[1]]
    return allowed if mask.valid is None else allowed & mask.valid[:, None, where[0], None]


MUTANTS = {
    "window includes W keys before the query": _inclusive_window,
    "window dropped": _dropped_window,
    "chunk dropped": _dropped_chunk,
    "a long window dropped where positions jump": _window_always_dropped_when_long,
    "documents from the slice": _documents_of_the_slice,
    "padding hides queries, not keys": _query_validity,
}
CASES: list[tuple[dict[str, object], slice, slice]] = [
    (
        {"positions": [list(range(6))], "documents": None, "valid": None, "window": 3, "chunk": None},
        slice(None),
        slice(None),
    ),
    (
        {"positions": [list(range(6))], "documents": None, "valid": None, "window": None, "chunk": 4},
        slice(None),
        slice(None),
    ),
    (
        {"positions": [[0, 5, 9]], "documents": [[0, 0, 0]], "valid": None, "window": 4, "chunk": None},
        slice(None),
        slice(None),
    ),
    (
        {"positions": [PACK8], "documents": None, "valid": None, "window": None, "chunk": None},
        slice(4, 8),
        slice(0, 4),
    ),
    (
        {"positions": [list(range(6))], "documents": None, "valid": [[False] * 2 + [True] * 4], "window": None}
        | {"chunk": None},
        slice(None),
        slice(None),
    ),
]


def test_the_cases_of_the_mutants_hold() -> None:
    """The fixed cases that the mutants must fail are right as they stand."""
    assert all(check(*case, materialize) for case in CASES)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_fails_the_double_loop(name: str) -> None:
    """The double loop would be no witness if a faulty mask passed all its cases."""
    assert not all(check(*case, MUTANTS[name]) for case in CASES)


# --- pinned counts ----------------------------------------------------------------------------------------------------


def lengths(*documents: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])[None]


@pytest.mark.parametrize(
    ("mask", "fixed", "pairs"),
    [
        (describe(torch.arange(6)), {}, 21),
        (describe(torch.arange(6)), {"window": 3}, 15),
        (describe(torch.arange(6)), {"window": 1}, 6),
        (describe(torch.arange(6)), {"window": 6}, 21),
        (describe(torch.arange(6)), {"window": 600}, 21),
        (describe(torch.arange(8)), {"window": 3}, 21),
        (describe(torch.arange(8)), {}, 36),
        (describe(lengths(3, 5)), {}, 21),
        (describe(lengths(3, 5)), {"window": 3}, 18),
        (describe(lengths(3, 5), valid=torch.ones(1, 8, dtype=torch.bool)), {}, 21),
        (describe(lengths(7, 3)), {}, 34),
        (describe(torch.arange(6), valid=torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)), {}, 10),
        (describe(torch.arange(6), valid=torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)), {}, 18),
        (describe(torch.arange(8)), {"chunk": 4}, 20),
        (describe(torch.arange(8)), {"chunk": 3}, 15),
        (describe(lengths(3, 5)), {"chunk": 4}, 17),
        (describe(torch.arange(6), documents=torch.tensor([0, 0, 1, 1, 0, 0])), {}, 13),
        (describe(torch.arange(6).expand(2, 6)), {"window": 3}, 30),
        (describe(torch.arange(6).expand(2, 6)), {}, 42),
    ],
)
def test_pinned_pair_counts(mask: Mask, fixed: dict[str, int], pairs: int) -> None:
    """Catches windows off by one (C-13: 18 for 15), lost documents (C-08, C-09) and lost padding (C-07)."""
    assert count_pairs(mask, **fixed) == pairs


def test_one_row_may_be_banded_and_another_not() -> None:
    """Catches a mask that is read off the first row of the batch alone (C-07 d)."""
    mask = describe(torch.tensor([list(range(8)), PACK8]))
    allowed = materialize(mask)
    assert allowed is not None
    assert allowed.sum((1, 2, 3)).tolist() == [36, 21]


# --- what says nothing is dropped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "fixed"),
    [
        (describe(torch.arange(6)), {}),
        (describe(torch.arange(3, 9)), {}),
        (describe(torch.arange(6), valid=torch.ones(6, dtype=torch.bool)), {}),
        (describe(torch.arange(6), documents=torch.full((6,), 7)), {}),
        (describe(torch.arange(6).expand(2, 6), documents=torch.tensor([[1] * 6, [2] * 6])), {}),
        (describe(torch.arange(6)), {"window": 6}),
        (describe(torch.arange(6)), {"window": 7}),
        (describe(torch.zeros(1, 1, dtype=torch.int64)), {}),
    ],
)
def test_plain_causal_materialises_to_none(mask: Mask, fixed: dict[str, int]) -> None:
    """Catches a dense mask built where the kernel's own causal one would do: a square of the sequence a layer."""
    assert materialize(mask, **fixed) is None
    assert mask.plain
    assert materialize(mask, slice(2, 5), slice(2, 5), **fixed) is None


@pytest.mark.parametrize(
    ("mask", "fixed"),
    [
        (describe(row(0, 1, 2, 0, 1)), {}),
        (describe(torch.arange(6)), {"window": 5}),
        (describe(torch.arange(6)), {"chunk": 4}),
        (describe(torch.arange(6), valid=torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)), {}),
        (describe(row(0, 5, 9), documents=row(0, 0, 0)), {"window": 4}),
    ],
)
def test_what_says_something_is_kept(mask: Mask, fixed: dict[str, int]) -> None:
    """Catches a shortcut to plain causal that drops documents, padding, a window or a chunk."""
    allowed = materialize(mask, **fixed)
    assert allowed is not None
    assert int(allowed.sum()) < mask.seq * (mask.seq + 1) // 2


def test_different_slices_of_a_plain_mask_are_not_none() -> None:
    """Catches a None that would be read as causal where the slice lies beside the diagonal."""
    mask = describe(torch.arange(6))
    below, above = materialize(mask, slice(3, 6), slice(0, 3)), materialize(mask, slice(0, 3), slice(3, 6))
    assert below is not None and above is not None
    assert bool(below.all()) and not bool(above.any())


@pytest.mark.parametrize(
    ("positions", "documents", "consecutive"),
    [
        ([0, 1, 2, 0, 1], None, True),
        ([4, 9, 2, 2, 1], None, True),
        ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1], True),
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1], True),
        ([0, 1, 2, 0, 1], [0, 0, 0, 0, 0], False),
        ([0, 2, 4, 6, 8], [0, 0, 0, 0, 0], False),
        ([0, 1, 5, 6, 2], [0, 0, 1, 1, 0], False),
        ([0, 1, 900, 901, 2], [3, 3, 1, 1, 3], False),
    ],
)
def test_consecutive_says_whether_a_long_window_is_empty_talk(
    positions: list[int], documents: list[int] | None, consecutive: bool
) -> None:
    """Catches a window of the row's length that is dropped although positions jump inside a document."""
    mask = describe(torch.tensor(positions), documents=None if documents is None else torch.tensor(documents))
    assert mask.consecutive is consecutive


def test_one_row_that_jumps_speaks_for_the_batch() -> None:
    """Catches `consecutive` read off the first row."""
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert not describe(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 9]]), documents=ids).consecutive
    returning = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    assert not describe(torch.arange(4).expand(2, 4), documents=returning).consecutive


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_restart_with_packed_documents() -> None:
    """Catches chunk edges counted along the row: a document's first chunk would be cut short."""
    allowed = materialize(describe(lengths(3, 5)), chunk=4)
    assert allowed is not None
    assert allowed[0, 0].nonzero().tolist() == [
        *([0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2]),
        *([3, 3], [4, 3], [4, 4], [5, 3], [5, 4], [5, 5], [6, 3], [6, 4], [6, 5], [6, 6], [7, 7]),
    ]


def test_left_padding_moves_no_chunk_edge() -> None:
    """Catches chunk edges that shift with the padding: the padded row would see other keys than the row alone."""
    alone = materialize(fcp.prepare({"input_ids": torch.ones(1, 6, dtype=torch.int64)}).mask, chunk=4)
    padded = materialize(
        fcp.prepare(
            {"input_ids": torch.ones(1, 9, dtype=torch.int64), "attention_mask": row(0, 0, 0, 1, 1, 1, 1, 1, 1)}
        ).mask,
        chunk=4,
    )
    assert alone is not None and padded is not None
    assert torch.equal(padded[:, :, 3:, 3:], alone)
    assert not bool(padded[..., :3].any())
    by_row = materialize(describe(torch.arange(9)), slice(3, 9), slice(3, 9), chunk=4)
    assert by_row is not None and not torch.equal(by_row, alone), "edges along the row would differ: the case can fail"


# --- describe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        (PACK8, [0, 0, 0, 1, 1, 1, 1, 1]),
        ([5, 6, 7, 0, 1], [0, 0, 0, 1, 1]),
        ([0, 0, 0, 1], [0, 1, 2, 2]),
        ([3, 2, 1], [0, 1, 2]),
        ([0, 1, 3], [0, 0, 1]),
    ],
)
def test_documents_start_where_a_position_is_not_the_previous_plus_one(
    positions: list[int], documents: list[int]
) -> None:
    """Catches documents that start at zeros only, or where positions fall only."""
    assert describe(torch.tensor(positions)).documents.tolist() == [documents]


def test_one_row_needs_no_batch_dim() -> None:
    """Catches [seq] taken for a batch of single tokens."""
    flat, batched = describe(torch.tensor(PACK8)), describe(torch.tensor([PACK8]))
    assert flat.positions.shape == (1, 8) and flat.seq == 8
    assert torch.equal(flat.positions, batched.positions) and torch.equal(flat.documents, batched.documents)


def test_explicit_documents_win_over_positions() -> None:
    """Catches positions that still cut a document which the caller declared whole, and ids narrower than int64."""
    mask = describe(row(0, 1, 0, 1), documents=row(4, 4, 4, 9).to(torch.int32))
    assert mask.documents.tolist() == [[4, 4, 4, 9]]
    assert mask.documents.dtype == mask.positions.dtype == torch.int64
    assert count_pairs(mask) == 7


@pytest.mark.usefixtures("unchecked")
def test_shapes_that_differ_are_refused() -> None:
    """Catches documents or validity that would broadcast against positions."""
    with pytest.raises(ValueError, match=r"masks.describe.*\(1, 4\).*\(1, 3\).*one shape"):
        describe(torch.arange(4)[None], documents=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one shape"):
        describe(torch.arange(4).expand(2, 4), valid=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be \[batch, seq\]"):
        describe(torch.zeros(1, 2, 3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["window", "chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_window_or_chunk_below_one_is_refused(name: str, value: int) -> None:
    """Catches a window that hides the query itself, and a division by zero."""
    with pytest.raises(ValueError, match=f"materialize: {name}={value} must be 1 or more"):
        materialize(describe(torch.arange(4)), **{name: value})

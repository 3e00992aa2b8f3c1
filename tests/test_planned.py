"""The plan of a mask and the kernel that runs it: exact for every description, and no work where nothing is seen."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fcp
from fcp import _plan, _planned
from fcp._plan import Group, plan_of
from fcp.kernels import Spec, registered
from fcp.masks import Mask, describe, materialize
from tests.tolerances import FLOAT64


def seen_by(groups: tuple[Group, ...], mask: Mask, **words: Any) -> Tensor:
    """[batch, seq, seq]: how often the groups compute each pair."""
    batch, seq = mask.positions.shape
    count = torch.zeros(batch, seq, seq, dtype=torch.int64)
    for group in groups:
        inner = group.allowed(torch.device("cpu"))
        for row, first, key in group.places:
            here = slice(first, first + group.queries), slice(key, key + group.keys)
            if group.blocks:
                part = materialize(mask, *here, **words)
                count[:, *here] += torch.ones_like(count[:, *here]).tril() if part is None else part[:, 0].long()
                continue
            plain = torch.ones(group.queries, group.keys, dtype=torch.bool)
            count[row, *here] += (plain.tril() if group.causal else plain if inner is None else inner).long()
    return count


def expected(mask: Mask, **words: Any) -> Tensor:
    found = materialize(mask, **words)
    batch, seq = mask.positions.shape
    return torch.ones(batch, seq, seq).tril().bool() if found is None else found[:, 0]


@st.composite
def descriptions(draw: Any, most: int = 24) -> tuple[Mask, dict[str, int]]:
    """Rows of documents that may come back, positions that may jump, holes in validity, a window, a chunk."""
    seq, batch = draw(st.integers(1, most)), draw(st.integers(1, 3))

    def rows(values: Any) -> Tensor:
        return torch.tensor([draw(st.lists(values, min_size=seq, max_size=seq)) for _ in range(batch)])

    positions = torch.arange(seq).expand(batch, -1)
    if draw(st.booleans()):
        positions = positions + rows(st.sampled_from([0, 0, 0, 0, 1, 3])).cumsum(1)
    if draw(st.booleans()):
        starts = rows(st.sampled_from([0, 0, 0, 1])).bool()
        firsts = torch.where(starts, torch.arange(seq), 0).cummax(1).values
        positions = torch.arange(seq) - firsts
    documents = rows(st.integers(0, 2)).sort(1).values if draw(st.booleans()) else None
    if draw(st.booleans()):
        documents = rows(st.integers(0, 1))
    valid = rows(st.sampled_from([0, 1, 1, 1])).bool() if draw(st.booleans()) else None
    words = {name: draw(st.integers(1, seq + 2)) for name in ("window", "chunk") if draw(st.booleans())}
    return describe(positions, documents=documents, valid=valid), words


@pytest.mark.parametrize("block", [2, 5, 256])
@settings(max_examples=250, deadline=None)
@given(description=descriptions())
def test_every_pair_is_computed_once(block: int, description: tuple[Mask, dict[str, int]]) -> None:
    """A key that is left out, one that is seen twice, one that nobody may see."""
    mask, words = description
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "BLOCK", block)
        groups = plan_of(mask, words.get("window"), words.get("chunk"))
    assert torch.equal(seen_by(groups, mask, **words), expected(mask, **words).long())


def both(mask: Mask, spec: Spec, dtype: torch.dtype = torch.float64) -> list[float]:
    """The errors of output, log-sum-exp and gradients against the reference."""
    generator = torch.Generator().manual_seed(0)
    batch, seq = mask.positions.shape

    def random(heads: int) -> Tensor:
        return torch.randn(batch, heads, seq, 4, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, g = random(4), random(2), random(2), random(4)
    found = []
    for name in ("reference", "planned"):
        out, lse = registered[name].forward(q, k, v, mask, spec)
        found.append([out, lse.nan_to_num(neginf=-1e9), *registered[name].backward(g, q, k, v, out, lse, mask, spec)])
    largest = max(float(x.abs().max()) for x in found[0][2:])
    scales = [None, None, *(max(float(x.abs().max()), 1e-3 * largest) for x in found[0][2:])]
    return [fcp.relative_error(a, b, scale) for a, b, scale in zip(*found, scales, strict=True) if scale != 0]


@pytest.mark.parametrize(("softcap", "block"), [(None, 256), (0.7, 256), (0.7, 3)])
@settings(max_examples=120, deadline=None)
@given(description=descriptions())
def test_it_is_the_reference(softcap: float | None, block: int, description: tuple[Mask, dict[str, int]]) -> None:
    """Forward and backward, merged parts and rows that see nothing included; the formula block by block."""
    mask, words = description
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_planned, "CAPPED", block)
        assert max(both(mask, Spec(0.4, softcap=softcap, **words))) < FLOAT64


def test_long_bands_and_uneven_documents() -> None:
    """Blocks of the size that is used, the last one shorter, in documents longer and shorter than the window."""
    lengths = [700, 3, 1, 300, 40, 256]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    valid = torch.ones_like(positions, dtype=torch.bool)
    valid[1, :130] = False
    for words in ({}, {"window": 100}, {"window": 300}, {"window": 600}, {"chunk": 128}, {"window": 70, "chunk": 200}):
        assert max(both(describe(positions, valid=valid), Spec(0.4, **words))) < FLOAT64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_come_back_as_they_were(dtype: torch.dtype) -> None:
    mask = describe(torch.arange(12).expand(2, -1), valid=torch.arange(12).expand(2, -1) % 5 != 2)
    assert max(both(mask, Spec(0.4, window=5), dtype)) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("documents", [12, 5])
def test_gradients_have_their_operands_dtype(softcap: float | None, documents: int) -> None:
    """Sums that are wide inside and are handed out so, where the mask is plain and where it is in tiles."""
    mask, spec = describe((torch.arange(12) % documents)[None]), Spec(0.4, softcap=softcap)
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.bfloat16) for _ in range(3))
    out, lse = registered["planned"].forward(q, k, v, mask, spec)
    found = registered["planned"].backward(out, q, k, v, out, lse, mask, spec)
    assert [x.dtype for x in (out, *found)] == [torch.bfloat16] * 4


# --- what it costs ----------------------------------------------------------------------------------------------------


def area(mask: Mask, window: int | None = None, chunk: int | None = None) -> float:
    """The pairs that are computed, as a share of plain causal; a triangle is computed by half."""
    groups = plan_of(mask, window, chunk)
    pairs = sum(len(g.places) * g.queries * g.keys * (0.5 if g.causal else 1.0) for g in groups)
    return pairs / (mask.positions.numel() * mask.seq / 2)


def test_the_work_follows_the_mask() -> None:
    seq = 8192
    plain = torch.arange(seq)[None]
    assert area(describe(plain)) == 1
    assert area(describe(plain % 512)) == pytest.approx(1 / 16)
    assert area(describe(plain), chunk=512) == pytest.approx(1 / 16)
    assert area(describe(plain), window=512) < 0.2
    rows = describe(plain.expand(2, -1), valid=torch.stack([plain[0] >= 4096, plain[0] >= 0]))
    assert area(rows) == pytest.approx((1 + 1 / 4) / 2)


def test_holes_that_make_very_many_rectangles_are_blocks() -> None:
    """Few runs may see each other in very many rectangles: those count, not the runs."""
    row = torch.arange(2048)[None]
    groups = plan_of(describe(row, valid=row % 60 != 59), None, None)
    assert len(groups) == 2048 // _plan.BLOCK and all(each.blocks for each in groups)


def test_equal_documents_are_one_call() -> None:
    (group,) = plan_of(describe((torch.arange(4096) % 256)[None]), None, None)
    assert len(group.places) == 16 and group.causal and group.steps == (256, 256)
    groups = plan_of(describe((torch.arange(4096) % 256).expand(3, -1)), None, None)
    assert [len(each.places) for each in groups] == [16, 16, 16]  # a row's lie at equal steps: no copy


def test_layers_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning reads the mask's numbers, which once a layer would cost more than small attention; another window and a
    mask that was written into are planned again."""
    found: list[int] = []
    real = _plan._find
    monkeypatch.setattr(_plan, "_find", lambda *args: found.append(1) or real(*args))
    mask = describe(torch.arange(12).expand(2, -1) % 7)
    q = torch.randn(2, 4, 12, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        fcp.attention(q, q, q, mask, kernel="planned").sum().backward()
    assert len(found) == 1
    fcp.attention(q, q, q, mask, window=3)
    assert len(found) == 2
    other = Mask(mask.positions.clone(), mask.documents, mask.valid, mask.consecutive)
    other.positions[:, 6:] += 1
    fcp.attention(q, q, q, other, window=3)
    other.positions[:, 9:] += 1
    fcp.attention(q, q, q, other, window=3)
    assert len(found) == 4


class _Largest(TorchDispatchMode):
    """The most entries of any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and not func.is_view:
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("kind", ["documents", "window", "holes", "plain", "left", "right"])
def test_no_square_of_the_sequence_is_made(kind: str, softcap: float | None) -> None:
    """Memory grows with the sequence: twice the tokens, twice the largest tensor; with a soft cap and sinks too."""
    sinks = None if softcap is None else torch.zeros(1)

    def largest(seq: int) -> int:
        positions = torch.arange(seq)[None]
        at = torch.arange(seq)[None]
        valid = {"holes": at % 3 != 1, "left": at >= seq // 4, "right": at < seq // 2}.get(kind)
        mask = describe(positions % 200 if kind == "documents" else positions, valid=valid)
        q = torch.randn(1, 1, seq, 8, requires_grad=True)
        with _Largest() as seen:
            window = 64 if kind == "window" else None
            fcp.attention(q, q, q, mask, window=window, softcap=softcap, sinks=sinks).sum().backward()
        return seen.numel

    assert largest(4096) <= 2.5 * largest(2048)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_band_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    """The mutant of the window (C-13)."""
    real = _plan._rectangles
    monkeypatch.setattr(_plan, "_rectangles", lambda q, k, window: real(q, k, window and window + off))
    mask = describe(torch.arange(20).expand(2, -1))
    groups = plan_of(mask, 5, None)
    assert not torch.equal(seen_by(groups, mask), expected(mask, window=5).long())

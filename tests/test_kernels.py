"""Attention on one device against a softmax written out in float64: values, gradients, second derivatives, vmap."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

import fcp
from fcp import _attention, kernels
from fcp.masks import Mask, describe
from tests.tolerances import FLOAT64
from tests.toys import PACK8

INF = float("inf")


# --- the reference: every clause in plain operations ------------------------------------------------------------------


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of [batch, heads, seq, dim] by its formula; nothing of fcp but the mask's description is read."""
    seq, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    order = torch.arange(seq)
    p = mask.positions
    allowed = (order[None, :] <= order[:, None]).expand(p.shape[0], seq, seq)
    if mask.documents is not None:
        allowed = allowed & (mask.documents[:, :, None] == mask.documents[:, None, :])
    if mask.valid is not None:
        allowed = allowed & mask.valid[:, None, :]
    if window is not None:
        allowed = allowed & (p[:, :, None] - p[:, None, :] < window)
    if chunk is not None:
        allowed = allowed & (p[:, :, None] // chunk == p[:, None, :] // chunk)
    allowed = allowed[:, None]
    peak = logits.masked_fill(~allowed, -INF).amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks[None, :, None, None])
    peak = torch.where(peak == -INF, 0.0, peak).detach()
    weight = torch.where(allowed, torch.exp(torch.where(allowed, logits, 0.0) - peak), 0.0)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[None, :, None, None] - peak)
    return (weight / torch.where(total == 0, 1.0, total)) @ v


# --- what is put in ---------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(batch: int = 2, heads: int = 4, kv_heads: int = 2, seq: int = 8, dim: int = 4, v_dim: int = 4) -> list[Tensor]:
    return [
        random(batch, heads, seq, dim, seed=1),
        random(batch, kv_heads, seq, dim, seed=2),
        random(batch, kv_heads, seq, v_dim, seed=3),
    ]


def valid(*rows: list[int]) -> Tensor:
    return torch.tensor(rows).bool()


PLAIN = describe(torch.arange(8).expand(2, 8))
MASKS = {
    "plain": PLAIN,
    "documents": describe(torch.tensor([PACK8, list(range(8))])),
    "left padding": describe(torch.arange(8).expand(2, 8), valid=valid([0, 0, 0, 1, 1, 1, 1, 1], [1] * 8)),
    "right padding": describe(torch.arange(8).expand(2, 8), valid=valid([1, 1, 1, 1, 1, 0, 0, 0], [1] * 8)),
    "holes": describe(torch.arange(8).expand(2, 8), valid=valid([0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 0])),
    "a row of padding": describe(torch.arange(8).expand(2, 8), valid=valid([0] * 8, [1] * 8)),
    "returning documents": describe(
        torch.tensor([PACK8, list(range(8))]), documents=torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1], [2] * 8])
    ),
    "packed and padded": describe(
        torch.tensor([PACK8, PACK8]), valid=valid([0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0])
    ),
}
FIXED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "window 3": {"window": 3},
    "window 1": {"window": 1},
    "window 8": {"window": 8},
    "chunk 3": {"chunk": 3},
    "scale": {"scale": 0.31},
    "softcap": {"softcap": 0.7},
    "all": {"window": 4, "chunk": 5, "scale": 1.3, "softcap": 2.0},
}


def results(
    fn: Callable[..., Tensor], operands: list[Tensor], weights: Tensor, with_sinks: bool, **fixed: Any
) -> dict[str, Tensor]:
    """The output and each operand's gradient of sum(weights * output); the last operand may be the sinks."""

    def call(*given: Tensor) -> Tensor:
        sinks = given[3] if with_sinks else None
        return fn(*given[:3], sinks=sinks, **fixed)

    out, pull = vjp(call, *operands)
    names = ("q", "k", "v", "sinks")[: len(operands)]
    return {"out": out, **dict(zip(names, pull(weights), strict=True))}


def worst(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The largest relative error; what is zero in exact arithmetic is measured against the largest of all."""
    assert wanted.keys() == got.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    scales = {name: max(float(x.abs().max()), 1e-3 * largest) for name, x in wanted.items()}
    return max(fcp.relative_error(wanted[name], got[name], scales[name]) for name in wanted)


def names_that_serve(fixed: dict[str, Any]) -> list[str]:
    return ["auto", "reference"] + ([] if "softcap" in fixed else ["fused"])


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_every_kernel_is_the_plain_softmax(mask: str, fixed: str, with_sinks: bool) -> None:
    """Catches any clause that forward or backward drops or bends, kernels that disagree, and lost sink gradients."""
    operands = qkv() + ([random(4, seed=4)] if with_sinks else [])
    weights = random(2, 4, 8, 4, seed=5)
    wanted = results(plain, operands, weights, with_sinks, mask=MASKS[mask], **FIXED[fixed])
    for name in names_that_serve(FIXED[fixed]):
        got = results(fcp.attention, operands, weights, with_sinks, mask=MASKS[mask], kernel=name, **FIXED[fixed])
        assert worst(wanted, got) < FLOAT64, name


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"),
    [(4, 4, 4, 4), (6, 2, 4, 4), (4, 1, 4, 4), (1, 1, 1, 1), (4, 2, 6, 3), (4, 2, 3, 6), (4, 2, 5, 1)],
)
def test_head_counts_and_sizes(kernel: str, heads: int, kv_heads: int, dim: int, v_dim: int) -> None:
    """Catches query heads paired with another key-value head, and a value size that is taken for the key's."""
    operands = [*qkv(heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim), random(heads, seed=4)]
    weights = random(2, heads, 8, v_dim, seed=5)
    fixed = {"mask": MASKS["packed and padded"], "window": 3}
    wanted = results(plain, operands, weights, True, **fixed)
    got = results(fcp.attention, operands, weights, True, kernel=kernel, **fixed)
    assert got["out"].shape == (2, heads, 8, v_dim)
    assert worst(wanted, got) < FLOAT64


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_a_sequence_of_one(kernel: str) -> None:
    """Catches shortcuts that need a second token; a lone key takes all the weight but the sink's."""
    operands = [*qkv(seq=1), random(4, seed=4)]
    mask = describe(torch.zeros(2, 1, dtype=torch.int64))
    weights = random(2, 4, 1, 4, seed=5)
    wanted = results(plain, operands, weights, True, mask=mask)
    assert worst(wanted, results(fcp.attention, operands, weights, True, mask=mask, kernel=kernel)) < FLOAT64
    without = fcp.attention(*operands[:3], mask, kernel=kernel)
    assert fcp.relative_error(operands[2].repeat_interleave(2, 1), without) < FLOAT64


@pytest.mark.parametrize("fixed", [{}, {"window": 3}, {"window": 700}, {"chunk": 64}])
def test_a_sequence_longer_than_a_kernels_block(fixed: dict[str, int]) -> None:
    """Catches blocks of keys in which a row sees nothing: the running maximum is -inf there, and NaN follows."""
    seq = 1100
    operands = qkv(batch=1, heads=2, kv_heads=1, seq=seq)
    positions = torch.cat([torch.arange(900), torch.arange(200)])[None]
    mask = describe(positions, valid=torch.arange(seq)[None] >= 20)
    weights = random(1, 2, seq, 4, seed=5)
    wanted = results(plain, operands, weights, False, mask=mask, **fixed)
    assert worst(wanted, results(fcp.attention, operands, weights, False, mask=mask, **fixed)) < FLOAT64


def test_no_mask_is_plain_causal() -> None:
    """Catches None read as no mask at all."""
    operands = qkv()
    assert torch.equal(fcp.attention(*operands, None), fcp.attention(*operands, PLAIN))
    assert fcp.relative_error(plain(*operands, PLAIN), fcp.attention(*operands, None)) < FLOAT64


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_a_query_without_a_key_is_zero_and_stays_finite(kernel: str, with_sinks: bool) -> None:
    """Catches a softmax over nothing (C-12): NaN rows, or rows that average every value, and what they pull back."""
    operands = qkv() + ([random(4, seed=4)] if with_sinks else [])
    mask = MASKS["left padding"]
    only_padding = torch.zeros(2, 4, 8, 4, dtype=torch.float64)
    only_padding[0, :, :3] = 1e6  # what comes back into the rows that see nothing must reach nobody
    got = results(fcp.attention, operands, only_padding, with_sinks, mask=mask, kernel=kernel)
    assert torch.equal(got["out"][0, :, :3], torch.zeros(4, 3, 4, dtype=torch.float64))
    assert bool(got.pop("out").isfinite().all())
    assert all(torch.equal(x, torch.zeros_like(x)) for x in got.values())


def test_layouts_do_not_matter() -> None:
    """Catches strides that a kernel assumes: transposed and sliced operands, and gradients that are expanded."""
    dense = [*qkv(), random(4, seed=4)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense[:2]]
    strided.append(torch.stack([dense[2], dense[2] + 1], -1)[..., 0])  # last dim not dense
    strided.append(torch.stack([dense[3], dense[3]], -1)[:, 0])
    assert not any(x.is_contiguous() for x in strided)
    expanded = torch.full((), 0.7, dtype=torch.float64).expand(2, 4, 8, 4)
    by_head = random(1, 4, 1, 4, seed=6).expand(2, 4, 8, 4)
    for weights, mask in itertools.product((expanded, by_head), (PLAIN, MASKS["holes"])):
        wanted = results(plain, dense, weights.contiguous(), True, mask=mask)
        for kernel in ("fused", "reference"):
            got = results(fcp.attention, strided, weights, True, mask=mask, kernel=kernel)
            assert worst(wanted, got) < FLOAT64


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        # 8 terms a sum and logits of a few units: some ten roundings of 2**-24 relative to the largest entry.
        (torch.float32, 20 * 2**-24),
        # Inputs are exact; what is rounded to 8 bits is the weights, the output and the gradients, a few times each.
        (torch.bfloat16, 5 * 2**-8),
    ],
)
def test_narrow_dtypes_err_by_their_rounding_alone(kernel: str, dtype: torch.dtype, bound: float) -> None:
    """Catches logits or normalisers kept in bfloat16, and results of another dtype than what went in."""
    narrow = [x.to(dtype) for x in (*qkv(), random(4, seed=4))]
    weights = random(2, 4, 8, 4, seed=5).to(dtype)
    for mask in ("plain", "packed and padded"):
        wanted = results(plain, [x.double() for x in narrow], weights.double(), True, mask=MASKS[mask])
        got = results(fcp.attention, narrow, weights, True, mask=MASKS[mask], kernel=kernel)
        assert all(x.dtype == dtype for x in got.values())
        assert worst(wanted, got) < bound


def test_bfloat16_logits_are_not_rounded() -> None:
    """Catches logits in bfloat16: at 300, its steps are 2 wide, and e**2 is no rounding error."""
    q = torch.tensor([300.0, 1.0], dtype=torch.bfloat16).expand(1, 1, 2, 2)
    k = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)[None, None]  # logits 300 and 301
    v = torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16)[None, None]
    for kernel in ("fused", "reference"):
        out = fcp.attention(q, k, v, None, scale=1.0, kernel=kernel)
        assert abs(float(out[0, 0, 1, 0]) - 0.7310586) < 2**-8
    rounded = torch.softmax((q[0, 0, 1] @ k[0, 0].mT).float(), -1)
    assert abs(float(rounded[1]) - 0.7310586) > 0.1, "rounded logits would show"


def test_sinks_keep_their_own_precision() -> None:
    """Catches float32 sinks rounded to the queries' bfloat16: near 100 its steps are 0.5 wide."""
    q, k = (torch.full((1, 1, 1, 1), 10.0, dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    sinks = torch.tensor([100.25])
    for kernel in ("fused", "reference"):
        out = fcp.attention(q, k, v, None, scale=1.0, sinks=sinks, kernel=kernel)
        assert abs(float(out) - 1 / (1 + 2.718281828**0.25)) < 2**-8


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("mask", ["plain", "a row of padding", "packed and padded"])
def test_a_kernel_gives_each_rows_log_sum_exp(kernel: str, mask: str) -> None:
    """Catches a log-sum-exp of another base, or 0 for a row without a key: who merges or adds a sink relies on it."""
    q, k, v = qkv()
    out, lse = kernels.registered[kernel].forward(q, k, v, MASKS[mask], fcp.Spec(0.4, window=4))
    allowed = MASKS[mask].valid
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.4
    order, documents = torch.arange(8), MASKS[mask].documents
    seen = (order[None, :] <= order[:, None]) & (order[:, None] - order[None, :] < 4)
    seen = seen.expand(2, 1, 8, 8)
    if allowed is not None:
        seen = seen & allowed[:, None, None, :]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    wanted = torch.log((torch.exp(logits) * seen).sum(-1))
    empty = wanted == -INF
    assert bool(empty.any()) == (mask != "plain")
    assert torch.equal(lse == -INF, empty) and fcp.relative_error(wanted[~empty], lse[~empty]) < FLOAT64
    assert not bool(out[empty].any())


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("mask", ["plain", "a row of padding"])
def test_a_sink_of_minus_infinity_is_no_sink(kernel: str, mask: str) -> None:
    """Catches a sink that adds weight at any logit, and 0 / 0 where a row has neither key nor sink (C-19)."""
    operands, weights = qkv(), random(2, 4, 8, 4, seed=5)
    without = results(fcp.attention, operands, weights, False, mask=MASKS[mask], kernel=kernel)
    sinks = torch.full((4,), -INF, dtype=torch.float64)
    got = results(fcp.attention, [*operands, sinks], weights, True, mask=MASKS[mask], kernel=kernel)
    assert torch.equal(got.pop("sinks"), torch.zeros(4, dtype=torch.float64))
    assert worst(without, got) < FLOAT64


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_large_sinks_scale_the_output_to_zero(kernel: str) -> None:
    """Catches a sink that is averaged in as a value, and an exponential that overflows (C-19)."""
    operands, weights = qkv(), random(2, 4, 8, 4, seed=5)
    for size, largest in ((30.0, 1e-9), (1e4, 0.0)):
        sinks = torch.full((4,), size, dtype=torch.float64)
        got = results(fcp.attention, [*operands, sinks], weights, True, mask=PLAIN, kernel=kernel)
        assert all(float(x.abs().max()) <= largest for x in got.values())


def test_each_head_has_its_own_sink() -> None:
    """Catches one sink for all heads, or sinks in the order of the key-value heads."""
    operands = qkv()
    sinks = torch.tensor([-INF, 1e4, -INF, -INF], dtype=torch.float64)
    out, without = fcp.attention(*operands, PLAIN, sinks=sinks), fcp.attention(*operands, PLAIN)
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert fcp.relative_error(without[:, [0, 2, 3]], out[:, [0, 2, 3]]) < FLOAT64


# --- mutants: a faulty kernel or call must be told apart --------------------------------------------------------------


def _faulty(**changes: Any) -> Callable[..., Tensor]:
    return lambda *args, **fixed: fcp.attention(*args, **{**fixed, **changes})


def _sinks_without_gradient(*args: Any, sinks: Tensor, **fixed: Any) -> Tensor:
    return fcp.attention(*args, sinks=sinks.detach(), **fixed)


def _tiled_heads(q: Tensor, k: Tensor, v: Tensor, *args: Any, **fixed: Any) -> Tensor:
    return fcp.attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), *args, **fixed)


def _off_by_one(*args: Any, window: int, **fixed: Any) -> Tensor:
    return fcp.attention(*args, window=window + 1, **fixed)


def _without_documents(*args: Any, mask: Mask, **fixed: Any) -> Tensor:
    return fcp.attention(*args, mask=replace(mask, documents=None), **fixed)


def _without_padding(*args: Any, mask: Mask, **fixed: Any) -> Tensor:
    return fcp.attention(*args, mask=replace(mask, valid=None), **fixed)


MUTANTS = {
    "window includes W keys before the query": _off_by_one,
    "window dropped": _faulty(window=None),
    "scale dropped": _faulty(scale=None),
    "sinks dropped": _faulty(sinks=torch.full((4,), -INF, dtype=torch.float64)),
    "sink gradient dropped": _sinks_without_gradient,
    "kv heads tiled, not interleaved": _tiled_heads,
    "documents dropped": _without_documents,
    "padding dropped": _without_padding,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_differs_from_the_plain_softmax(name: str) -> None:
    """The comparison would be no witness if a faulty attention passed it (C-13, C-14, C-16, C-19)."""
    operands, weights = [*qkv(), random(4, seed=4)], random(2, 4, 8, 4, seed=5)
    fixed = {"mask": MASKS["packed and padded"], "window": 3, "scale": 0.31}
    wanted = results(plain, operands, weights, True, **fixed)
    assert worst(wanted, results(fcp.attention, operands, weights, True, **fixed)) < FLOAT64
    assert worst(wanted, results(MUTANTS[name], operands, weights, True, **fixed)) > 1e-6


def test_a_dropped_soft_cap_shows() -> None:
    """As above, for the argument that the fused kernel cannot take (C-14)."""
    operands = qkv()
    wanted = plain(*operands, PLAIN, softcap=0.7)
    assert fcp.relative_error(wanted, fcp.attention(*operands, PLAIN, softcap=0.7)) < FLOAT64
    assert fcp.relative_error(wanted, fcp.attention(*operands, PLAIN)) > 1e-6


# --- vmap -------------------------------------------------------------------------------------------------------------


Seen = list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def seen(registry: dict[str, fcp.Kernel]) -> Seen:
    """Registers kernel "counting"; each call appends (which, q's shape, k's shape, the mask's shape)."""
    calls: Seen = []
    inner = registry["fused"]

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, spec: fcp.Spec) -> tuple[Tensor, Tensor]:
        calls.append(("forward", tuple(q.shape), tuple(k.shape), tuple(mask.positions.shape)))
        return inner.forward(q, k, v, mask, spec)

    def backward(g: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(("backward", tuple(q.shape), tuple(k.shape), tuple(rest[-2].positions.shape)))
        return inner.backward(g, q, k, *rest)

    fcp.register_kernel("counting", fcp.Kernel(forward, backward))
    return calls


RANKS = 3
SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 5, "dim": 4, "v_dim": 3}
SMALL_WEIGHTS = random(2, 4, 5, 3, seed=11)


def per_rank(name: str) -> Tensor:
    """[ranks, ...] of one operand, different on every rank."""
    b, h, n, s = SMALL["batch"], SMALL["heads"], SMALL["kv_heads"], SMALL["seq"]
    if name == "positions":
        starts = [[0, 1, 2, 0, 1], [3, 4, 5, 6, 7], [0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [9, 8, 7, 8, 9], [0, 0, 1, 2, 3]]
        return torch.tensor(starts).reshape(RANKS, b, s)
    if name == "documents":
        return torch.tensor([[[0, 0, r, r, r], [r % 2, 1, 1, 2, 2]] for r in range(RANKS)])
    if name == "valid":
        return torch.tensor([[[0, 0, 1, r > 0, 1], [1, 1, 1, 1, r == 2]] for r in range(RANKS)]).bool()
    shape = {"q": (b, h, s, 4), "k": (b, n, s, 4), "v": (b, n, s, 3), "sinks": (h,)}[name]
    return random(RANKS, *shape, seed=len(name) + ord(name[0]))


NAMES = ("q", "k", "v", "sinks", "positions", "documents", "valid")
FLOATS = NAMES[:4]


def call(operands: dict[str, Tensor | None], **fixed: Any) -> Tensor:
    """Attention, or the plain formula (`fn`), of a dict of all seven operands."""
    fn = fixed.pop("fn", fcp.attention)
    mask = Mask(operands["positions"], operands["documents"], operands["valid"], consecutive=False)
    return fn(operands["q"], operands["k"], operands["v"], mask, sinks=operands["sinks"], window=4, **fixed)


def scalar(operands: dict[str, Tensor | None], **fixed: Any) -> Tensor:
    return (call(operands, **fixed) * SMALL_WEIGHTS).sum()


def gradients(operands: dict[str, Tensor | None], **fixed: Any) -> dict[str, Tensor]:
    """grad inside: each rank differentiates its own function."""
    floats = {name: x for name, x in operands.items() if name in FLOATS and x is not None}
    return grad(lambda some: scalar({**operands, **some}, **fixed))(floats)


def rank(operands: dict[str, Any], dims: dict[str, int | None], index: int) -> dict[str, Any]:
    return {name: x if dims[name] is None else x.select(dims[name], index) for name, x in operands.items()}


def batched(names: set[str], absent: set[str] = frozenset(), last: bool = False) -> tuple[dict[str, Any], dict]:
    """All operands, those in `names` with a rank dim (in front, or last); and which dim that is."""
    operands: dict[str, Any] = {}
    dims: dict[str, int | None] = {}
    for name in NAMES:
        x = None if name in absent else per_rank(name)
        varies = name in names and x is not None
        if x is not None:
            x = x if varies else x[1]
        if varies and last:
            x = x.movedim(0, -1)
        operands[name], dims[name] = x, (x.dim() - 1 if last else 0) if varies else None
    return operands, dims


# q alone, k and v, all three; sinks batched, not, or absent; and each tensor of the mask, batched, not or absent.
COMBINATIONS = [
    (set(some) | sinks | mask, absent)
    for some in ({"q"}, {"k", "v"}, {"v"}, {"q", "k", "v"}, set())
    for sinks, absent_sinks in ((set(), set()), ({"sinks"}, set()), (set(), {"sinks"}))
    for mask, absent_mask in (
        (set(), set()),
        ({"positions"}, set()),
        ({"documents"}, {"valid"}),
        ({"valid"}, {"documents"}),
        (set(), {"documents", "valid"}),
        ({"positions", "documents", "valid"}, set()),
    )
    for absent in (absent_sinks | absent_mask,)
    if some or sinks or mask
]


@pytest.mark.parametrize("last", [False, True], ids=["dim 0", "last dim"])
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_vmap_is_a_loop_whatever_is_batched(last: bool, kernel: str) -> None:
    """Catches operands folded in another order than the others, masks shared that differ, and sinks left behind."""
    for names, absent in COMBINATIONS:
        operands, dims = batched(names, absent, last)
        wanted = [call(rank(operands, dims, r), fn=plain) for r in range(RANKS)]
        got = vmap(lambda x: call(x, kernel=kernel), in_dims=(dims,))(operands)
        assert fcp.relative_error(torch.stack(wanted), got) < FLOAT64, (names, absent)


@pytest.mark.parametrize("last", [False, True], ids=["dim 0", "last dim"])
def test_grad_inside_vmap_is_a_loop(last: bool) -> None:
    """Catches gradients that are summed over ranks where each rank asked for its own, or unfolded in another order."""
    for names, absent in COMBINATIONS:
        operands, dims = batched(names, absent, last)
        wanted = [gradients(rank(operands, dims, r), fn=plain) for r in range(RANKS)]
        got = vmap(gradients, in_dims=(dims,))(operands)
        for name in got:
            assert fcp.relative_error(torch.stack([x[name] for x in wanted]), got[name]) < FLOAT64, (names, name)


def test_grad_outside_vmap_is_a_loop() -> None:
    """Catches the gradient of an operand that all ranks share coming out as one rank's, not as the sum."""
    share = torch.arange(1.0, RANKS + 1, dtype=torch.float64)
    for names, absent in COMBINATIONS:
        operands, dims = batched(names, absent)
        floats = {name: x for name, x in operands.items() if name in FLOATS and x is not None}

        def by_vmap(some: dict[str, Tensor], operands: Any = operands, dims: Any = dims) -> Tensor:
            return (share * vmap(scalar, in_dims=(dims,))({**operands, **some})).sum()

        def by_loop(some: dict[str, Tensor], operands: Any = operands, dims: Any = dims) -> Tensor:
            whole = {**operands, **some}
            return sum(share[r] * scalar(rank(whole, dims, r), fn=plain) for r in range(RANKS))

        got, wanted = grad(by_vmap)(floats), grad(by_loop)(floats)
        assert max(fcp.relative_error(wanted[name], got[name]) for name in floats) < FLOAT64, (names, absent)


NESTED = [
    ({"q", "k", "v"}, {"sinks"}),
    ({"q"}, {"positions", "documents"}),
    ({"valid"}, {"q", "sinks"}),
    ({"q", "sinks"}, {"q", "k", "v", "sinks"}),
    ({"k", "v", "positions", "documents", "valid"}, {"q", "valid"}),
    ({"sinks"}, {"sinks", "positions"}),
]


@pytest.mark.parametrize(("outer", "inner"), NESTED)
@pytest.mark.parametrize("where", ["values", "grad inside", "grad between"])
def test_two_vmaps_are_two_loops(outer: set[str], inner: set[str], where: str) -> None:
    """Catches two rank dims folded in one order and unfolded in the other (cp x tp)."""
    # An operand in both sets has dims [inner, outer, ...] and the ranks of both counts differ: 2 and 3.
    operands, dims = batched(inner)
    outer_dims: dict[str, int | None] = {}
    for name in NAMES:
        outer_dims[name] = None
        if name in outer:
            x, lead = operands[name], dims[name] is not None
            other = x.flip(-1) if x.dtype != torch.bool else ~x
            operands[name] = torch.stack([x, other], 1 if lead else 0)
            outer_dims[name] = 1 if lead else 0

    def in_loops(fn: Callable[..., Any]) -> list[list[Any]]:
        return [[fn(rank(rank(operands, outer_dims, o), dims, r)) for r in range(RANKS)] for o in range(2)]

    if where == "values":
        got = vmap(vmap(call, in_dims=(dims,)), in_dims=(outer_dims,))(operands)
        wanted = torch.stack([torch.stack(row) for row in in_loops(lambda x: call(x, fn=plain))])
        assert fcp.relative_error(wanted, got) < FLOAT64
        return
    per = in_loops(lambda x: gradients(x, fn=plain))
    if where == "grad inside":
        found = vmap(vmap(gradients, in_dims=(dims,)), in_dims=(outer_dims,))(operands)
        for name in found:
            wanted = torch.stack([torch.stack([x[name] for x in row]) for row in per])
            assert fcp.relative_error(wanted, found[name]) < FLOAT64, name
        return

    def between(operands: dict[str, Tensor]) -> dict[str, Tensor]:
        floats = {name: operands[name] for name in FLOATS}
        return grad(lambda some: vmap(scalar, in_dims=(dims,))({**operands, **some}).sum())(floats)

    found = vmap(between, in_dims=(outer_dims,))(operands)
    for name in found:
        rows = [torch.stack([x[name] for x in row]) for row in per]
        wanted = torch.stack([x.sum(0) if dims[name] is None else x for x in rows])
        assert fcp.relative_error(wanted, found[name]) < FLOAT64, name


def test_vmap_over_cotangents_is_a_jacobian() -> None:
    """Catches a batched gradient on unbatched operands: the vmap that jacrev makes."""
    operands = qkv(batch=1, seq=3)
    mask = describe(torch.arange(3)[None])
    got = torch.func.jacrev(lambda *x: fcp.attention(*x, mask), argnums=(0, 1, 2))(*operands)
    wanted = torch.func.jacrev(lambda *x: plain(*x, mask), argnums=(0, 1, 2))(*operands)
    assert max(map(fcp.relative_error, wanted, got)) < FLOAT64


def _mask_of_rank_0(size: int, in_dims: list[Any], operands: list[Any]) -> None:
    for i in range(-2 - _attention.MASKS, -2):
        if in_dims[i] is not None:
            operands[i], in_dims[i] = operands[i].select(in_dims[i], 0), None


def _k_of_rank_0(size: int, in_dims: list[Any], operands: list[Any]) -> None:
    at = -5 - _attention.MASKS  # k, both in the operands of the forward and in those of the gradient
    operands[at], in_dims[at] = operands[at].select(in_dims[at], 0), None


def _sinks_of_rank_0(size: int, in_dims: list[Any], operands: list[Any]) -> None:
    at = -3 - _attention.MASKS
    operands[at], in_dims[at] = operands[at].select(in_dims[at], 0), None


FOLD_MUTANTS: dict[str, Callable[..., None]] = {
    "one rank's mask for all": _mask_of_rank_0,
    "one rank's keys for all": _k_of_rank_0,
    "one rank's sinks for all": _sinks_of_rank_0,
    "ranks unfolded as the faster dim": lambda size, in_dims, operands: None,
}


@pytest.mark.parametrize("name", FOLD_MUTANTS)
def test_a_faulty_fold_differs_from_a_loop(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The loops above would be no witness if a fold that mixes ranks up passed them."""
    whole = _attention._one_level_below

    def faulty(function: Any, size: int, in_dims: Any, operands: Any) -> Any:
        in_dims, operands = list(in_dims), list(operands)
        FOLD_MUTANTS[name](size, in_dims, operands)
        results, dims = whole(function, size, tuple(in_dims), tuple(operands))
        if "unfolded" in name:  # [size, batch, heads, ...] read as if the heads had come [heads, size]
            joined = [x.movedim(0, 1).flatten(1, 2) for x in results]
            results = tuple(x.unflatten(1, (-1, size)).movedim(2, 0) for x in joined)
        return results, dims

    operands, dims = batched(set(NAMES))
    wanted = [gradients(rank(operands, dims, r), fn=plain) for r in range(RANKS)]
    for fold in (whole, faulty):
        monkeypatch.setattr(_attention, "_one_level_below", fold)
        got = vmap(gradients, in_dims=(dims,))(operands)
        error = max(fcp.relative_error(torch.stack([x[name] for x in wanted]), got[name]) for name in got)
        assert error < FLOAT64 if fold is whole else error > 1e-6


@pytest.mark.parametrize(
    ("names", "q", "k", "mask"),
    [
        # A mask that all share: the ranks are heads, and the mask stays [batch, seq].
        ({"q"}, (2, 12, 5, 4), (2, 6, 5, 4), (2, 5)),
        ({"q", "k", "v"}, (2, 12, 5, 4), (2, 6, 5, 4), (2, 5)),
        ({"sinks"}, (2, 12, 5, 4), (2, 6, 5, 4), (2, 5)),
        # A mask that varies, in any of its tensors: the ranks are rows.
        ({"q", "positions"}, (6, 4, 5, 4), (6, 2, 5, 4), (6, 5)),
        ({"k", "v", "documents"}, (6, 4, 5, 4), (6, 2, 5, 4), (6, 5)),
        ({"valid"}, (6, 4, 5, 4), (6, 2, 5, 4), (6, 5)),
    ],
)
def test_vmap_runs_one_kernel_and_folds_into_heads_or_rows(
    seen: Seen, names: set[str], q: tuple[int, ...], k: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    """Catches a loop over ranks, and a mask that is repeated once a rank though all ranks share it."""
    operands, dims = batched(names)
    vmap(lambda x: gradients(x, kernel="counting"), in_dims=(dims,))(operands)
    assert seen == [("forward", q, k, mask), ("backward", q, k, mask)]


def test_two_vmaps_run_one_kernel(seen: Seen) -> None:
    """Catches a fold that loops at the second level (cp x tp in one step)."""
    operands, dims = batched({"q", "k", "v"})
    twice = {name: x if dims[name] is None else torch.stack([x, -x]) for name, x in operands.items()}
    outer = {name: dims[name] for name in NAMES}

    def both(operands: dict[str, Tensor]) -> dict[str, Tensor]:
        return vmap(lambda x: gradients(x, kernel="counting"), in_dims=(dims,))(operands)

    vmap(both, in_dims=(outer,))(twice)
    heads = ((2, 24, 5, 4), (2, 12, 5, 4), (2, 5))
    assert seen == [("forward", *heads), ("backward", *heads)]


# --- beyond the first derivative --------------------------------------------------------------------------------------


def _second(fn: Callable[..., Tensor], operands: list[Tensor], with_sinks: bool, **fixed: Any) -> tuple[Tensor, ...]:
    """Hessian-vector products of a loss that is not linear in the output."""

    def loss(*given: Tensor) -> Tensor:
        out = fn(*given[:3], sinks=given[3] if with_sinks else None, **fixed)
        return ((out + 0.5).sin() * random(*out.shape, seed=11)).sum()  # curved at 0, where empty rows are

    first = grad(loss, argnums=tuple(range(len(operands))))
    directions = [random(*x.shape, seed=20 + i) for i, x in enumerate(operands)]
    return grad(
        lambda given: sum((g * d).sum() for g, d in zip(first(*given), directions, strict=True)),
    )(tuple(operands))


@pytest.mark.parametrize("mask", ["plain", "packed and padded", "a row of padding"])
@pytest.mark.parametrize("fixed", [{}, {"window": 3, "scale": 0.4}, {"softcap": 0.9}])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_second_derivatives_are_those_of_the_plain_softmax(mask: str, fixed: dict[str, Any], with_sinks: bool) -> None:
    """Catches a backward that is treated as a constant, or whose own backward forgets `out`, a cap or a sink."""
    operands = qkv(v_dim=3) + ([random(4, seed=4)] if with_sinks else [])
    wanted = _second(plain, operands, with_sinks, mask=MASKS[mask], **fixed)
    got = _second(fcp.attention, operands, with_sinks, mask=MASKS[mask], **fixed)
    assert max(map(fcp.relative_error, wanted, got)) < FLOAT64


@pytest.mark.parametrize(("name", "places"), [("g", [0]), ("q, k and v", [3, 4, 5]), ("sinks", [6])])
def test_a_second_derivative_that_forgets_an_operand_shows(
    monkeypatch: pytest.MonkeyPatch, name: str, places: list[int]
) -> None:
    """The comparison of second derivatives would be no witness if a gradient held constant in an operand passed it."""
    operands = [*qkv(), random(4, seed=4)]
    whole = _attention._AttentionGradient.backward

    def forgetful(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        found = whole(ctx, *cotangents)
        return tuple(torch.zeros_like(x) if i in places else x for i, x in enumerate(found))

    monkeypatch.setattr(_attention._AttentionGradient, "backward", staticmethod(forgetful))
    wanted = _second(plain, operands, True, mask=PLAIN)
    assert max(map(fcp.relative_error, wanted, _second(fcp.attention, operands, True, mask=PLAIN))) > 1e-6


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_the_gradient_of_a_query_without_a_key_is_zero_in_its_cotangent_too(with_sinks: bool) -> None:
    """Catches a second derivative in which an empty row averages all values: its cotangent would seem to matter."""
    operands = qkv() + ([random(4, seed=4)] if with_sinks else [])
    mask, directions = MASKS["left padding"], [random(*x.shape, seed=20 + i) for i, x in enumerate(operands)]

    def moved(fn: Callable[..., Tensor]) -> Tensor:
        def along(weights: Tensor) -> Tensor:
            found = results(fn, operands, weights, with_sinks, mask=mask)
            return sum((found[name] * d).sum() for name, d in zip(("q", "k", "v", "sinks"), directions, strict=False))

        return grad(along)(random(2, 4, 8, 4, seed=5))

    wanted, got = moved(plain), moved(fcp.attention)
    assert fcp.relative_error(wanted, got) < FLOAT64
    assert not bool(got[0, :, :3].any()) and bool(got[0, :, 3:].any())


def test_second_derivatives_under_vmap() -> None:
    """Catches the second backward reading a batched mask or operand as if it were whole."""
    for names in ({"q", "k", "v"}, {"q", "valid", "documents"}, {"sinks"}):
        operands, dims = batched(names)

        def curvature(x: dict[str, Tensor], **fixed: Any) -> Tensor:
            return grad(lambda q: (gradients({**x, "q": q}, **fixed)["k"] ** 2).sum())(x["q"])

        wanted = torch.stack([curvature(rank(operands, dims, r), fn=plain) for r in range(RANKS)])
        got = vmap(curvature, in_dims=(dims,))(operands)
        assert fcp.relative_error(wanted, got) < FLOAT64


def test_autograd_without_torch_func() -> None:
    """Catches a Function that works under torch.func alone: .backward, and grad with create_graph."""
    operands = [x.requires_grad_() for x in qkv()]
    mask = MASKS["documents"]

    def twice(fn: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(fn(*operands, mask).sin().sum(), operands, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), operands)]

    assert max(map(fcp.relative_error, twice(plain), twice(fcp.attention))) < FLOAT64


# --- the mask that is never built -------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What `materialize` returned to the kernels, and what the fused kernel was handed to add."""
    found: list[Tensor | None] = []
    materialize, additive = kernels.materialize, kernels._additive

    def spy(*args: Any, **fixed: Any) -> Tensor | None:
        found.append(materialize(*args, **fixed))
        return found[-1]

    def spy_additive(*args: Any) -> Tensor | None:
        found.append(additive(*args))
        return found[-1]

    monkeypatch.setattr(kernels, "materialize", spy)
    monkeypatch.setattr(kernels, "_additive", spy_additive)
    return found


@pytest.mark.parametrize("fixed", [{}, {"window": 8}, {"window": 9, "scale": 0.2}])
@pytest.mark.parametrize(("kernel", "calls"), [("fused", 12), ("auto", 6)])
def test_a_plain_causal_description_never_builds_a_mask(
    built: list[Tensor | None], fixed: dict[str, Any], kernel: str, calls: int
) -> None:
    """Catches a square of the sequence built for every layer of an unpacked batch, ones in the mask included (C-08)."""
    for mask in (PLAIN, None, describe(torch.arange(8).expand(2, 8), valid=torch.ones(2, 8, dtype=torch.bool))):
        operands = [*qkv(), random(4, seed=4)]
        results(fcp.attention, operands, random(2, 4, 8, 4), True, mask=mask, kernel=kernel, **fixed)
    assert len(built) == calls and all(x is None for x in built)


def test_any_other_description_builds_one(built: list[Tensor | None]) -> None:
    """The witness above is none if nothing is ever built."""
    fcp.attention(*qkv(), PLAIN, window=3, kernel="fused")
    fcp.attention(*qkv(), MASKS["documents"], kernel="fused")
    assert len(built) == 4 and all(x is not None for x in built)


# --- registry and refusals --------------------------------------------------------------------------------------------


def test_a_registered_kernel_serves_and_its_name_is_taken(registry: dict[str, fcp.Kernel]) -> None:
    """Catches a registration that is ignored, or that replaces another kernel without a word."""
    doubled = fcp.Kernel(
        forward=lambda q, k, v, mask, spec: (torch.full_like(q, 2.0), torch.zeros(q.shape[:3], dtype=q.dtype)),
        backward=registry["reference"].backward,
    )
    fcp.register_kernel("twos", doubled)
    assert kernels.registered["twos"] is doubled
    assert bool((fcp.attention(*qkv(), PLAIN, kernel="twos") == 2).all())
    for name in ("twos", "fused", "reference", "auto"):
        with pytest.raises(ValueError, match=f"register_kernel: '{name}' is taken"):
            fcp.register_kernel(name, doubled)
    with pytest.raises(TypeError):
        kernels.registered["other"] = doubled  # the view is read-only


def test_a_kernel_that_refuses_a_call_is_an_error(registry: dict[str, fcp.Kernel]) -> None:
    """Catches a kernel that is asked for by name and silently replaced, or that drops what it does not know (C-14)."""
    with pytest.raises(ValueError, match=r"kernel 'fused' cannot serve.*no soft cap.*kernel='auto'"):
        fcp.attention(*qkv(), PLAIN, softcap=1.0, kernel="fused")
    picky = replace(
        registry["reference"],
        refuses=lambda spec, q, v: "windows are not for me" if spec.window else None,
        refuses_mask=lambda spec, mask: None if mask.plain else "nor are documents",
    )
    fcp.register_kernel("picky", picky)
    fcp.attention(*qkv(), PLAIN, kernel="picky")
    with pytest.raises(ValueError, match="windows are not for me"):
        fcp.attention(*qkv(), PLAIN, window=2, kernel="picky")
    with pytest.raises(ValueError, match=r"kernel 'picky' cannot serve.*nor are documents"):
        fcp.attention(*qkv(), MASKS["documents"], kernel="picky")


def test_auto_takes_the_planned_kernel_where_it_runs() -> None:
    """Catches a default that is always the slow one, or one that a device has not."""
    q, _, v = qkv()
    picks = [kernels.pick(fcp.Spec(1.0, softcap=cap, kernel="auto"), q, v, PLAIN) for cap in (None, 1.0)]
    assert picks == ["planned", "planned"]
    q, v = (x.to("meta") for x in (q, v))
    assert kernels.pick(fcp.Spec(1.0, kernel="auto"), q, v, PLAIN) == "reference"


def test_an_unknown_kernel_or_argument_is_an_error() -> None:
    """Catches arguments that are swallowed (C-14, C-19)."""
    with pytest.raises(ValueError, match=r"no kernel 'flash'; registered are reference, fused, .*planned"):
        fcp.attention(*qkv(), PLAIN, kernel="flash")
    with pytest.raises(TypeError, match="sliding_window"):
        fcp.attention(*qkv(), PLAIN, sliding_window=3)
    with pytest.raises(TypeError):
        fcp.attention(*qkv(), PLAIN, 3)


def _shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in (q, k, v)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("operands", "fixed", "message"),
    [
        (_shapes((4, 8, 4), (2, 8, 4), (2, 8, 4)), {}, r"q \(4, 8, 4\).*must be \[batch, heads, seq, dim\]"),
        (_shapes((2, 4, 8, 4), (2, 2, 8, 4), (2, 8, 4)), {}, r"must be \[batch, heads, seq, dim\]"),
        (_shapes((2, 4, 8, 4), (2, 2, 7, 4), (2, 2, 7, 4)), {}, "batch, seq and .* must agree"),
        (_shapes((2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 7, 4)), {}, "must agree"),
        (_shapes((2, 4, 8, 4), (2, 2, 8, 4), (2, 1, 8, 4)), {}, "must agree"),
        (_shapes((2, 4, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), {}, "must agree"),
        (_shapes((2, 4, 8, 4), (2, 2, 8, 3), (2, 2, 8, 4)), {}, "must agree"),
        (_shapes((2, 4, 8, 4), (2, 3, 8, 4), (2, 3, 8, 4)), {}, "4 query heads over 3 .* do not divide"),
        ([x.to(d) for x, d in zip(qkv(), (torch.float64,) * 2 + (torch.float32,), strict=True)], {}, "share one dtype"),
        (qkv(), {"sinks": torch.zeros(2, dtype=torch.float64)}, r"sinks \(2,\); one logit for each of 4 query heads"),
        (qkv(), {"sinks": torch.zeros(1, 4, dtype=torch.float64)}, r"sinks \(1, 4\)"),
        (qkv(), {"window": 0}, "window=0 must be above 0"),
        (qkv(), {"window": -2}, "window=-2 must be above 0"),
        (qkv(), {"chunk": 0}, "chunk=0 must be above 0"),
        (qkv(), {"softcap": 0.0}, "softcap=0.0 must be above 0"),
        (qkv(), {"softcap": -1.0}, "softcap=-1.0 must be above 0"),
        (qkv(), {"mask": describe(torch.arange(16).expand(2, 16))}, "8 tokens of a sequence of 16.*fcp.ulysses"),
        (qkv(), {"mask": describe(torch.arange(8))}, "a mask of 1 rows for a batch of 2"),
    ],
)
def test_what_does_not_fit_is_refused(operands: list[Tensor], fixed: dict[str, Any], message: str) -> None:
    """Catches shapes that would broadcast, and attention on one slice with the mask of the whole sequence (C-15)."""
    with pytest.raises(ValueError, match="attention: .*" + message):
        fcp.attention(*operands, **{"mask": PLAIN, **fixed})


def test_one_function_under_both_names() -> None:
    """Catches a default record that holds another attention than the public one."""
    assert fcp.LOCAL.attention is fcp.attention is _attention.attention

"""The kernels of CUDA, varlen and flex: on CPU all of them but the device's own code, on CUDA the whole.

On CPU torch's two flash operators are replaced by a loop over the sequences that they are handed, in plain operations;
flex attention runs as it stands, uncompiled, or through the compiler's front half. What is left for a GPU is at the
end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

import fcp
from fcp import _flex, _kernel_check, _varlen, kernels, pytree
from fcp.kernels import Kernel, Spec
from fcp.masks import Mask, describe
from tests.test_kernels import FIXED, INF, MASKS, qkv, random, results, worst
from tests.test_planned import _Largest, descriptions, expected
from tests.tolerances import FLOAT64

Operands = list[Tensor]


def operands_of(mask: Mask, dtype: torch.dtype, dim: int = 5, v_dim: int = 3) -> Operands:
    """q, k, v, a cotangent and a sink for each head, of a mask's queries and keys."""
    (batch, seq), keys = mask.positions.shape, mask.seq if mask.keys is None else mask.keys.seq
    shapes = (batch, 4, seq, dim), (batch, 2, keys, dim), (batch, 2, keys, v_dim), (batch, 4, seq, v_dim), (batch, 4)
    return [random(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def errors(kernel: Kernel, mask: Mask, spec: Spec, given: Operands) -> dict[str, float]:
    """Output, log-sum-exp, and gradients from a normaliser with a sink in it, against the reference in float64."""
    wanted = _kernel_check._results(kernels.registered["reference"], mask, spec, [x.double() for x in given])
    found = _kernel_check._results(kernel, mask, spec, given)
    empty = wanted["lse"] == -INF
    if not torch.equal(empty, found["lse"] == -INF) or bool(found["out"][empty].any()):
        return {"rows without a key": INF}
    for each in (wanted, found):
        each["lse"] = each["lse"].masked_fill(empty, 0.0)
    largest = max(float(wanted[name].abs().max()) for name in ("dq", "dk", "dv")) or 1.0
    scales = {name: max(float(x.abs().max()), 1e-3 * largest) for name, x in wanted.items()}
    return {name: fcp.relative_error(x, found[name].double(), scales[name]) for name, x in wanted.items()}


# --- varlen: the layout, with torch's two operators as loops ----------------------------------------------------------


def _seen(n: int, causal: bool, left: int, right: int) -> Tensor:
    """bool [n, n]: what the operators' causal and window_size say of one sequence."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = (j <= i) if causal else torch.ones(n, n, dtype=torch.bool)
    seen = seen & (i - j <= left) if left >= 0 else seen
    return seen & (j - i <= right) if right >= 0 else seen


def _check_operands(starts: Tensor, longest: int, *tensors: Tensor) -> None:
    assert starts.dtype == torch.int32 and starts[0] == 0 and longest == int(starts.diff().max())
    for x in tensors:
        assert x.dim() == 3 and x.shape[0] == int(starts[-1]) and x.shape[-1] == tensors[0].shape[-1]
        assert x.shape[-1] % 8 == 0 and x.is_contiguous()


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[tokens, kv_heads, dim] as [heads, tokens, dim] in float64."""
    return x.double().transpose(0, 1).repeat_interleave(like.shape[1] // x.shape[1], 0)


def _as_meta(args: tuple[Any, ...]) -> list[Any]:
    return [x.to("meta") if isinstance(x, Tensor) else x for x in args]


def loop_forward(*args: Any, **words: Any) -> tuple[Tensor, ...]:
    shapes = torch.ops.aten._flash_attention_forward(*_as_meta(args), **words)  # its schema, and what it gives
    q, k, v, starts, _, longest, _, dropout, causal, _ = args
    _check_operands(starts, longest, q, k, v)
    assert dropout == 0.0
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for first, end in starts.unfold(0, 2, 1).tolist():
        rows = slice(first, end)
        logits = q[rows].double().transpose(0, 1) @ _grouped(k[rows], q).mT * words["scale"]
        seen = _seen(end - first, causal, words["window_size_left"], words["window_size_right"])
        logits = logits.masked_fill(~seen, -INF)
        out[rows] = (logits.softmax(-1) @ _grouped(v[rows], q)).transpose(0, 1).to(q.dtype)
        lse[:, rows] = logits.logsumexp(-1)
    assert [x.shape for x in (out, lse)] == [x.shape for x in shapes[:2]]
    return out, lse, *shapes[2:]


def loop_backward(*args: Any, **words: Any) -> tuple[Tensor, ...]:
    torch.ops.aten._flash_attention_backward(*_as_meta(args), **words)
    g, q, k, v, out, lse, starts, _, longest, _, dropout, causal, _, _ = args
    _check_operands(starts, longest, g, q, k, v, out)
    assert dropout == 0.0 and lse.dtype == torch.float32 and lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    found = [torch.empty_like(x) for x in (q, k, v)]
    for first, end in starts.unfold(0, 2, 1).tolist():
        rows = slice(first, end)
        q_here, g_here, out_here = (x[rows].double().transpose(0, 1) for x in (q, g, out))
        keys, values = _grouped(k[rows], q), _grouped(v[rows], q)
        seen = _seen(end - first, causal, words["window_size_left"], words["window_size_right"])
        p = torch.exp(q_here @ keys.mT * words["scale"] - lse[:, rows, None].double()).masked_fill(~seen, 0.0)
        ds = p * (g_here @ values.mT - (g_here * out_here).sum(-1, keepdim=True)) * words["scale"]
        parts = ds @ keys, ds.mT @ q_here, p.mT @ g_here
        for total, part in zip(found, parts, strict=True):
            total[rows] = part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1).to(total.dtype)
    return tuple(found)


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_varlen, "flash_forward", loop_forward)
    monkeypatch.setattr(_varlen, "flash_backward", loop_backward)


FLOAT32 = 1e-5
"""The log-sum-exps travel in float32, and so do the operands."""


@pytest.mark.usefixtures("looped")
@settings(max_examples=150, deadline=None)
@given(description=descriptions())
def test_varlen_is_the_reference_or_refuses(description: tuple[Mask, dict[str, int]]) -> None:
    """A run that sees another, tokens put back elsewhere, a window from the wrong end, padding that is not empty."""
    mask, words = description
    spec = Spec(0.4, **words)
    if _varlen.VARLEN.refuses_mask(spec, mask) is None:
        assert max(errors(_varlen.VARLEN, mask, spec, operands_of(mask, torch.float32)).values()) < FLOAT32


LONG = torch.cat([torch.arange(n) for n in (130, 3, 67, 1, 99)]).expand(2, -1)
LEFT = torch.stack([torch.arange(300) >= 40, torch.arange(300) >= 0])
DESCRIPTIONS = {
    "plain": (describe(torch.arange(300).expand(2, -1)), {}),
    "packed": (describe(LONG), {}),
    "packed, window": (describe(LONG), {"window": 20}),
    "packed, window and chunk": (describe(LONG), {"window": 20, "chunk": 50}),
    "long window": (describe(torch.arange(300).expand(2, -1)), {"window": 400}),
    "chunk": (describe(torch.arange(300).expand(2, -1)), {"chunk": 64}),
    "left padding": (describe(torch.arange(300).expand(2, -1), valid=LEFT), {}),
    "left padding, window": (describe(torch.arange(300).expand(2, -1), valid=LEFT), {"window": 20}),
    "a row of padding": (describe(LONG, valid=torch.tensor([[False], [True]]).expand(2, 300)), {}),
    "nothing but padding": (describe(LONG, valid=torch.zeros(2, 300, dtype=torch.bool)), {}),
    "padding of its own document": (
        describe(LONG, documents=torch.arange(300).expand(2, -1) // 200, valid=torch.arange(300).expand(2, -1) < 200),
        {},
    ),
    "right padding": (describe(torch.arange(300).expand(2, -1), valid=LEFT.flip(-1)), {}),
    "right padding, window": (describe(torch.arange(300).expand(2, -1), valid=LEFT.flip(-1)), {"window": 20}),
    "holes": (describe(LONG, valid=torch.arange(300).expand(2, -1) % 7 != 3), {}),
    "returning documents": (describe(LONG, documents=torch.arange(300).expand(2, -1) // 75 % 2), {}),
    "jumping positions, window": (
        describe(torch.arange(300).expand(2, -1) * 2, documents=torch.zeros(2, 300, dtype=torch.int64)),
        {"window": 20},
    ),
}
PACKED = list(DESCRIPTIONS)[:11]
"""Those that runs say all of."""


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_which_descriptions_are_packed_sequences(name: str) -> None:
    """A refusal of what the kernel could serve costs much; the reverse is wrong. (Values: every one that it takes.)"""
    mask, words = DESCRIPTIONS[name]
    spec = Spec(0.4, **words)
    why = _varlen.VARLEN.refuses_mask(spec, mask)
    assert (why is None) == (name in PACKED)
    if why is None:
        assert max(errors(_varlen.VARLEN, mask, spec, operands_of(mask, torch.float32)).values()) < FLOAT32
    else:
        with pytest.raises(ValueError, match=r"kernel 'varlen' cannot serve.*see keys of an earlier run"):
            _varlen.VARLEN.forward(*operands_of(mask, torch.float32)[:3], mask, spec)


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (5, 3), (3, 12), (24, 16)])
def test_heads_of_any_size_are_filled_up(dim: int, v_dim: int) -> None:
    """A head that is cut at another size than it was filled from."""
    mask, words = DESCRIPTIONS["left padding, window"]
    given = operands_of(mask, torch.float32, dim, v_dim)
    assert max(errors(_varlen.VARLEN, mask, Spec(0.4, **words), given).values()) < FLOAT32


def test_packed_rows_are_not_copied_together_twice() -> None:
    """A gather where all tokens are in a run anyway, and one packing a layer."""
    mask, _ = DESCRIPTIONS["packed"]
    packing = _varlen.packing_of(mask, None, None)
    assert isinstance(packing, _varlen.Packing) and packing.at is None and packing.longest == 130
    assert packing.starts.tolist() == [0, 130, 133, 200, 201, 300, 430, 433, 500, 501, 600]
    assert _varlen.packing_of(mask, None, None) is packing


Fault = Callable[[pytest.MonkeyPatch], None]


def _wider(patch: pytest.MonkeyPatch) -> None:
    how = _varlen._how
    patch.setattr(_varlen, "_how", lambda packing, spec: how(packing, replace(spec, window=spec.window + 1)))


def _own_lse(patch: pytest.MonkeyPatch) -> None:
    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **words: Any) -> tuple[Tensor, ...]:
        own = loop_forward(q, k, v, *rest[2:6], 0.0, rest[7], False, **words)
        return loop_backward(g, q, k, v, own[0], own[1].contiguous(), *rest[2:], **words)

    patch.setattr(_varlen, "flash_backward", backward)


def _joined(patch: pytest.MonkeyPatch) -> None:
    find = _varlen._find

    def joined(*args: Any) -> Any:
        packing = find(*args)
        starts = packing.starts[[0, *range(2, len(packing.starts))]]
        return replace(packing, starts=starts, longest=int(starts.diff().max()))

    patch.setattr(_varlen, "_find", joined)


def _shifted(patch: pytest.MonkeyPatch) -> None:
    find = _varlen._find
    patch.setattr(_varlen, "_find", lambda *args: replace(find(*args), at=find(*args).at - 1))


VARLEN_FAULTS: dict[str, Fault] = {
    "a window that is one too long": _wider,
    "a normaliser of its own in backward": _own_lse,
    "two documents joined": _joined,
    "tokens put back one place before": _shifted,
}


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize("name", VARLEN_FAULTS)
def test_faults_of_the_packing_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The comparisons above would be no witness if these passed."""
    spec, row = Spec(0.4, window=9), torch.cat([torch.arange(12), torch.arange(30)]).expand(2, -1)
    valid = torch.stack([torch.arange(42) >= 4, torch.arange(42) >= 0])
    mask, again = (describe(row, valid=valid) for _ in range(2))
    given = operands_of(mask, torch.float32)
    assert max(errors(_varlen.VARLEN, mask, spec, given).values()) < FLOAT32
    VARLEN_FAULTS[name](monkeypatch)
    assert max(errors(_varlen.VARLEN, again, spec, given).values()) > 1e-3


# --- flex: on CPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention as it stands: nothing compiled, and its plain gradient, which torch keeps from users on CPU."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fixed", FIXED)
def test_flex_is_the_reference(mask: str, fixed: str) -> None:
    """A clause of the description that the mask's function drops, heads that meet another, a row without a key, a cap;
    and the gradient from a normaliser that is not flex's own."""
    spec = Spec(**{"scale": 0.4, **FIXED[fixed]})
    assert max(errors(_flex.FLEX, MASKS[mask], spec, operands_of(MASKS[mask], torch.float64)).values()) < FLOAT64


@pytest.mark.usefixtures("eager")
@settings(max_examples=60, deadline=None)
@given(description=descriptions())
def test_flex_is_the_reference_on_any_description(description: tuple[Mask, dict[str, int]]) -> None:
    mask, words = description
    assert max(errors(_flex.FLEX, mask, Spec(0.4, **words), operands_of(mask, torch.float64)).values()) < FLOAT64


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["packed, window and chunk", "right padding", "returning documents", "holes"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_flex_over_several_blocks(name: str, dtype: torch.dtype) -> None:
    """Lengths that are no multiple of a block; other dtypes, which come back as they were."""
    mask, words = DESCRIPTIONS[name]
    given = operands_of(mask, dtype, 20, 17)
    out, lse = _flex.FLEX.forward(*given[:3], mask, Spec(0.4, **words))
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert max(errors(_flex.FLEX, mask, Spec(0.4, **words), given).values()) < _kernel_check.BOUNDS[dtype]


def parts_of(name: str) -> list[Mask]:
    """Some queries against some keys, in orders of their own, and a ring's two kinds of part."""
    mask, _ = DESCRIPTIONS[name]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    whole = torch.arange(300)
    pairs = [(order[:70], order[100:290]), (order, order), (whole[150:], whole[:150]), (whole[:150], whole[150:])]
    return [mask.take(queries).against(mask.take(keys)) for queries, keys in pairs]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("words", [{}, {"window": 30}, {"chunk": 64, "softcap": 1.5}])
@pytest.mark.parametrize("name", ["plain", "packed", "holes", "returning documents"])
def test_flex_on_parts_of_a_sequence(name: str, words: dict[str, Any]) -> None:
    """Keys that are taken for the queries' own; rows whose keys are all elsewhere."""
    for mask in parts_of(name):
        assert max(errors(_flex.FLEX, mask, Spec(0.4, **words), operands_of(mask, torch.float64)).values()) < FLOAT64


@pytest.mark.usefixtures("eager")
def test_flex_under_torch_func(registry: dict[str, Kernel]) -> None:
    """A gradient inside a Function whose inputs torch.func holds, with vmap inside and outside."""
    registry["here"] = replace(_flex.FLEX, refuses=lambda spec, q, v: None)
    mask, stacked = MASKS["packed and padded"], [torch.stack([x, -x, x + 1]) for x in qkv()]
    sinks = random(4, seed=4)

    def loss(kernel: str, *given: Tensor) -> Tensor:
        return fcp.attention(*given, mask, sinks=sinks, window=4, kernel=kernel).sin().sum()

    def gradients(kernel: str) -> list[Tensor]:
        inside = vmap(grad(partial(loss, kernel), argnums=(0, 1, 2)))(*stacked)
        outside = grad(lambda *x: vmap(partial(loss, kernel))(*x).sum(), argnums=(0, 1, 2))(*stacked)
        return [*inside, *outside]

    assert max(map(fcp.relative_error, gradients("reference"), gradients("here"))) < FLOAT64


FLEX_FAULTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "flex's own normaliser": lambda g, out, lse, found, found_lse: (g, torch.zeros_like(found_lse)),
    "weights without the row": lambda g, out, lse, found, found_lse: (
        kernels.weight_of(found_lse, lse) * g,
        torch.zeros_like(found_lse),
    ),
    "a row without weights": lambda g, out, lse, found, found_lse: (g, (g * (found - out)).sum(-1)),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", FLEX_FAULTS)
def test_faults_of_the_gradient_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The comparisons above would be no witness if another formula than the derived one passed them."""
    mask = MASKS["packed and padded"]
    monkeypatch.setattr(_flex, "_cotangents", FLEX_FAULTS[name])
    assert max(errors(_flex.FLEX, mask, Spec(0.4), operands_of(mask, torch.float64, 16, 16)).values()) > 1e-3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("fault", ["window", "kind", "rows"])
def test_faults_of_the_masks_function_show(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    words = _flex._words

    def faulty(*args: Any) -> tuple[Tensor, ...]:
        q_row, q_kind, lowest, k_row, k_kind, k_position = words(*args)
        if fault == "window":
            return q_row, q_kind, lowest - 1, k_row, k_kind, k_position
        if fault == "kind":
            return q_row, q_kind * 0, lowest, k_row, k_kind.clamp(max=0), k_position
        return q_row, q_kind, lowest, k_row + 1, k_kind, k_position

    monkeypatch.setattr(_flex, "_words", faulty)
    mask = describe(torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]))
    assert max(errors(_flex.FLEX, mask, Spec(0.4, window=3), operands_of(mask, torch.float64)).values()) > 1e-3


# --- flex: the block mask --------------------------------------------------------------------------------------------


def dense_of(mask: Mask, **words: Any) -> Tensor:
    """bool [batch, queries, keys]; of parts too."""
    if mask.whole:
        return expected(mask, **words)
    found = fcp.masks.materialize(mask, **words)
    assert found is not None
    return found[:, 0]


def check_blocks(mask: Mask, block: int, **words: Any) -> tuple[int, int]:
    """Compares the block mask with the dense one; how many blocks are seen in part, and whole."""
    blocks = _flex.blocks_of(mask, words.get("window"), words.get("chunk"))
    dense = dense_of(mask, **words)
    batch, queries, keys = dense.shape
    assert blocks.seq_lengths == (queries, keys) and tuple(blocks.BLOCK_SIZE) == (block, block)
    places = torch.arange(batch)[:, None, None], torch.arange(queries)[None, :, None], torch.arange(keys)[None, None, :]
    assert torch.equal(blocks.mask_mod(places[0], torch.tensor(0), *places[1:]), dense)
    filled = torch.nn.functional.pad(dense, (0, -keys % block, 0, -queries % block))
    tiles = filled.unflatten(2, (-1, block)).unflatten(1, (-1, block)).transpose(2, 3).flatten(3)
    whole, seen = tiles.all(-1), tiles.any(-1)
    for number, listed, wanted in (
        (blocks.kv_num_blocks, blocks.kv_indices, seen & ~whole),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, whole),
        (blocks.q_num_blocks, blocks.q_indices, (seen & ~whole).transpose(1, 2)),
        (blocks.full_q_num_blocks, blocks.full_q_indices, whole.transpose(1, 2)),
    ):
        assert number is not None and listed is not None
        assert number.dtype == listed.dtype == torch.int32 and number.shape[1] == 1
        for row in range(batch):
            for line, which in enumerate(wanted[row]):
                assert listed[row, 0, line, : number[row, 0, line]].tolist() == which.nonzero()[:, 0].tolist()
    return int((seen & ~whole).sum()), int(whole.sum())


@pytest.mark.parametrize("block", [2, 5])
@settings(max_examples=100, deadline=None)
@given(description=descriptions())
def test_the_block_mask_is_the_dense_one(block: int, description: tuple[Mask, dict[str, int]]) -> None:
    """A block that somebody sees and that is left out; one that is called whole and is not; and the mask's function."""
    mask, words = description
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flex, "BLOCK", block)
        check_blocks(mask, block, **words)


def test_blocks_that_are_seen_whole_are_told_apart() -> None:
    """All in part is right and slow; whole at an end that is not complete, or in an order that is not the rows'."""
    assert check_blocks(DESCRIPTIONS["plain"][0], 128) == (2 * 5, 2 * 1)
    even = describe(torch.arange(384).expand(2, -1))
    assert check_blocks(even, 128) == (2 * 3, 2 * 3)
    assert check_blocks(even, 128, window=128) == (2 * 5, 0)
    for name in ("plain", "holes", "returning documents"):
        for mask in parts_of(name):
            check_blocks(mask, 128, window=100)


def test_layers_share_one_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block mask a layer; one that outlives its mask; a ring's part that is made anew from the same numbers."""
    found: list[int] = []
    real = _flex._find
    monkeypatch.setattr(_flex, "_find", lambda *args: found.append(1) or real(*args))
    mask = describe(torch.arange(12).expand(2, -1) % 7)
    assert _flex.blocks_of(mask, 3, None) is _flex.blocks_of(mask, 3, None)
    for _ in range(2):
        part = mask.take(torch.arange(6)).against(mask.take(torch.arange(6, 12)))
        _flex.blocks_of(part, None, None)
    assert len(found) == 2
    held = _flex._blocks._held
    assert mask.positions in held
    before = len(held)
    del mask
    assert len(held) == before - 1


def test_the_block_mask_makes_no_square_of_the_sequence() -> None:
    def largest(seq: int) -> int:
        with _Largest() as seen:
            _flex.blocks_of(describe(torch.arange(seq)[None] % 200), None, None)
        return seen.numel

    assert largest(4096) <= 2.1 * largest(2048)


# --- flex: through the compiler's front half --------------------------------------------------------------------------


class _Recorded:
    """A compiler's back half that runs what it is given, and keeps it."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, examples: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append(graph)
        return aot_eager(graph, examples)

    def calls(self) -> list[Any]:
        target = torch.ops.higher_order.flex_attention
        return [node for graph in self.graphs for node in graph.graph.nodes if node.target is target]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Recorded]:
    """flex as on CUDA, up to where Triton would be asked."""
    recorded = _Recorded()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
    monkeypatch.setattr(_flex, "COMPILED", {"cpu"})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=recorded))
    _flex._compiled.cache_clear()
    torch._dynamo.reset()
    yield recorded
    _flex._compiled.cache_clear()
    torch._dynamo.reset()


def test_flex_compiles_and_its_gradient_is_right(compiled: _Recorded) -> None:
    """Code that the compiler does not follow; a scale or a cap that it takes for a variable, which ends in an error at
    the second value (flex attention has none); a mask that is compiled for each description."""
    for fixed in ({"scale": 0.3}, {"scale": 0.5}, {"scale": 0.5, "softcap": 2.0}, {"scale": 0.5, "softcap": 3.0}):
        before = len(compiled.calls())
        for name in ("packed, window", "right padding", "returning documents", "chunk"):
            mask, words = DESCRIPTIONS[name]
            given = operands_of(mask, torch.float64)
            assert max(errors(_flex.FLEX, mask, Spec(**fixed, **words), given).values()) < FLOAT64
        assert len(compiled.calls()) - before == 2  # one without a gradient, one with
        assert all(call.args[5] == fixed["scale"] for call in compiled.calls()[before:])


def test_other_lengths_are_compiled_once_more(compiled: _Recorded) -> None:
    """A kernel for each length of a batch; an uneven length that makes the even ones slow."""
    for seq in (128, 256, 384, 130, 140, 150, 512):
        mask = describe(torch.arange(seq).expand(2, -1))
        _flex.FLEX.forward(*operands_of(mask, torch.float32)[:3], mask, Spec(0.4))
    assert len(compiled.calls()) == 4  # the first length and any other, even and uneven
    lengths = [call.args[0].meta["example_value"].shape[2] for call in compiled.calls()]
    assert [isinstance(each, int) for each in lengths] == [True, False, True, False]


# --- who serves what --------------------------------------------------------------------------------------------------

CUDA_CAPABILITY = (9, 0)


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tensor]]:
    """(dtype, dim, v_dim) -> q and v that say they are on a GPU; nothing can be computed with them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CUDA_CAPABILITY)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(_flex, "has_triton", lambda: True)

    def tensors(dtype: torch.dtype, dim: int = 64, v_dim: int = 64) -> list[Tensor]:
        with FakeTensorMode():
            return [torch.empty(2, heads, 300, d, dtype=dtype, device="cuda") for heads, d in ((4, dim), (2, v_dim))]

    return tensors


B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_who_serves_a_description(as_if_cuda: Callable[..., list[Tensor]], name: str) -> None:
    """The slow kernel where the fast one would do; the fast one where it is wrong."""
    mask, words = DESCRIPTIONS[name]
    auto = partial(Spec, 0.4, kernel="auto", **words)
    packed = "varlen" if name in PACKED else "flex"
    for dtype, wanted in ((B16, packed), (F16, packed), (F32, "flex"), (F64, "reference")):
        assert kernels.pick(auto(), *as_if_cuda(dtype), mask) == wanted
    assert kernels.pick(auto(softcap=2.0), *as_if_cuda(B16), mask) == "flex"


def test_who_serves_parts_sizes_and_cards(
    as_if_cuda: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = DESCRIPTIONS["packed"][0]

    def picked(*given: Any, mask: Mask = mask) -> str:
        return kernels.pick(Spec(0.4, kernel="auto"), *as_if_cuda(*given), mask)

    assert [picked(B16, mask=part) for part in parts_of("plain")] == ["flex"] * 4
    assert [picked(B16, dim, v_dim) for dim, v_dim in ((64, 32), (192, 128), (256, 256), (257, 64), (64, 257))] == [
        "varlen", "varlen", "varlen", "reference", "reference",
    ]  # fmt: skip
    for capability, wanted in (((8, 9), ["varlen", "flex"]), ((7, 5), ["flex", "flex"]), ((8, 0), ["varlen"] * 2)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert [picked(B16, dim, dim) for dim in (192, 256)] == wanted
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert picked(B16) == "flex"
    monkeypatch.setattr(_flex, "has_triton", lambda: False)
    assert picked(B16) == "reference"


@pytest.mark.parametrize(
    ("kernel", "given", "words", "why"),
    [
        ("varlen", (F32,), {}, "has float16 and bfloat16, not torch.float32"),
        ("varlen", (B16,), {"softcap": 2.0}, "no soft cap"),
        ("varlen", (B16, 264), {}, "heads of up to 256, not 264"),
        ("flex", (F64,), {}, "computes in float32, which is not torch.float64"),
        ("flex", (B16, 64, 300), {}, "heads of up to 256, not 300"),
        ("planned", (B16,), {}, "it runs on cpu, and q is on cuda"),
        ("fused", (B16,), {}, "it runs on cpu, and q is on cuda"),
    ],
)
def test_a_kernel_by_name_says_why_not(
    as_if_cuda: Callable[..., list[Tensor]], kernel: str, given: tuple[Any, ...], words: dict[str, Any], why: str
) -> None:
    q, v = as_if_cuda(*given)
    with pytest.raises(ValueError, match=rf"kernel '{kernel}' cannot serve.*{why}.*use kernel='auto'"):
        kernels.check_kernel(Spec(0.4, kernel=kernel, **words), q, v, parts=False)
    if kernel == "varlen":
        with pytest.raises(ValueError, match="knows no queries and keys of different parts"):
            kernels.check_kernel(Spec(0.4, kernel=kernel), *as_if_cuda(B16), parts=True)


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_by_name_on_cpu_is_an_error_before_anything_runs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is replaced in silence, or fails somewhere inside torch; under vmap too."""
    monkeypatch.setattr(fcp._attention._Attention, "apply", lambda *args: pytest.fail("something ran"))
    for dtype in (F64, B16):
        operands = [x.to(dtype) for x in qkv()]
        with pytest.raises(ValueError, match=rf"kernel '{kernel}' cannot serve.*runs on cuda, and q is on cpu"):
            fcp.attention(*operands, MASKS["documents"], kernel=kernel)
    with pytest.raises(ValueError, match="q is on cpu"):
        vmap(lambda *x: fcp.attention(*x, MASKS["plain"], kernel=kernel))(*(torch.stack([x, x]) for x in qkv()))


# --- a wrong kernel does not pass -------------------------------------------------------------------------------------

Changed = Callable[..., Any]


def _faulty_forward(change: Changed) -> Kernel:
    inner = kernels.registered["reference"]
    return replace(inner, forward=lambda q, k, v, mask, spec: change(inner, q, k, v, mask, spec))


def _own_normaliser(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
    inner = kernels.registered["reference"]
    return inner.backward(g, q, k, v, *inner.forward(q, k, v, *rest), *rest)


def _without_last_gradient(*args: Any) -> Any:
    dq, dk, dv = kernels.registered["reference"].backward(*args)
    return dq, dk, torch.zeros_like(dv)


WRONG: dict[str, Kernel] = {
    "a window one too long": _faulty_forward(lambda r, q, k, v, m, s: r.forward(q, k, v, m, replace(s, window=10))),
    "no documents": _faulty_forward(lambda r, q, k, v, m, s: r.forward(q, k, v, replace(m, documents=None), s)),
    "no padding": _faulty_forward(lambda r, q, k, v, m, s: r.forward(q, k, v, replace(m, valid=None), s)),
    "heads tiled": _faulty_forward(lambda r, q, k, v, m, s: r.forward(q, k.flip(1), v.flip(1), m, s)),
    "base 2": _faulty_forward(lambda r, *args: (r.forward(*args)[0], r.forward(*args)[1] / 0.6931)),
    "0 for a row without a key": _faulty_forward(
        lambda r, *args: (r.forward(*args)[0], r.forward(*args)[1].clamp(min=-1e6))
    ),
    "NaN": _faulty_forward(lambda r, *args: (r.forward(*args)[0] * float("nan"), r.forward(*args)[1])),
    "a normaliser of its own": Kernel(kernels.registered["reference"].forward, _own_normaliser),
    "a gradient forgotten": Kernel(kernels.registered["reference"].forward, _without_last_gradient),
}


@pytest.mark.parametrize("dtype", [F64, F32, B16])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_at_its_first_use(
    registry: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """A run that learns something else, because a compiler or a driver is not the one that was tested."""
    monkeypatch.setattr(_kernel_check, "TRUSTED", set())
    fcp.register_kernel("wrong", WRONG[name])
    operands, told = [x.to(dtype) for x in qkv()], rf"kernel 'wrong' on cpu in {dtype} differs.*kernel='reference'"
    for _ in range(2):  # whoever goes on after the error is told again
        with pytest.raises(RuntimeError, match=told):
            fcp.attention(*operands, MASKS["documents"], window=3, kernel="wrong")
    fcp.attention(*operands, MASKS["documents"], window=3, kernel="reference")


def test_a_right_kernel_is_asked_once(registry: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check a layer; one for all dtypes, or for all words of the call; one on the CPU."""
    calls: list[tuple[torch.dtype, int]] = []
    inner = registry["reference"]

    def forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append((q.dtype, q.shape[2]))
        return inner.forward(q, *rest)

    fcp.register_kernel("counted", replace(inner, forward=forward))

    def use(dtype: torch.dtype, **words: Any) -> int:
        calls.clear()
        fcp.attention(*(x.to(dtype) for x in qkv()), MASKS["documents"], kernel="counted", **words)
        return len(calls)

    assert use(F64) == 1
    monkeypatch.setattr(_kernel_check, "TRUSTED", set())
    assert [use(F64), use(F64), use(F32), use(F32)] == [2, 1, 2, 1]
    assert [use(F32, window=3), use(F32, window=4), use(F32, softcap=1.0), use(F32, softcap=2.0)] == [2, 1, 2, 1]


def test_a_kernel_is_checked_on_a_mask_that_it_serves(
    registry: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that fails a kernel for what it refuses; and none at all for one that refuses the hardest mask."""
    monkeypatch.setattr(_kernel_check, "TRUSTED", set())
    picky = {"refuses_mask": lambda spec, mask: None if mask.plain else "documents"}
    registry["plain"] = replace(registry["reference"], **picky)
    registry["wrong"] = replace(WRONG["heads tiled"], **picky)
    fcp.attention(*qkv(), MASKS["plain"], kernel="plain")
    with pytest.raises(RuntimeError, match="kernel 'wrong'"):
        fcp.attention(*qkv(), MASKS["plain"], kernel="wrong")


@pytest.mark.usefixtures("eager", "looped")
@pytest.mark.parametrize("words", [{}, {"window": 3}, {"chunk": 4}])
def test_the_cuda_kernels_pass_the_check(words: dict[str, int]) -> None:
    """A check that refuses what is right: these are the kernels with the device's code replaced."""
    for name, dtype in (("varlen", B16), ("varlen", F16), ("flex", B16), ("flex", F16), ("flex", F32)):
        _kernel_check.check(name, Spec(0.3, **words), torch.zeros(1, 1, 1, 24, dtype=dtype), torch.zeros(1, 1, 1, 8))


# --- on CUDA ----------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA kernels run on a GPU, and none is here")


def error_on(
    device: str, kernel: str, dtype: torch.dtype, mask: Mask, words: dict[str, Any], dim: int, v_dim: int
) -> float:
    """Output and every gradient, the sinks' too, on the device, against the reference in float64 on the CPU."""
    q, k, v, weights, sinks = operands_of(mask, dtype, dim, v_dim)
    given = [q, k, v, sinks[0].to(torch.promote_types(dtype, torch.float32))]
    wanted = results(
        fcp.attention, [x.double() for x in given], weights.double(), True, mask=mask, kernel="reference", **words
    )
    there = pytree.map(lambda x: x.to(device), mask)
    moved = [x.to(device) for x in given]
    got = results(fcp.attention, moved, weights.to(device), True, mask=there, kernel=kernel, **words)
    assert all(x.dtype == like.dtype for x, like in zip(got.values(), [q, *given], strict=True))
    return worst(wanted, {name: x.to("cpu", torch.float64) for name, x in got.items()})


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", [F32, F16, B16, F64])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_what_is_asked_of_a_gpu_holds_here(registry: dict[str, Kernel], name: str, dtype: torch.dtype) -> None:
    """The comparison itself, so that on a GPU only the kernels are in question."""
    registry["here"] = replace(_flex.FLEX, refuses=lambda spec, q, v: None)
    for kernel in ("here", "auto", "reference"):
        assert error_on("cpu", kernel, dtype, *DESCRIPTIONS[name], 20, 5) < _kernel_check.BOUNDS[dtype]


@on_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F16, B16, F64])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "auto", "reference"])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_description_on_cuda(name: str, kernel: str, dtype: torch.dtype) -> None:
    """The device's own code, with heads of two sizes that are filled up and none that are."""
    mask, words = DESCRIPTIONS[name]
    q = torch.empty(2, 4, 300, 64, dtype=dtype, device="cuda")
    served = kernels.registered.get(kernel)
    if served is not None:
        why = served.refuses(Spec(0.4, kernel=kernel), q, q) or served.refuses_mask(Spec(0.4, **words), mask)
        if why is not None:
            pytest.skip(f"refused, as it should be: {why}")
    for dim, v_dim in ((64, 64), (20, 5)):
        assert error_on("cuda", kernel, dtype, mask, words, dim, v_dim) < _kernel_check.BOUNDS[dtype]


@on_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("words", [{}, {"window": 30}, {"softcap": 1.5}])
def test_parts_and_caps_on_cuda(dtype: torch.dtype, words: dict[str, Any]) -> None:
    """What a ring asks for."""
    for mask in [*parts_of("packed"), *parts_of("holes"), DESCRIPTIONS["right padding"][0]]:
        given = [x.cuda() for x in operands_of(mask, dtype, 32, 32)]
        there = pytree.map(Tensor.cuda, mask)
        found = errors(_flex.FLEX, there, Spec(0.4, **words), given)
        assert max(found.values()) < _kernel_check.BOUNDS[dtype]


@on_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("kind", ["packed", "right padding", "window", "softcap"])
def test_auto_makes_no_square_of_the_sequence_on_cuda(kind: str, dtype: torch.dtype) -> None:
    """The quadratic reference taken in silence. A byte for each pair would be 256 MiB; the operands are 4 MiB or 2."""
    seq = 16384
    words: dict[str, Any] = {"window": {"window": 512}, "softcap": {"softcap": 20.0}}.get(kind, {})

    def step() -> None:
        row = torch.arange(seq, device="cuda")[None]
        mask = describe(row % 1000 if kind == "packed" else row, valid=row < 16000 if kind == "right padding" else None)
        q, k, v = (torch.randn(1, 1, seq, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
        fcp.attention(q, k, v, mask, **words).square().sum().backward()

    step()  # compiled, and checked
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < seq * seq

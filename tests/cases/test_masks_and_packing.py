"""Section B of the case collection: who sees whom, at which position, and what padding may touch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import fcp
from fcp.loss import mean_loss
from fcp.masks import count_pairs, describe, materialize
from fcp.typing import IGNORED
from tests.cases.toy_attention import toy as attention_toy
from tests.cases.witnesses import (
    NOTICED,
    add,
    as_embeds,
    assert_close,
    assert_influence,
    assert_matches,
    assert_same_caller_gradient,
    assert_same_function,
    assert_trips,
    attention_options,
    attention_spy,
    blocks,
    inside,
    jacobian_probe,
    mesh_name,
    of_ranks,
    outside,
    run_outside,
    spy,
)
from tests.toys import PACK8, batch_of, tokens, toy


def change_mask(**changes: Any) -> Callable[[fcp.Inputs], fcp.Inputs]:
    """A fault: another mask than the batch's."""
    return lambda inputs: replace(inputs, mask=replace(inputs.mask, **changes))


def probe(fn: Any, params: Any, batch: dict[str, Any]) -> Tensor:
    return jacobian_probe(fn, params, as_embeds(params, batch))


def pairs_of(mask: fcp.Mask, **options: Any) -> Tensor:
    """The allowed pairs of the first row, from the description."""
    allowed = materialize(mask, **options)
    return torch.ones(mask.seq, mask.seq).tril().bool() if allowed is None else allowed[0, 0]


# --- C-08 -------------------------------------------------------------------------------------------------------------


def pack8(ones: bool, batch: int = 1) -> dict[str, Any]:
    ids = tokens(batch, 8)
    more = {"attention_mask": torch.ones(batch, 8, dtype=torch.int64)} if ones else {}
    return batch_of(ids, position_ids=torch.tensor([PACK8] * batch), **more)


@pytest.mark.parametrize("ones", [False, True], ids=["no mask", "mask of ones"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_c08_mask_of_ones(cp: int, ones: bool) -> None:
    """Packing is found only where no 2D mask is given: 36 pairs, and documents attend to each other."""
    model, params = attention_toy()
    batch = pack8(ones)
    assert count_pairs(fcp.prepare(batch).mask) == 21
    sharded = fcp.transform(model, cp=cp)
    assert_influence(blocks(3, 5), probe(sharded, params, batch))
    other = {**batch, "input_ids": torch.cat([(batch["input_ids"][:, :3] + 1) % 64, batch["input_ids"][:, 3:]], 1)}
    assert torch.equal(sharded(params, batch).logits[:, 3:], sharded(params, other).logits[:, 3:])
    assert_same_function(model, sharded, params, batch)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_c08_mutant(cp: int) -> None:
    """The probe of C-08 notices documents that see each other."""
    model, params = attention_toy()
    faulty = outside(fcp.transform(model, cp=cp), change_mask(documents=None))
    assert_trips(lambda: assert_influence(blocks(3, 5), probe(faulty, params, pack8(True))), match=r"\[3, 0\]")


# --- C-09 -------------------------------------------------------------------------------------------------------------

SEVEN_AND_THREE = [*range(7), *range(3)]


def seven_and_three() -> dict[str, Any]:
    return batch_of(tokens(1, 10), position_ids=torch.tensor([SEVEN_AND_THREE]))


@pytest.mark.parametrize("cp", [2, 5, 4])
def test_c09_odd_documents(cp: int) -> None:
    """Document lengths rounded down to a multiple of cp: the last token of an odd document drops out."""
    model, params = attention_toy()
    batch = seven_and_three()
    assert count_pairs(fcp.prepare(batch).mask) == 34
    sharded = fcp.transform(model, cp=cp)
    influence = probe(sharded, params, batch)
    assert_influence(blocks(7, 3), influence)
    assert bool((influence[6, :7] > NOTICED).all())
    assert_same_function(model, sharded, params, batch)
    assert_same_caller_gradient(model, sharded, params, batch)
    # The embedding row of the last token of document 1, by a loss on the logits.
    rows = torch.func.grad(lambda p: sharded(p, batch).logits.square().sum())(params)["embed"]["weight"]
    assert float(rows[batch["input_ids"][0, 6]].abs().max()) > NOTICED


@pytest.mark.parametrize("cp", [2, 5])
def test_c09_mutant(cp: int) -> None:
    """The probe of C-09 notices a document that was cut to a multiple of cp; so does R-logits."""
    model, params = attention_toy()
    batch = seven_and_three()
    cut = 7 // cp * cp
    ids = torch.tensor([[0] * cut + [1] * (7 - cut) + [2] * 3])
    faulty = outside(fcp.transform(model, cp=cp), change_mask(documents=ids))
    assert_trips(lambda: assert_influence(blocks(7, 3), probe(faulty, params, batch)), match=r"\[6, 0\]")
    # At cp 2 the token that is lost has no target, so that the loss alone would not tell.
    assert_trips(lambda: assert_same_function(model, faulty, params, batch), match="logits" if cp == 2 else "loss")


# --- C-10 -------------------------------------------------------------------------------------------------------------

RESTART = {
    "given none": {},
    "shifted": {"position_ids": torch.arange(5, 13)[None]},
    "packed": {"position_ids": torch.tensor([PACK8])},
}


def restarted(inputs: fcp.Inputs) -> fcp.Inputs:
    """A fault: positions built from the local length."""
    return replace(inputs, positions=torch.arange(inputs.positions.shape[1]).expand(inputs.positions.shape))


@pytest.mark.parametrize("name", RESTART)
@pytest.mark.parametrize("cp", [2, 4])
def test_c10_positions(cp: int, name: str) -> None:
    """Positions that restart on every rank, or rotary tables that are not sliced with the tokens."""
    model, params = toy()
    batch, seen = batch_of(tokens(1, 8), **RESTART[name]), []
    spied = inside(model, inputs=spy(seen, lambda x: of_ranks(x.positions, "cp")[:, 0]))
    fcp.transform(spied, cp=cp)(params, batch)
    whole = RESTART[name].get("position_ids", torch.arange(8)[None])[0]
    assert seen[0].tolist() == whole.reshape(cp, -1).tolist()
    assert_same_function(model, fcp.transform(model, cp=cp), params, batch)


def test_c10_a_shift_changes_nothing() -> None:
    """Rotary positions are relative; a shift that changes logits is a table that was indexed by rows."""
    model, params = toy()
    ids = tokens(1, 8)
    sharded = fcp.transform(model, cp=2)
    plain = sharded(params, batch_of(ids)).logits
    assert_close("logits", plain, sharded(params, batch_of(ids, **RESTART["shifted"])).logits)


@pytest.mark.parametrize("name", RESTART)
@pytest.mark.parametrize("cp", [2, 4])
def test_c10_mutant(cp: int, name: str) -> None:
    """R-logits notices positions that restart on every rank."""
    model, params = toy()
    batch = batch_of(tokens(1, 8), **RESTART[name])
    faulty = fcp.transform(inside(model, inputs=restarted), cp=cp)
    assert_trips(lambda: assert_same_function(model, faulty, params, batch), match="loss")


DYNAMIC = {"max_position_embeddings": 4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize("cp", [2, 4, 3])
def test_c10_length_of_the_whole(cp: int) -> None:
    """The same kind: rope scaling that depends on the length, computed from a slice or from padding."""
    model, params = toy(**DYNAMIC)
    batch = batch_of(tokens(2, 8))
    assert_same_function(model, fcp.transform(model, cp=cp), params, batch)


def test_c10_length_mutant() -> None:
    """R-logits notices a length that is taken from the slice."""
    model, params = toy(**DYNAMIC)
    faulty = inside(model, inputs=lambda x: replace(x, num_positions=x.num_positions - x.num_positions // 2))
    assert_trips(lambda: assert_same_function(model, fcp.transform(faulty, cp=2), params, batch_of(tokens(2, 8))))


# --- C-11 -------------------------------------------------------------------------------------------------------------

TEN = {
    "plain": {},
    "packed": {"position_ids": torch.tensor([SEVEN_AND_THREE, [*range(2), *range(8)]])},
    "left padded": {"attention_mask": torch.tensor([[0] * 3 + [1] * 7, [1] * 10])},
    "right padded": {"attention_mask": torch.tensor([[1] * 10, [1] * 5 + [0] * 5])},
    "documents": {"document_ids": torch.tensor([[3] * 4 + [1] * 6, [0] * 9 + [7]])},
}


def ten(name: str) -> dict[str, Any]:
    return batch_of(tokens(2, 10), **TEN[name])


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize("embeds", [False, True], ids=["tokens", "embeds"])
def test_c11_padding_for_divisibility(name: str, embeds: bool) -> None:
    """Padding that touches only some of the tensors: shifted positions, extra targets, a changed count."""
    model, params = attention_toy(windows=(3, None), pad_token_id=7)
    batch = as_embeds(params, ten(name)) if embeds else ten(name)
    sharded = fcp.transform(model, cp=4)
    assert sharded(params, batch).logits.shape == (2, 10, 64)
    assert_same_function(model, sharded, params, batch)
    assert_same_caller_gradient(model, sharded, params, batch)


def test_c11_what_the_last_rank_gets() -> None:
    """Tokens, positions, targets, documents and validity are padded together; n stays 9."""
    model, params = attention_toy(pad_token_id=7)
    seen: list[fcp.Inputs] = []
    batch = batch_of(torch.arange(20, 30)[None])

    def look(x: fcp.Inputs) -> fcp.Inputs:
        names = ("tokens", "positions", "targets", "real")
        ranks = {name: of_ranks(getattr(x, name), "cp")[:, 0] for name in names}
        return replace(x, **ranks)

    fcp.transform(inside(model, inputs=spy(seen, look)), cp=4)(params, batch)
    (got,) = seen
    assert got.tokens[-1].tolist() == [29, 7, 7]
    assert got.positions[-1].tolist() == [9, 10, 11]
    assert got.targets[-2:].tolist() == [[27, 28, 29], [IGNORED] * 3]
    assert int(got.num_targets) == 9
    assert got.real.tolist() == [[True] * 3] * 3 + [[True, False, False]]
    assert got.mask.positions.tolist() == [list(range(12))]
    keys_seen = pairs_of(got.mask)[:10].sum(0)
    assert keys_seen[10:].tolist() == [0, 0]


PAD_FAULTS: dict[str, Callable[..., Any]] = {
    # Every tensor padded with zeros: the pad positions have token 0 as their target.
    "targets": lambda pad: lambda x, size, dim, value=0: pad(x, size, dim, 0),
    # Padding in front: everything moves.
    "in front": lambda pad: lambda x, size, dim, value=0: pad(x, size, dim, value).roll(-x.shape[dim] % size, dim),
    # Tokens alone: positions and targets keep their length.
    "tokens alone": lambda pad: lambda x, size, dim, value=0: x if value == IGNORED else pad(x, size, dim, value),
}


@pytest.mark.parametrize("name", PAD_FAULTS)
def test_c11_mutant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The witness of C-11 notices padding that is wrong for some of the tensors."""
    model, params = attention_toy(pad_token_id=7)
    fault = PAD_FAULTS[name](fcp.sharded.pad_to_multiple)
    monkeypatch.setattr("fcp.transforms._shard_seq.pad_to_multiple", fault)
    error = TypeCheckError if name == "tokens alone" else AssertionError
    assert_trips(lambda: assert_same_function(model, fcp.transform(model, cp=4), params, ten("plain")), error)


@pytest.mark.parametrize("token", [-1, 64, None])
def test_c11_pad_token_of_no_row(token: int | None) -> None:
    """A config's pad token that is none of the vocabulary (-1, or one past the end) reads past the embedding."""
    model, params = attention_toy(pad_token_id=token)
    for mesh in ({"cp": 4}, {"cp": 4, "tp": 2}):
        assert_same_function(model, fcp.transform(model, **mesh), params, batch_of(tokens(1, 10)))


def test_c11_pad_token_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness notices a pad token that is taken as it is."""
    monkeypatch.setattr("fcp.transforms._shard_seq._pad_token", lambda config: config.pad_token_id)
    assert_trips(partial(test_c11_pad_token_of_no_row, 64), IndexError)


@dataclass(frozen=True)
class LearnedConfig:
    max_position_embeddings: int = 10


def learned(params: Any, inputs: fcp.Inputs, ops: fcp.Ops) -> fcp.Output:
    """Attention over learned positions, as many as the config says."""

    def look_up(p: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        return ops.embed(tokens, p["tokens"]) + torch.nn.functional.embedding(positions, p["positions"])

    x = ops.layer(look_up, params["embed"], inputs.tokens, inputs.positions)
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    x = x + ops.attention(q, q, q, inputs.mask).transpose(1, 2).flatten(2)
    total, logits = ops.layer(lambda p, x, targets: ops.loss(x, p, targets), params["head"], x, inputs.targets)
    return fcp.Output(mean_loss(total, inputs.num_targets), logits)


def learned_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    params = {"embed": {"tokens": draw(64, 8), "positions": draw(10, 8)}, "head": draw(64, 8)}
    model = fcp.Model(LearnedConfig(), learned, lambda seed=0: params, {})
    for mesh in ({"cp": 4}, {"fsdp": 2, "cp": 4}):
        assert_same_function(model, fcp.transform(model, **mesh), params, batch_of(tokens(2, 10)))


def test_c11_learned_positions() -> None:
    """Padding positions that go on past the last learned one: a full-length sequence fails only under cp."""
    learned_positions()


def test_c11_learned_positions_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness notices positions that go on without a bound."""
    monkeypatch.setattr("fcp.transforms._shard_seq._positions_in", lambda config: None)
    assert_trips(learned_positions, IndexError)


@pytest.mark.parametrize("seq", [1, 2, 3, 5])
def test_c11_ranks_that_hold_padding_alone(seq: int) -> None:
    """Sequences shorter than cp: some ranks have no real token."""
    model, params = attention_toy(windows=(3,))
    assert_same_function(model, fcp.transform(model, cp=4), params, batch_of(tokens(3, seq)))


# --- C-12 -------------------------------------------------------------------------------------------------------------

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
C12_POSITIONS = {"from the first real token": torch.tensor([[0, 0, 0, 1, 2, 3], list(range(6))]), "default": None}


def c12_batch(positions: Tensor | None, embeds: Any = None) -> dict[str, Any]:
    batch = batch_of(tokens(2, 6), attention_mask=LEFT, position_ids=positions)
    return batch if embeds is None else as_embeds(embeds, batch)


def c12_expected(model: Any, params: Any) -> Any:
    """Row 0 as an unpadded row of 4, row 1 as it is; 3 + 5 targets."""
    ids = tokens(2, 6)
    return add(
        run_outside(model, params, batch_of(ids[:1, 2:], num_items_in_batch=8)),
        run_outside(model, params, batch_of(ids[1:], num_items_in_batch=8)),
    )


@pytest.mark.parametrize("positions", C12_POSITIONS)
@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"cp": 3}, {"cp": 3, "tp": 2}, {"dp": 2, "cp": 3}], ids=mesh_name)
def test_c12_left_padding(mesh: dict[str, int], positions: str) -> None:
    """Softmax over no keys: NaN logits, then NaN gradients of the whole batch through 0 * NaN."""
    for options in ({}, {"sinks": True}, {"softcap": 3.0}, {"chunk": 4} if positions == "default" else {}):
        model, params = attention_toy(**options)
        batch = c12_batch(C12_POSITIONS[positions])
        sharded = fcp.transform(model, **mesh)
        assert bool(torch.isfinite(sharded(params, batch).logits).all())
        assert_matches(c12_expected(model, params), sharded, params, batch)


def naive(ops: fcp.Ops) -> fcp.Ops:
    """A fault: a softmax that knows no row without keys."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        allowed = materialize(mask)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
        return torch.softmax(logits, -1) @ v

    return replace(ops, attention=attention)


@pytest.mark.parametrize("cp", [2, 3])
def test_c12_mutant(cp: int) -> None:
    """The witness of C-12 notices a softmax over no keys, though those rows have no target."""
    model, params = attention_toy()
    faulty = outside(fcp.transform(model, cp=cp), ops=naive)
    batch = c12_batch(None)
    assert bool(torch.isnan(faulty(params, batch).logits[0, :2]).all())
    assert_trips(lambda: assert_matches(c12_expected(model, params), faulty, params, batch))


# --- C-13 -------------------------------------------------------------------------------------------------------------


def test_c13_pairs() -> None:
    """A window of W is W keys, the query itself included: 15 pairs, not 18, nor 21."""
    mask, packed = describe(torch.arange(6)), describe(torch.tensor(PACK8))
    assert [count_pairs(mask, window=w) for w in (1, 2, 3, 4, 6, 7, None)] == [6, 11, 15, 18, 21, 21, 21]
    assert [count_pairs(packed, window=w) for w in (1, 3, None)] == [8, 18, 21]


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_c13_window(cp: int) -> None:
    """Off by one at the left end of a window: token 2 seen by token 5, or token 3 not seen."""
    model, params = attention_toy(windows=(3,))
    batch = batch_of(tokens(1, 6))
    influence = probe(fcp.transform(model, cp=cp), params, batch)
    assert influence[5, :3].tolist() == [0.0] * 3
    assert float(influence[5, 3]) > NOTICED
    assert_influence(pairs_of(describe(torch.arange(6)), window=3), influence)


@pytest.mark.parametrize("window", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "pack8"])
def test_c13_edges(window: int, packed: bool) -> None:
    """W = 1 (the query alone), W of a row and more, on one document and on Pack8."""
    model, params = attention_toy(windows=(window,))
    batch = pack8(False) if packed else batch_of(tokens(1, 8))
    influence = probe(fcp.transform(model, cp=2), params, batch)
    distance = torch.arange(8)[:, None] - torch.arange(8)
    assert_influence((blocks(3, 5) if packed else blocks(8)) & (distance < window), influence)
    assert_same_function(model, fcp.transform(model, cp=2), params, batch)


@pytest.mark.parametrize("fault", [lambda w: w + 1, lambda w: w - 1, None], ids=["inclusive", "exclusive", "dropped"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_c13_mutant(cp: int, fault: Any) -> None:
    """The probe of C-13 notices a window that is one longer, one shorter, or gone."""
    model, params = attention_toy(windows=(3,))
    faulty = fcp.transform(inside(model, ops=attention_options(window=fault)), cp=cp)
    allowed = pairs_of(describe(torch.arange(6)), window=3)
    assert_trips(lambda: assert_influence(allowed, probe(faulty, params, batch_of(tokens(1, 6)))))


def test_c13_chunks() -> None:
    """The same kind, for chunks: their edges are fixed positions, and restart with packed documents."""
    model, params = attention_toy(chunk=4)
    sharded = fcp.transform(model, cp=2)
    assert_influence(blocks(4, 2), probe(sharded, params, batch_of(tokens(1, 6))))
    assert_influence(blocks(3, 4, 1), probe(sharded, params, pack8(False)))
    left = batch_of(tokens(1, 6), attention_mask=LEFT[:1])
    influence = probe(sharded, params, left)
    assert_influence(blocks(4), influence[2:, 2:])
    assert not bool(influence[:, :2].any()), "an embedding of padding reaches a logit"


def test_c13_chunks_mutant() -> None:
    """The probe notices chunks that count from another row (a shard's first, say)."""
    model, params = attention_toy(chunk=4)
    faulty = outside(fcp.transform(model, cp=2), lambda x: change_mask(positions=x.mask.positions + 1)(x))
    assert_trips(lambda: assert_influence(blocks(4, 2), probe(faulty, params, batch_of(tokens(1, 6)))))


# --- C-14 -------------------------------------------------------------------------------------------------------------


def pairs_seen(fn: fcp.Transformed, params: Any, batch: Any) -> list[int]:
    """The number of allowed pairs of each attention call, as it arrives below all transforms."""
    seen: list[int] = []
    look = attention_spy(lambda q, k, v, mask, **o: seen.append(count_pairs(mask, window=o["window"])))
    outside(fn, ops=look)(params, batch)
    return seen


@pytest.mark.parametrize("cp", [1, 2])
def test_c14_layers(cp: int) -> None:
    """A wrapper that loses the window of some layers: 36 pairs where 21 belong."""
    model, params = attention_toy(windows=(None, 3))
    batch = batch_of(tokens(1, 8))
    assert pairs_seen(fcp.transform(model, cp=cp), params, batch) == [36, 21]
    assert_same_function(model, fcp.transform(model, cp=cp), params, batch)
    llama, llama_params = toy(sliding_window=3, layer_types=("full_attention", "sliding_attention"))
    assert pairs_seen(fcp.transform(llama, cp=cp), llama_params, batch) == [36, 21]


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"windows": (None, 3)},
    "chunk": {"chunk": 3},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}], ids=mesh_name)
def test_c14_options(mesh: dict[str, int], option: str) -> None:
    """Each option of attention arrives through each transform."""
    model, params = attention_toy(**OPTIONS[option])
    assert_same_function(model, fcp.transform(model, **mesh), params, batch_of(tokens(2, 8)))


@pytest.mark.parametrize("option", OPTIONS)
def test_c14_mutant(option: str) -> None:
    """R-loss notices each option that a wrapper swallows; for the window, so do the pairs that are counted."""
    model, params = attention_toy(**OPTIONS[option])
    faulty = fcp.transform(inside(model, ops=attention_options(**{option: None})), cp=2)
    batch = batch_of(tokens(2, 8))
    assert_trips(lambda: assert_same_function(model, faulty, params, batch), match="loss")
    if option == "window":
        assert pairs_seen(faulty, params, batch_of(tokens(1, 8))) == [36, 36]


@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2}], ids=mesh_name)
@pytest.mark.parametrize("option", ["sliding_window", "is_causal", "dropout_p", "attn_mask"])
def test_c14_unknown_option(mesh: dict[str, int], option: str) -> None:
    """An attention argument that is not known is an error under every transform, never swallowed."""
    model, params = attention_toy()

    def add_option(ops: fcp.Ops) -> fcp.Ops:
        return replace(ops, attention=partial(ops.attention, **{option: 3}))

    sharded = fcp.transform(inside(model, ops=add_option), **mesh)
    assert_trips(lambda: sharded(params, batch_of(tokens(2, 8))), TypeError, option)


# --- C-15 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 4])
def test_c15_attention_leaves_the_shard(cp: int) -> None:
    """Each rank attends to its own tokens only, and nothing says so."""
    model, params = attention_toy()
    batch = batch_of(tokens(1, 8))
    sharded = fcp.transform(model, cp=cp)
    expected, influence = probe(model, params, batch), probe(sharded, params, batch)
    assert float(influence[7, 0]) > NOTICED
    assert_close("influence", expected, influence)
    assert_influence(blocks(8), influence)
    assert sharded.applied == ("ulysses(cp)", "shard_seq(cp)")


def own_tokens_only(ops: fcp.Ops) -> fcp.Ops:
    """A fault: the exchange is there, and its result unused; attention sees the tokens of the rank."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        ops.attention(q, k, v, mask, **options)
        return fcp.attention(q, k, v, None, **options)

    return replace(ops, attention=attention)


@pytest.mark.parametrize("cp", [2, 4])
def test_c15_mutant(cp: int) -> None:
    """The probe of C-15 notices attention that never leaves the shard."""
    model, params = attention_toy()
    faulty = fcp.transform(inside(model, ops=own_tokens_only), cp=cp)
    assert_trips(lambda: assert_influence(blocks(8), probe(faulty, params, batch_of(tokens(1, 8)))), match=r"\[7, 0\]")
    assert_trips(lambda: assert_same_function(model, faulty, params, batch_of(tokens(1, 8))), match="loss")


def test_c15_attention_that_is_not_asked_for() -> None:
    """A model that attends by itself, past the Ops, is refused, not run on slices."""
    model, params = attention_toy()

    def bypass(ops: fcp.Ops) -> fcp.Ops:
        return replace(ops, attention=lambda q, k, v, mask, **options: fcp.attention(q, k, v, None, **options))

    batch = batch_of(tokens(1, 8))
    assert_trips(
        lambda: fcp.transform(inside(model, ops=bypass), cp=2)(params, batch),
        ValueError,
        r"never called ops\.attention",
    )


def test_c15_axis_that_nothing_consumes() -> None:
    """A requested axis that does nothing is an error: by hand, and a half-applied cp as well."""
    model, params = attention_toy()
    batch = fcp.prepare(batch_of(tokens(1, 8)))
    assert_trips(lambda: fcp.simulate(model, cp=2)(params, batch), ValueError, "nothing consumed axis 'cp'")
    assert_trips(lambda: fcp.simulate(fcp.shard_seq(model), cp=2)(params, batch), ValueError, "nothing brings it")
    assert_trips(lambda: fcp.simulate(fcp.ulysses(model), cp=2)(params, batch), ValueError)

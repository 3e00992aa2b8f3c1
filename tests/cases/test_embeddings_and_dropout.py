"""Section D of the case collection: tables that two places read, vocabularies that ranks do not divide, dropout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import Replicated, Split, pytree
from fcp._regather import is_piece
from fcp.transforms import _shard_params
from models import llama
from tests.cases.toy_attention import toy as attention_toy
from tests.cases.witnesses import (
    as_embeds,
    assert_close,
    assert_refused,
    assert_same_caller_gradient,
    assert_same_function,
    assert_trips,
    inside,
    mesh_name,
    run_inside,
    run_outside,
    unchanged,
)
from tests.toys import batch_of, tokens, toy

# --- C-22 -------------------------------------------------------------------------------------------------------------

TIED_MESHES = [{"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "cp": 2}, {"tp": 2, "cp": 2}, {"fsdp": 4, "tp": 2}]


def parts_of_tied(params: Any, batch: Any) -> tuple[Any, Tensor, Tensor]:
    """The loss, and the gradient of the table as input and as output, from an untied copy."""
    untied = llama.tiny()
    copy = {**params, "lm_head": {"weight": params["model"]["embed_tokens"]["weight"].clone()}}
    out, grads = run_outside(untied, copy, batch)
    return out.loss, grads["model"]["embed_tokens"]["weight"], grads["lm_head"]["weight"]


def check_tied(mesh: dict[str, int], fault: Callable[[fcp.Ops], fcp.Ops] = unchanged) -> None:
    model, params = toy(tie_word_embeddings=True)
    batch = batch_of(tokens(4, 8))
    loss, as_input, as_output = parts_of_tied(params, batch)
    sharded = fcp.transform(inside(model, ops=fault), **mesh)
    for run in (run_outside, run_inside):
        out, grads = run(sharded, params, batch)
        assert_close("loss", loss, out.loss)
        assert_close("table", as_input + as_output, grads["model"]["embed_tokens"]["weight"])


@pytest.mark.parametrize("mesh", TIED_MESHES, ids=mesh_name)
def test_c22_tied_gradient(mesh: dict[str, int]) -> None:
    """Tied weights that come apart after sharding: the table gets only the input half of its gradient."""
    check_tied(mesh)


def test_c22_one_leaf() -> None:
    """One leaf of the pytree: an optimizer sees it once, a norm counts it once."""
    model, params = toy(tie_word_embeddings=True)
    tables = [path for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True) if x.shape[0] == 64]
    assert tables == ["model.embed_tokens.weight"]
    batch = batch_of(tokens(2, 8))
    _, as_input, as_output = parts_of_tied(params, batch)
    rest = run_outside(model, params, batch)[1]
    others = sum(float(g.square().sum()) for g in pytree.leaves(rest) if g.shape[0] != 64)
    expected = (others + float((as_input + as_output).square().sum())) ** 0.5
    for mesh in ({"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "cp": 2}):
        grads = run_inside(fcp.transform(model, **mesh), params, batch)[1]
        norm = sum(float(g.square().sum()) for g in pytree.leaves(grads)) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("mesh", TIED_MESHES, ids=mesh_name)
@pytest.mark.parametrize("half", ["input", "output"])
def test_c22_mutant(half: str, mesh: dict[str, int]) -> None:
    """The witness of C-22 notices a table of which one half of the gradient is lost."""

    def apart(ops: fcp.Ops) -> fcp.Ops:
        if half == "input":
            return replace(ops, embed=lambda ids, table: ops.embed(ids, table.detach()))
        return replace(ops, loss=lambda hidden, table, targets: ops.loss(hidden, table.detach(), targets))

    assert_trips(lambda: check_tied(mesh, apart), match="table")


# --- vocabularies -----------------------------------------------------------------------------------------------------


def vocabulary_batch(vocab: int) -> dict[str, Any]:
    """Every id is a token and a target, the last ones of each rank's slice included."""
    ids = torch.arange(2 * vocab).remainder(vocab).reshape(2, vocab)[:, : max(vocab, 4)]
    return batch_of(torch.stack([ids[0], ids[1].flip(0)]))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"tp": 4, "cp": 2}, {"tp": 4, "fsdp": 2}], ids=mesh_name)
@pytest.mark.parametrize("vocab", [61, 33, 5, 3])
def test_vocabulary_that_ranks_do_not_divide(vocab: int, mesh: dict[str, int], tied: bool) -> None:
    """Padded columns in the normaliser or the logits; at 5 and 3 tokens over tp 4 a slice that is padding alone."""
    model, params = attention_toy(vocab_size=vocab, num_key_value_heads=4, tied=tied)
    sharded = fcp.transform(model, **mesh)
    batch = vocabulary_batch(vocab)
    assert sharded(params, batch).logits.shape[-1] == vocab
    assert_same_function(model, sharded, params, batch)
    assert_same_caller_gradient(model, sharded, params, batch)


def test_vocabulary_mutant_normaliser(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-loss notices padded columns, whose logits are 0, in the sum of exponentials."""
    model, params = attention_toy(vocab_size=61)
    losses = _shard_params.token_losses
    shown = lambda logits, targets, **o: losses(torch.where(logits == -torch.inf, 0.0, logits), targets, **o)  # noqa: E731
    monkeypatch.setattr(_shard_params, "token_losses", shown)
    assert_trips(
        lambda: assert_same_function(model, fcp.transform(model, tp=2), params, vocabulary_batch(61)),
        match="loss",
    )


def test_vocabulary_mutant_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-loss notices slices that begin at the unpadded size (rank 1 of 61 tokens over 2 at 30, not at 31)."""
    model, params = attention_toy(vocab_size=61)
    losses = _shard_params.token_losses
    early = lambda logits, targets, *, first, **o: losses(logits, targets, first=first * 30 // 31, **o)  # noqa: E731
    monkeypatch.setattr(_shard_params, "token_losses", early)
    assert_trips(
        lambda: assert_same_function(model, fcp.transform(model, tp=2), params, vocabulary_batch(61)),
        match="loss",
    )


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "fsdp": 2}], ids=mesh_name)
@pytest.mark.parametrize("whole", ["embed", "head"])
def test_one_table_whole_on_every_rank(whole: str, mesh: dict[str, int]) -> None:
    """A table that the rules leave whole was read as if it were a slice: the other ranks' rows counted again."""
    model, params = attention_toy(vocab_size=61)
    model = replace(model, rules={**model.rules, f"{whole}.weight": Replicated()})
    sharded, batch = fcp.transform(model, **mesh), batch_of(tokens(2, 7, vocab=61))
    assert_same_function(model, sharded, params, batch)
    assert_same_caller_gradient(model, sharded, params, batch)


def test_tables_of_no_stated_vocabulary() -> None:
    """Rules that name no vocabulary leave open what a rank holds: refused, where the loss was off by log tp."""
    model, params = attention_toy()
    batch = batch_of(tokens(2, 8))
    for rule in (Replicated(), Split(0)):
        silent = replace(model, rules={**model.rules, "embed.weight": rule, "head.weight": rule})
        assert_trips(
            lambda silent=silent: fcp.transform(silent, tp=2)(params, batch), ValueError, "no rule names the vocabulary"
        )


def test_tables_of_another_size() -> None:
    """A table that was resized while the rules still say 64: its last columns were cut off under tp alone."""
    model, _ = attention_toy()
    _, params = attention_toy(vocab_size=68)
    assert_refused(
        lambda: fcp.transform(model, tp=2)(params, batch_of(tokens(2, 8))), "holds no vocabulary of 64 tokens"
    )


# --- input embeddings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh", [{"cp": 4}, {"tp": 2}, {"cp": 4, "tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2, "cp": 3}], ids=mesh_name
)
def test_gradient_of_input_embeddings(mesh: dict[str, int]) -> None:
    """Embeddings given in the place of tokens (soft prompts): their gradient, through padding and every mesh."""
    model, params = attention_toy(windows=(3, None))
    batch = as_embeds(params, batch_of(tokens(2, 7)))

    def loss(fn: Any, embeds: Tensor) -> Tensor:
        return fn(params, {**batch, "inputs_embeds": embeds}).loss

    sharded = fcp.transform(model, **mesh)
    expected = torch.func.grad(partial(loss, model))(batch["inputs_embeds"])
    assert_close("outside", expected, torch.func.grad(partial(loss, sharded))(batch["inputs_embeds"]))
    run = fcp.simulate(torch.func.grad(partial(loss, sharded.model_fn)), **sharded.axes)
    assert_close("inside", expected, run(batch["inputs_embeds"]))
    assert_same_function(model, sharded, params, batch)


# --- leaves of awkward shapes -----------------------------------------------------------------------------------------


def awkward(params: Any, inputs: Any, ops: fcp.Ops = fcp.LOCAL) -> fcp.Output:
    """A plain function with a tree of its own: tuples, scalars, leaves of one entry, sizes that ranks do not divide."""
    inputs = fcp.prepare(inputs)

    def layer(p: Any, x: Tensor, mask: fcp.Mask) -> Tensor:
        (bias, scale), h = p["pair"], x @ p["w"]
        q = (h + bias).unflatten(-1, (2, -1)).transpose(1, 2)
        return x + ops.attention(q, q, q, mask).transpose(1, 2).flatten(2) * scale

    x = ops.layer(lambda p, ids: ops.embed(ids, p["table"]), params["embed"], inputs.tokens)
    for p in params["layers"]:
        x = ops.layer(layer, p, x, inputs.mask)
    total, logits = ops.layer(
        lambda p, x, targets: ops.loss(x * p[1], p[0], targets), params["head"], x, inputs.targets
    )
    return fcp.Output(total / inputs.num_targets, logits)


def awkward_params() -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "embed": {"table": draw(11, 6)},
        "layers": [
            {"w": draw(6, 6), "pair": (draw(6), draw())},
            {"w": draw(6, 6), "pair": (draw(1), draw(1, 1, 1)), "steps": torch.tensor([3])},
        ],
        "head": (draw(11, 6), draw()),
    }


AWKWARD = [{"cp": 2}, {"dp": 2, "cp": 2}, {"fsdp": 2}, {"fsdp": 4}, {"fsdp": 2, "cp": 2}, {"fsdp": 4, "cp": 3}]


@pytest.mark.parametrize("mesh", AWKWARD, ids=mesh_name)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
def test_leaves_of_awkward_shapes(mesh: dict[str, int], remat: bool) -> None:
    """fsdp over leaves that ranks do not divide or outnumber; scalars, which no rank can hold a piece of; integers."""
    params, batch = awkward_params(), batch_of(tokens(4, 7, vocab=11))
    sharded = fcp.transform(awkward, remat=remat, **mesh)
    fcp.compare(awkward, sharded, params, batch).assert_close()
    assert run_inside(sharded, params, batch)[1]["layers"][1]["steps"] is None
    del params["layers"][1]["steps"]
    assert_same_function(awkward, sharded, params, batch)


def test_leaves_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-loss notices pieces whose padding is not cut off, where shapes broadcast; and scalars that miss their sum."""
    params, batch = awkward_params(), batch_of(tokens(4, 7, vocab=11))
    del params["layers"][1]["steps"]
    sharded = fcp.transform(awkward, fsdp=2)
    gathered = _shard_params._on_gathered

    def uncut(fn: Any, params: Any, *args: Any) -> Any:
        padded = pytree.map(lambda x: replace(x, size=12) if _is_table(x) else x, params, is_leaf=is_piece)
        return gathered(fn, padded, *args)

    monkeypatch.setattr(_shard_params, "_on_gathered", uncut)
    assert_trips(lambda: assert_same_function(awkward, sharded, params, batch), match="loss")
    monkeypatch.undo()
    right = fcp.sharded.pvary_each
    monkeypatch.setattr(
        fcp.sharded,
        "pvary_each",
        lambda xs, axis, **_: [right([x], axis)[0] if x.dim() else x for x in xs],
    )
    assert_trips(lambda: assert_same_function(awkward, sharded, params, batch), ValueError, "gradient of head.1")


def _is_table(x: Any) -> bool:
    return getattr(x, "size", None) == 11


# --- C-23 -------------------------------------------------------------------------------------------------------------

DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "residual_dropout",
    "ffn_dropout_rate",
    "layerdrop",
)


def with_config(model: fcp.Model, **fields: Any) -> fcp.Model:
    """The model, its config an object of these fields."""
    return replace(model, config=type("Config", (), fields)())


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}, {}], ids=mesh_name)
def test_c23_config_with_dropout(name: str, mesh: dict[str, int]) -> None:
    """Dropout whose masks depend on the rank: refused for every p above 0, whatever the config calls it."""
    model, _ = attention_toy()
    assert_refused(lambda: fcp.transform(with_config(model, **{name: 0.5}), **mesh), name)
    fcp.transform(with_config(model, **{name: 0.0}), **mesh)
    fcp.transform(with_config(model, **{name: None}), **mesh)


def test_c23_what_is_no_dropout_of_the_model() -> None:
    """Fields of classification heads, and switches, do not refuse a language model."""
    model, _ = attention_toy()
    fcp.transform(with_config(model, classifier_dropout=0.1, summary_first_dropout=0.1, drop_last=True), cp=2)


def test_c23_config_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness of C-23 notices a transform that looks for one name alone."""
    model, _ = attention_toy()
    refused = with_config(model, hidden_dropout_prob=0.5)
    monkeypatch.setattr(fcp._transform, "check_model", lambda model_fn, sizes, kernel: None)
    assert_trips(
        lambda: assert_refused(lambda: fcp.transform(refused, cp=2), "hidden_dropout_prob"), match="not refused"
    )


@dataclass(frozen=True)
class Dropping:
    """Residual dropout that the config does not tell of."""

    p: float

    def __call__(self, ops: fcp.Ops) -> fcp.Ops:
        def attention(*args: Any, **options: Any) -> Tensor:
            return torch.nn.functional.dropout(ops.attention(*args, **options), self.p)

        return replace(ops, attention=attention)


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}, {"dp": 2}, {"fsdp": 2}], ids=mesh_name)
def test_c23_dropout_inside_the_model(mesh: dict[str, int]) -> None:
    """Dropout that no config tells of: no rank draws in silence, the simulator refuses to draw at all."""
    model, params = attention_toy()
    batch = batch_of(tokens(2, 8))
    dropping = fcp.transform(inside(model, ops=Dropping(0.5)), **mesh)
    assert_trips(lambda: dropping(params, batch), RuntimeError, "random")


def draws_a_rank(mask: Callable[[Tensor], Tensor], cp: int) -> Tensor:
    """Dropout 0.5 on ones [8], over cp ranks, joined."""
    ones = torch.ones(8)
    if cp == 1:
        return mask(ones)
    return fcp.simulate(lambda x: fcp.unshard(mask(fcp.shard(x, "cp", dim=0)), "cp", dim=0), cp=cp)(ones)


def test_c23_what_would_be_right() -> None:
    """The two faults of a mask per rank, on ones of 8 at cp 2: equal shards, or a mask that changes with the mesh."""

    def of_rows(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        if x.shape[0] < 8:
            rows = rows + fcp.axis_index("cp") * x.shape[0]
        return x * ((rows * 37 + 11) % 8 < 4) * 2  # a counter keyed by the global row

    def of_rank(x: Tensor) -> Tensor:
        return x * ((torch.arange(x.shape[0]) * 37 + 11) % 8 < 4) * 2

    assert torch.equal(draws_a_rank(of_rows, 1), draws_a_rank(of_rows, 2))
    halves = draws_a_rank(of_rank, 2).reshape(2, 4)
    assert torch.equal(halves[0], halves[1])
    assert not torch.equal(draws_a_rank(of_rank, 1), draws_a_rank(of_rank, 2))

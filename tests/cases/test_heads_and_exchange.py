"""Section C of the case collection: which head goes where, what an exchange moves, what is summed for a parameter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import _across_slices, pytree
from fcp.loss import mean_loss
from fcp.transforms import _ulysses
from tests.cases.toy_attention import toy as attention_toy
from tests.cases.witnesses import (
    NOTICED,
    assert_close,
    assert_matches,
    assert_refused,
    assert_same_caller_gradient,
    assert_same_function,
    assert_same_tree,
    assert_trips,
    attention_options,
    attention_spy,
    inside,
    mesh_name,
    of_ranks,
    outside,
    run_inside,
    run_outside,
)
from tests.tolerances import EXACT
from tests.toys import PACK8, batch_of, tokens, toy


def unique(*shape: int) -> Tensor:
    """A tensor of unique integers: a constant one cannot see what moved where."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


# --- C-16 -------------------------------------------------------------------------------------------------------------


def heads_of_ranks(heads: int, kv_heads: int, cp: int, seq: int = 8) -> list[list[list[int]]]:
    """The query heads and the key heads that each rank attends with, by their numbers from 1 on (0: padding)."""
    found: list[Tensor] = []

    def look(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> None:
        found.extend(of_ranks(x[0, :, :, 0], "cp") for x in (q, k))

    def attend(params: Any, inputs: Any, ops: fcp.Ops = fcp.LOCAL) -> fcp.Output:
        def numbered(count: int) -> Tensor:
            return torch.arange(1.0, 1.0 + count)[None, :, None, None].expand(1, -1, inputs.positions.shape[1], 4)

        ops.attention(numbered(heads), numbered(kv_heads), numbered(kv_heads), inputs.mask)
        return fcp.Output(params["w"] * 0, None)

    sharded = fcp.Transformed(fcp.shard_seq(fcp.ulysses(attend)), {"cp": cp})
    outside(sharded, ops=attention_spy(look))({"w": torch.zeros(())}, batch_of(tokens(1, seq)))
    for x in found:  # [ranks, heads_local, seq]
        assert bool((x == x[..., :1]).all()), "a head that is made of two"
    return [[[int(head) for head in rank] for rank in x[..., 0].tolist()] for x in found]


def test_c16_which_rank_has_which_heads() -> None:
    """kv heads tiled in the place of interleaved: rank r has query heads 2r and 2r + 1, and kv head r // 2."""
    q, k = heads_of_ranks(8, 2, 4)
    assert q == [[2 * r + 1, 2 * r + 2] for r in range(4)]
    assert k == [[r // 2 + 1] for r in range(4)]


def check_pairing(heads: int, kv_heads: int, cp: int) -> None:
    q, k = heads_of_ranks(heads, kv_heads, cp, seq=cp)
    met = []
    for q_rank, k_rank in zip(q, k, strict=True):
        group = len(q_rank) // len(k_rank)
        assert len(q_rank) == group * len(k_rank)
        met += [(head, k_rank[i // group]) for i, head in enumerate(q_rank) if head]
    assert met == [(h + 1, h // (heads // kv_heads) + 1) for h in range(heads)]


PAIRS = [(8, 2, 4), (4, 2, 2), (4, 1, 4), (6, 2, 4), (6, 3, 4), (5, 5, 4), (9, 3, 2), (3, 1, 5), (12, 4, 8), (1, 1, 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "cp"), PAIRS)
def test_c16_every_query_head_meets_its_own(heads: int, kv_heads: int, cp: int) -> None:
    """A wrong pairing of the right shape, with repeated, padded or both kinds of heads; a head lost or seen twice."""
    check_pairing(heads, kv_heads, cp)


@pytest.mark.parametrize("seq", [8, 12, 16, 32], ids=lambda seq: f"seq_local {seq // 4}")
def test_c16_gradients(seq: int) -> None:
    """The replicas' gradients not summed; seq_local equal to a head count (2, 8) hides a mix-up of dims, 3 does not."""
    model, params = attention_toy(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    assert_same_function(model, fcp.transform(model, cp=4), params, batch_of(tokens(1, seq)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mesh"),
    [
        (4, 1, {"cp": 4}),
        (6, 2, {"cp": 4}),
        (5, 5, {"cp": 4}),
        (3, 1, {"cp": 5, "fsdp": 2}),
        (6, 2, {"cp": 4, "tp": 2}),
        (8, 4, {"cp": 3, "tp": 4}),
    ],
)
def test_c16_head_counts(heads: int, kv_heads: int, mesh: dict[str, int]) -> None:
    """Head counts that cp exceeds or does not divide, with per-head sinks, under packing."""
    model, params = attention_toy(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=4, sinks=True)
    batch = batch_of(tokens(2, 8), position_ids=torch.tensor(PACK8))
    assert_same_function(model, fcp.transform(model, **mesh), params, batch)


def tiled(plan: Any, x: Tensor) -> Tensor:
    """A fault: kv heads 0 1 0 1 where 0 0 1 1 belong."""
    return x.repeat(1, plan.copies, *[1] * (x.dim() - 2))


def backwards(plan: Any, x: Tensor) -> Tensor:
    """A fault: 1 1 0 0."""
    return x.flip(1).repeat_interleave(plan.copies, 1)


def one_replica(plan: Any, x: Tensor) -> Tensor:
    """A fault: only one copy of each kv head has a gradient."""
    copies = [x] + [x.detach()] * (plan.copies - 1)
    return torch.stack(copies, 2).flatten(1, 2)


@pytest.mark.parametrize(
    ("fault", "match"), [(tiled, "loss"), (backwards, "loss"), (one_replica, r"embed\.weight outside")]
)
def test_c16_mutant(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor], match: str) -> None:
    """The witnesses of C-16 notice a wrong pairing by its numbers, and a missing replica sum by its gradient alone."""
    model, params = attention_toy(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    monkeypatch.setattr(_ulysses.Plan, "spread_keys", fault)
    sharded, batch = fcp.transform(model, cp=4), batch_of(tokens(1, 8))
    assert_trips(lambda: assert_same_function(model, sharded, params, batch), match=match)
    if fault is one_replica:
        (out, right), (faulty, wrong) = run_outside(model, params, batch), run_outside(sharded, params, batch)
        assert_close("loss", out.loss, faulty.loss)
        assert_close("q", right["layers"][0]["q"], wrong["layers"][0]["q"])
        for name in ("k", "v"):
            assert fcp.relative_error(right["layers"][0][name], wrong["layers"][0][name]) > NOTICED
    else:
        assert_trips(partial(check_pairing, 8, 2, 4))


# --- C-17 -------------------------------------------------------------------------------------------------------------


def exchange_and_back(full: Tensor, cp: int) -> tuple[Tensor, Tensor]:
    """[ranks, batch, heads_local, seq, dim] in the middle, and what comes back, of full [batch, heads, seq, dim]."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        local = fcp.shard(x, "cp", dim=2)
        middle = _ulysses.all_to_all(local, "cp", split_dim=1, concat_dim=2)
        back = _ulysses.all_to_all(middle, "cp", split_dim=2, concat_dim=1)
        return of_ranks(middle, "cp"), fcp.unshard(back, "cp", dim=2)

    return fcp.simulate(run, cp=cp)(full)


def check_exchange(full: Tensor, cp: int) -> None:
    middle, back = exchange_and_back(full, cp)
    assert fcp.relative_error(full, back) == EXACT
    local = full.shape[1] // cp
    for rank in range(cp):
        assert torch.equal(middle[rank], full[:, rank * local : (rank + 1) * local]), f"rank {rank}"


EXCHANGES = [(2, 4, 8, 2), (3, 4, 8, 2), (3, 4, 16, 4), (1, 4, 8, 2), (2, 6, 9, 3)]


@pytest.mark.parametrize(("batch", "heads", "seq", "cp"), EXCHANGES)
def test_c17_exchange(batch: int, heads: int, seq: int, cp: int) -> None:
    """Correct at batch 1, scrambled at batch 2: unique integers, also where seq_local 4 equals the 4 heads."""
    check_exchange(unique(batch, heads, seq, 3), cp)


def batch_in_between(x: Tensor, axis: Any, *, split_dim: int, concat_dim: int) -> Tensor:
    """A fault: the buffer is read with the batch between the dims that are split and gathered."""
    y = fcp.all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)
    return y.transpose(0, 1).reshape(y.shape)


def other_order(x: Tensor, axis: Any, *, split_dim: int, concat_dim: int) -> Tensor:
    """A fault: what arrives is concatenated by receiver and not by sender."""
    y = fcp.all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)
    return y.flip(concat_dim)


@pytest.mark.parametrize("fault", [batch_in_between, other_order])
def test_c17_mutant(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Unique integers notice a scrambled exchange, and so does R-loss at batch 2; constants and batch 1 need not."""
    monkeypatch.setattr(_ulysses, "all_to_all", fault)
    assert_trips(lambda: check_exchange(unique(2, 4, 8, 3), 2))
    check_exchange(torch.ones(2, 4, 8, 3), 2)  # blind
    model, params = attention_toy()
    assert_trips(lambda: assert_same_function(model, fcp.transform(model, cp=2), params, batch_of(tokens(2, 8))))
    if fault is batch_in_between:
        check_exchange(unique(1, 4, 8, 3), 2)  # blind
        assert_same_function(model, fcp.transform(model, cp=2), params, batch_of(tokens(1, 8)))


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 4, "tp": 2}, {"cp": 2, "fsdp": 1}], ids=mesh_name)
def test_c17_model(batch: int, mesh: dict[str, int]) -> None:
    """The whole function at batch 2 and 3 with documents that differ between the rows."""
    model, params = attention_toy(windows=(None, 3), sinks=True)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(8 - n)]) for n in range(3, 3 + batch)])
    assert_same_function(
        model, fcp.transform(model, **mesh), params, batch_of(tokens(batch, 8), position_ids=positions)
    )


# --- C-18 -------------------------------------------------------------------------------------------------------------

C18_MESHES = [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2, "cp": 2}, {"cp": 3, "tp": 4}]


@pytest.mark.parametrize("mesh", C18_MESHES, ids=mesh_name)
def test_c18_loss_on_gathered_logits(mesh: dict[str, int]) -> None:
    """A gather whose backward drops or mis-scales gradients: a loss on gathered logits, and the loss per shard."""
    model, params = attention_toy(vocab_size=61, num_key_value_heads=4)
    batch = batch_of(tokens(2, 7, vocab=61))
    sharded = fcp.transform(model, **mesh)
    assert_same_caller_gradient(model, sharded, params, batch)
    assert_same_function(model, sharded, params, batch)


def gather_faults(size: int) -> dict[str, Callable[..., Tensor]]:
    return {
        "without autograd": lambda x, axis, *, dim: fcp.unshard(x.detach(), axis, dim=dim),
        "of partials": lambda x, axis, *, dim: fcp.all_gather(x, axis, dim=dim),
        "of a mean": lambda x, axis, *, dim: (y := fcp.unshard(x, axis, dim=dim)) / size + (y - y / size).detach(),
    }


@pytest.mark.parametrize("name", gather_faults(2))
@pytest.mark.parametrize("where", ["fcp.transforms._shard_seq.unshard", "fcp.transforms._shard_params.unshard"])
def test_c18_mutant(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    """R-grad by the caller's loss notices each; the model's own loss, which uses no gather, cannot."""
    model, params = attention_toy()
    batch = batch_of(tokens(2, 8))
    monkeypatch.setattr(where, gather_faults(2)[name])
    sharded = fcp.transform(model, **({"cp": 2} if "seq" in where else {"tp": 2}))
    assert_same_function(model, sharded, params, batch)
    assert_trips(lambda: assert_same_caller_gradient(model, sharded, params, batch))


@dataclass(frozen=True)
class Meaning:
    """What a collective means on stacked rank tensors, and whether its incoming gradient is a copy or partial."""

    call: Callable[[Tensor], Tensor]
    dense: Callable[[Tensor], Tensor]
    gradient: str


MEANINGS = {
    "unshard": Meaning(lambda x: fcp.unshard(x, "cp", dim=0), lambda x: x.flatten(0, 1), "copy"),
    "psum": Meaning(lambda x: fcp.psum(x, "cp"), lambda x: x.sum(0), "copy"),
    "all_gather": Meaning(lambda x: fcp.all_gather(x, "cp", dim=0), lambda x: x.flatten(0, 1).expand(3, -1), "partial"),
    "psum_scatter": Meaning(lambda x: fcp.psum_scatter(x, "cp", dim=0), lambda x: x.sum(0).reshape(3, -1), "partial"),
    "all_to_all": Meaning(
        lambda x: fcp.all_to_all(x.reshape(3, 2), "cp", split_dim=0, concat_dim=1).flatten(),
        lambda x: x.reshape(3, 3, 2).transpose(0, 1).flatten(1),
        "partial",
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_c18_each_collective(name: str) -> None:
    """Per collective: the gradient of a loss over its result is the same on the map and on stacked tensors."""
    meaning, x = MEANINGS[name], unique(3, 6)
    result = meaning.dense(x)
    weights = torch.sin(unique(*result.shape))

    def loss(stacked: Tensor) -> Tensor:
        y = meaning.call(fcp.shard(stacked, "cp", dim=0)[0])
        if meaning.gradient == "copy":
            return (y * weights).sum()
        mine = fcp.own_slice(weights, "cp", dim=0)[0]
        return fcp.psum((y * mine).sum(), "cp")

    expected = torch.func.grad(lambda x: (meaning.dense(x) * weights).sum())(x)
    assert_close("outside", expected, torch.func.grad(fcp.simulate(loss, cp=3))(x))
    assert_close("inside", expected, fcp.simulate(torch.func.grad(loss), cp=3)(x))


# --- C-19 -------------------------------------------------------------------------------------------------------------


def sinks_of_ranks(mesh: dict[str, int], **fields: Any) -> list[list[Any]]:
    """The sinks that each rank attends with, where head h has sink h."""
    model, params = attention_toy(sinks=True, **fields)
    found: list[Tensor] = []

    def look(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, sinks: Tensor, **options: Any) -> None:
        for axis in reversed(mesh):  # inner axes first
            sinks = of_ranks(sinks, axis)
        found.append(sinks)

    heads = model.config.num_attention_heads
    params["layers"][0]["sinks"] = torch.arange(heads, dtype=torch.float64)
    outside(fcp.transform(model, **mesh), ops=attention_spy(look))(params, batch_of(tokens(2, 8)))
    return found[0].tolist()


def test_c19_which_rank_has_which_sinks() -> None:
    """The full vector used with local heads: rank 1 of cp 2 has sinks [2, 3]; with tp 2, one a rank, tp outermost."""
    assert sinks_of_ranks({"cp": 2}) == [[0, 1], [2, 3]]
    by_cp_then_tp = sinks_of_ranks({"cp": 2, "tp": 2})
    assert by_cp_then_tp == [[[0], [2]], [[1], [3]]]
    # 6 heads in groups of 3, cp 4: two copies of each kv head, the second with one padded head.
    assert sinks_of_ranks({"cp": 4}, num_attention_heads=6) == [[0, 1], [2, 0], [3, 4], [5, 0]]


C19_MESHES = [{"cp": 2}, {"cp": 2, "tp": 2}, {"tp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2, "cp": 2}, {"cp": 3}]


def sink_model(values: list[float], **fields: Any) -> tuple[Any, Any]:
    model, params = attention_toy(sinks=True, **fields)
    params["layers"][0]["sinks"] = torch.tensor(values, dtype=torch.float64)
    return model, params


@pytest.mark.parametrize("mesh", C19_MESHES, ids=mesh_name)
def test_c19_sinks(mesh: dict[str, int]) -> None:
    """Sinks that never learn, or learn a number of ranks too fast: R-grad under the same SUM as every parameter."""
    model, params = sink_model([0.0, 1.0, 2.0, 3.0])
    batch = batch_of(tokens(2, 8), position_ids=torch.tensor(PACK8))
    assert float(run_outside(model, params, batch)[1]["layers"][0]["sinks"].abs().min()) > NOTICED
    assert_same_function(model, fcp.transform(model, **mesh), params, batch)


@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"cp": 2, "tp": 2}], ids=mesh_name)
def test_c19_limits(mesh: dict[str, int]) -> None:
    """A sink of -inf is no sink, in gradients too; a large one takes all the weight, and the output goes to zero."""
    model, params = sink_model([-torch.inf] * 4)
    plain, _ = attention_toy()
    batch = batch_of(tokens(2, 8), attention_mask=torch.tensor([[0] * 3 + [1] * 5, [1] * 8]))
    out, grads = run_outside(plain, params, batch)  # the plain model leaves the sinks unread: their gradient is zero
    assert_matches((out, grads), fcp.transform(model, **mesh), params, batch)
    sizes: list[float] = []

    def look(ops: fcp.Ops) -> fcp.Ops:
        def attention(*args: Any, **options: Any) -> Tensor:
            attended = ops.attention(*args, **options)
            sizes.append(float(attended.abs().max()))
            return attended

        return replace(ops, attention=attention)

    for value in (-torch.inf, 10.0, 40.0, 800.0):
        outside(fcp.transform(model), ops=look)(sink_model([value] * 4)[1], batch)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0.0


def sliced_from_the_front(x: Tensor, axis: Any, *, dim: int) -> Tensor:
    """A fault: the full vector cut to the local number of heads, the same on every rank."""
    return x[: x.shape[0] // fcp.axis_size(axis)]


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=mesh_name)
@pytest.mark.parametrize("fault", ["swallowed", "unsliced", "reduced twice"])
def test_c19_mutant(monkeypatch: pytest.MonkeyPatch, fault: str, mesh: dict[str, int]) -> None:
    """The witness of C-19 notices sinks that are swallowed, not sliced, or whose complete gradient is reduced again."""
    model, params = sink_model([0.0, 1.0, 2.0, 3.0])
    batch = batch_of(tokens(2, 8))
    faulty: Any = model
    if fault == "swallowed":
        faulty = inside(model, ops=attention_options(sinks=None))
    else:
        wrong = {"unsliced": sliced_from_the_front, "reduced twice": fcp.shard}[fault]
        monkeypatch.setattr(_ulysses, "own_slice", wrong)
    match = r"layers\.0\.sinks inside" if fault == "reduced twice" else "loss"
    assert_trips(lambda: assert_same_function(model, fcp.transform(faulty, **mesh), params, batch), match=match)


# --- C-20 -------------------------------------------------------------------------------------------------------------

C20_MESHES = [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "fsdp": 2}]
C20_MODELS: dict[str, dict[str, Any]] = {
    "norm of each head": {"qk_norm": True},
    "rotary key of all heads": {"rotary_key": 4},
    "fused projection": {"fused": True},
    "scalars": {"scalars": True},
}
SHARED = {"norm of each head": "q_norm", "rotary key of all heads": "rotary_key", "scalars": "gain"}


@pytest.mark.parametrize("mesh", C20_MESHES, ids=mesh_name)
@pytest.mark.parametrize("name", C20_MODELS)
def test_c20_shared_parameters(name: str, mesh: dict[str, int]) -> None:
    """A parameter that every rank holds whole and split work reads: forward exact, its gradient partial."""
    model, params = attention_toy(**C20_MODELS[name])
    batch = batch_of(tokens(2, 8))
    sharded = fcp.transform(model, **mesh)
    assert_same_function(model, sharded, params, batch)
    # One optimizer step inside the map: what comes out is the same on every rank, or the simulator refuses it.
    step = fcp.simulate(partial(sgd, sharded.model_fn), **sharded.axes)(params, fcp.prepare(batch))
    assert_same_tree(sgd(model, params, batch), step, "after one step")


def sgd(fn: Any, params: Any, batch: Any) -> Any:
    grads = torch.func.grad(lambda p: fn(p, batch).loss)(params)
    return pytree.map(lambda x, g: x - 0.1 * g, params, grads)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=mesh_name)
def test_c20_qwen3(mesh: dict[str, int]) -> None:
    """The same on the family that has such a norm."""
    model, params = toy(model_type="qwen3")
    assert_same_function(model, fcp.transform(model, **mesh), params, batch_of(tokens(2, 8)))


@pytest.mark.parametrize("mesh", C20_MESHES, ids=mesh_name)
def test_c20_copies_of_each_head(mesh: dict[str, int]) -> None:
    """The reference from another side: a norm of its own for each head; the shared one's gradient is their sum."""
    model, params = attention_toy(qk_norm=True)
    apart = pytree.map(lambda x: x, params)
    for name, heads in (("q_norm", 4), ("k_norm", 2)):
        apart["layers"][0][name] = params["layers"][0][name].expand(heads, 1, 8).clone()
    batch = batch_of(tokens(2, 8))
    copies = run_outside(model, apart, batch)[1]["layers"][0]
    for run in (run_outside, run_inside):
        shared = run(fcp.transform(model, **mesh), params, batch)[1]["layers"][0]
        for name in ("q_norm", "k_norm"):
            assert_close(name, copies[name].sum((0, 1)), shared[name])


@pytest.mark.parametrize("name", SHARED)
def test_c20_mutant(name: str) -> None:
    """Under tp without its sum: exact forward and outside the map; inside, as on processes, copies drift: it raises."""
    model, params = attention_toy(**C20_MODELS[name])
    batch = batch_of(tokens(2, 8))
    leaf = f"layers.*.{SHARED[name]}"
    faulty = fcp.transform(replace(model, rules={**model.rules, leaf: fcp.Replicated()}), tp=2)
    assert_close("loss", model(params, batch).loss, faulty(params, batch).loss)
    assert_trips(lambda: assert_same_function(model, faulty, params, batch), ValueError, SHARED[name])
    step = fcp.simulate(partial(sgd, faulty.model_fn), tp=2)
    assert_trips(lambda: step(params, fcp.prepare(batch)), ValueError, rf"{SHARED[name]}.*still varies over axis 'tp'")


@pytest.mark.parametrize("name", SHARED)
def test_c20_mutant_summed_twice(name: str) -> None:
    """The opposite fault: a parameter of whole work marked as shared, so that its copies are summed."""
    model, params = attention_toy(**C20_MODELS[name])
    faulty = fcp.transform(replace(model, rules={**model.rules, "layers.*.norm": fcp.Shared()}), tp=2)
    assert_trips(
        lambda: assert_same_function(model, faulty, params, batch_of(tokens(2, 8))), match=r"layers\.0\.norm inside"
    )


def test_c20_mutant_enter() -> None:
    """The same kind on activations: split work that begins without `enter` leaves the gradient before it partial."""
    model, params = attention_toy()
    faulty = inside(model, ops=lambda ops: replace(ops, enter=lambda x: x))
    batch = batch_of(tokens(2, 8))
    assert_trips(
        lambda: assert_same_function(model, fcp.transform(faulty, tp=2), params, batch),
        ValueError,
        "a gradient differs",
    )


def test_c20_mutant_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused matrix cut as one, so that ranks get queries alone: its loss differs or its shapes do not fit."""
    model, params = attention_toy(fused=True, num_key_value_heads=4)
    leaf = "layers.*.qkv"
    faulty = replace(model, rules={**model.rules, leaf: replace(model.rules[leaf], pieces=None)})
    batch = batch_of(tokens(2, 8))
    assert_same_function(model, fcp.transform(model, tp=2), params, batch)
    assert_trips(lambda: assert_same_function(model, fcp.transform(faulty, tp=2), params, batch), match="loss")


# --- storage that splits no work --------------------------------------------------------------------------------------

STORED = {
    "fsdp": (lambda fn: fcp.shard_params(fn, axis="fsdp"), {"fsdp": 2}),
    "fsdp of rows and columns": (
        lambda fn: fcp.shard_params(fcp.shard_seq(fcp.ulysses(fn)), axis=("fsdp", "cp")),
        {"fsdp": 2, "cp": 2},
    ),
    "names in the other order": (
        lambda fn: fcp.shard_params(fcp.ulysses(fcp.shard_seq(fn)), axis=("cp", "fsdp")),
        {"fsdp": 2, "cp": 2},
    ),
    "cp alone": (lambda fn: fcp.shard_params(fcp.shard_seq(fcp.ulysses(fn)), axis="cp", how="gather"), {"cp": 2}),
    "with tp": (lambda fn: fcp.shard_params(fcp.shard_params(fn, axis="fsdp"), axis="tp"), {"fsdp": 4, "tp": 2}),
}


@pytest.mark.parametrize("name", STORED)
def test_storage_without_split_work(name: str) -> None:
    """Parameters stored over an axis whose ranks see the same rows: their equal gradients were summed, once a rank."""
    model, params = attention_toy(sinks=True, scalars=True)
    compose, axes = STORED[name]
    assert_same_function(model, fcp.Transformed(compose(model), axes), params, batch_of(tokens(2, 8)))


def test_storage_without_split_work_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness notices a gather whose adjoint sums copies."""
    model, params = attention_toy()

    def summed(x: Any) -> Any:
        return fcp.all_gather(x.value, x.axes, dim=0)[: x.size]

    monkeypatch.setattr("fcp.transforms._shard_params._gather", summed)
    faulty = fcp.Transformed(fcp.shard_params(model, axis="fsdp"), {"fsdp": 2})
    assert_trips(lambda: assert_same_function(model, faulty, params, batch_of(tokens(2, 8))), match="inside")


# --- the mesh sweep: witness 6 ----------------------------------------------------------------------------------------

SWEEP = [
    {"cp": 2},
    {"cp": 4},
    {"cp": 3, "tp": 2},
    {"fsdp": 2, "cp": 3},
    {"dp": 2, "cp": 2},
    {"dp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
    {"fsdp": 4},
    {"dp": 2, "fsdp": 2, "cp": 2, "tp": 2},
]


@pytest.mark.parametrize("mesh", SWEEP, ids=mesh_name)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
def test_sweep(mesh: dict[str, int], remat: bool) -> None:
    """Everything at once: unaligned documents, uneven targets, odd vocabulary, tied tables, scalars, sinks, windows."""
    model, params = attention_toy(
        windows=(None, 3), vocab_size=61, tied=True, sinks=True, scalars=True, qk_norm=True, fused=True
    )
    rows = 4 if mesh.get("fsdp", 1) * mesh.get("dp", 1) > 2 else 2
    ids = tokens(rows, 11, vocab=61)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(11 - n)]) for n in (3, 7, 1, 10)[:rows]])
    labels = torch.where(torch.arange(11) < torch.tensor([[4], [11], [2], [9]])[:rows], ids, fcp.IGNORED)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    sharded = fcp.transform(model, remat=remat, **mesh)
    assert_same_function(model, sharded, params, batch)
    if not remat:
        assert_same_caller_gradient(model, sharded, params, batch)


# --- C-21 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecurrentConfig:
    layer_types: tuple[str, ...] = ()


def scan(x: Tensor, documents: Tensor | None) -> Tensor:
    """h = 0.5 h + x along dim 1 of [batch, seq, width]; the state restarts with each document."""
    h, found = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        if documents is not None and i:
            h = torch.where((documents[:, i] == documents[:, i - 1])[:, None], h, 0.0)
        h = 0.5 * h + x[:, i]
        found.append(h)
    return torch.stack(found, 1)


def causal_convolution(x: Tensor, documents: Tensor | None) -> Tensor:
    """The sum of the last 4 tokens along dim 1."""
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    return sum(padded[:, i : i + x.shape[1]] for i in range(4))  # type: ignore[return-value]


def recurrent(mix: Callable[..., Tensor], params: Any, inputs: fcp.Inputs, ops: fcp.Ops, attend: bool = False) -> Any:
    """A language model whose only layer carries a state along the sequence, before attention or without any."""
    x = ops.layer(lambda p, ids: ops.embed(ids, p), params["embed"], inputs.tokens)
    seq = x.shape[1]
    documents = inputs.mask.documents
    x = mix(x, documents if documents is not None and documents.shape[1] == seq else None)
    if attend:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        x = x + ops.attention(q, q, q, inputs.mask).transpose(1, 2).flatten(2)
    total, logits = ops.layer(lambda p, x, targets: ops.loss(x, p, targets), params["head"], x, inputs.targets)
    return fcp.Output(mean_loss(total, inputs.num_targets), logits)


def recurrent_model(mix: Callable[..., Tensor] = scan, *, attend: bool = False, kinds: tuple[str, ...] = ()) -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    params = {"embed": draw(64, 8), "head": draw(64, 8)}
    apply = partial(recurrent, mix, attend=attend)
    return fcp.Model(RecurrentConfig(kinds), apply, lambda seed=0: params, {}), params


def states(mix: Callable[..., Tensor], cp: int, x: Tensor, positions: list[int] | None = None) -> list[float]:
    """What a layer yields over cp ranks when nothing hands the state on."""
    documents = None if positions is None else fcp.masks.describe(torch.tensor([positions])).documents

    def run(x: Tensor) -> Tensor:
        return fcp.unshard(mix(fcp.shard(x, "cp", dim=1), documents), "cp", dim=1)

    return (mix(x, documents) if cp == 1 else fcp.simulate(run, cp=cp)(x)).flatten().tolist()


def test_c21_what_slices_alone_would_yield() -> None:
    """The numbers of the case: the right state on rank 1, the one that restarts, and the one that ignores documents."""
    ones = torch.ones(1, 8, 1, dtype=torch.float64)
    right = states(scan, 1, ones)
    assert right[4:] == [1.9375, 1.96875, 1.984375, 1.9921875]
    assert states(scan, 2, ones)[4:] == [1.0, 1.5, 1.75, 1.875]
    assert states(scan, 1, ones, PACK8) == [1.0, 1.5, 1.75, 1.0, 1.5, 1.75, 1.875, 1.9375]
    numbers = unique(1, 8, 1)
    assert states(causal_convolution, 1, numbers)[4] == 2 + 3 + 4 + 5
    assert states(causal_convolution, 2, numbers)[4] == 5  # it should see the three tokens before its slice


@pytest.mark.parametrize("mix", [scan, causal_convolution])
def test_c21_refused_under_cp(mix: Callable[..., Tensor]) -> None:
    """A state that restarts on each shard: refused under cp, since such a model never calls ops.attention."""
    model, params = recurrent_model(mix)
    batch = batch_of(tokens(2, 8))
    for mesh in ({"cp": 2}, {"fsdp": 2, "cp": 2}, {"dp": 2, "cp": 2}):
        assert_trips(
            lambda mesh=mesh: fcp.transform(model, **mesh)(params, batch), ValueError, r"never called ops\.attention"
        )


KINDS = ["linear_attention", "recurrent", "mamba", "conv", "hybrid"]


@pytest.mark.parametrize("kind", KINDS)
def test_c21_refused_by_kind(kind: str) -> None:
    """A model that mixes attention with layers that carry a state is refused by the kinds its config names."""
    model, _ = recurrent_model(attend=True, kinds=("full_attention", kind))
    assert_refused(lambda: fcp.transform(model, cp=2), kind)
    for mesh in ({"dp": 2}, {"fsdp": 2}):
        fcp.transform(model, **mesh)
    fcp.transform(recurrent_model(kinds=("full_attention", "sliding_attention", "chunked_attention"))[0], cp=2)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"fsdp": 2}, {"dp": 2, "fsdp": 2}], ids=mesh_name)
def test_c21_other_axes_are_fine(mesh: dict[str, int]) -> None:
    """Axes that leave the sequence whole do nothing to a state, document resets included."""
    model, params = recurrent_model(attend=True, kinds=("recurrent",))
    batch = batch_of(tokens(4, 8), position_ids=torch.tensor(PACK8))
    assert_same_function(model, fcp.transform(model, **mesh), params, batch)


@pytest.mark.parametrize("mix", [scan, causal_convolution])
def test_c21_mutant(mix: Callable[..., Tensor]) -> None:
    """What no name and no missing call gives away (a state beside attention), R-loss does."""
    model, params = recurrent_model(mix, attend=True)
    faulty = fcp.transform(model, cp=2)
    assert_trips(lambda: assert_same_function(model, faulty, params, batch_of(tokens(2, 8))), match="loss")


def test_c21_kind_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness of the kinds notices a plan that does not read them."""
    monkeypatch.setattr(_across_slices, "_layer_kinds", lambda model: [])
    assert_trips(partial(test_c21_refused_by_kind, "mamba"), match="not refused")

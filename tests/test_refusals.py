"""Every refusal, in one table: what was asked, and the words that say why and what to do instead.

What cannot be done right is refused before a tensor moves, always with a ValueError; nothing is ignored.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fcp
from tests.toys import PACK8, batch_of, tokens, toy

MODEL, PARAMS = toy()
IDS = tokens(2, 8)
BATCH = batch_of(IDS)
UNCHECKED = inspect.unwrap(fcp.transform)  # as a user calls it, without the suite's own type checks


def plain(params: Any, inputs: fcp.Inputs, ops: fcp.Ops = fcp.LOCAL) -> fcp.Output:
    """A plain model function: no rules, no ops.layer, no attention."""
    x = torch.nn.functional.embedding(inputs.tokens, params["table"])
    total, logits = ops.loss(x, params["table"], inputs.targets)
    return fcp.Output(total / inputs.num_targets, logits)


TABLE = {"table": torch.randn(64, 8, dtype=torch.float64)}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """What is asked of a DeviceMesh before any process is needed."""

    mesh_dim_names: Any
    sizes: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.sizes[dim]


@dataclasses.dataclass(frozen=True)
class WithDropout:
    attention_dropout: float = 0.1


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # the sizes
    "cp=0": (lambda: fcp.transform(MODEL, cp=0), "cp=0 must be a number of ranks"),
    "tp=-1": (lambda: fcp.transform(MODEL, tp=-1), "tp=-1 must be"),
    "cp=2.0": (lambda: UNCHECKED(MODEL, cp=2.0), "cp=2.0 must be"),
    "cp=True": (lambda: fcp.transform(MODEL, cp=True), "cp=True must be"),
    "tp=4 of 2 kv heads": (lambda: fcp.transform(MODEL, tp=4), "tp=4 does not divide 2 blocks"),
    "tp=3 of width 48, 4 heads": (lambda: fcp.transform(MODEL, tp=3), "tp=3 does not divide 4 blocks"),
    "dp=2 of 3 rows": (
        lambda: fcp.transform(MODEL, dp=2)(PARAMS, batch_of(tokens(3, 8))),
        "dp=2 does not divide a batch of 3 rows",
    ),
    "fsdp=2 of 1 row": (
        lambda: fcp.transform(MODEL, fsdp=2)(PARAMS, batch_of(tokens(1, 8))),
        "fsdp=2 does not divide a batch of 1 rows",
    ),
    # the model
    "no function": (lambda: UNCHECKED("llama", cp=2), "no model function"),
    "transformed twice": (lambda: fcp.transform(fcp.transform(MODEL, cp=2), tp=2), "transformed already"),
    "tp without rules": (lambda: fcp.transform(plain, tp=2), "needs rules"),
    "by hand, tp without rules": (lambda: fcp.shard_params(plain, axis="tp"), "has no rules"),
    "dropout": (
        lambda: fcp.transform(dataclasses.replace(MODEL, config=WithDropout()), cp=2),
        "attention_dropout': 0.1.*Set it to 0",
    ),
    "no attention under cp": (lambda: fcp.transform(plain, cp=2)(TABLE, BATCH), "never called ops.attention"),
    "no layer under fsdp": (lambda: fcp.transform(plain, fsdp=2)(TABLE, BATCH), "reads it outside of ops.layer"),
    "split sequence, nothing joins it": (
        lambda: fcp.simulate(fcp.shard_seq(MODEL, axis="cp"), cp=2)(PARAMS, BATCH),
        "Compose shard_seq with fcp.ulysses",
    ),
    # the ways to attend across slices
    "an unknown cp_impl": (
        lambda: fcp.transform(MODEL, cp=2, cp_impl="rings"),
        "no cp_impl 'rings'; registered are auto",
    ),
    "a cp_impl without cp": (lambda: fcp.transform(MODEL, tp=2, cp_impl="ring"), "cp_impl='ring', and no cp"),
    "a layout without cp": (lambda: UNCHECKED(MODEL, layout="zigzag"), "layout='zigzag', and no cp"),
    "an unknown layout": (
        lambda: UNCHECKED(MODEL, cp=2, cp_impl="ring", layout="striped"),
        "layout='striped'; it is one of contiguous, zigzag, balanced",
    ),
    "by hand, an unknown layout": (
        lambda: inspect.unwrap(fcp.shard_seq)(MODEL, axis="cp", layout="striped"),
        "shard_seq: layout='striped'",
    ),
    "an order under Ulysses": (
        lambda: fcp.transform(MODEL, cp=2, layout="zigzag"),
        "under cp_impl='ulysses' every rank has all of them",
    ),
    "Ulysses within Ulysses": (
        lambda: fcp.transform(MODEL, cp=(2, 2), cp_impl="ulysses"),
        "Ulysses within and another way across",
    ),
    "three ways": (lambda: UNCHECKED(MODEL, cp=(2, 2, 2)), r"cp=\(2, 2, 2\) must be a number of ranks"),
    "a ring of 0": (lambda: fcp.transform(MODEL, cp=(2, 0)), "cp_ring=0 must be a number of ranks"),
    "a ring within Ulysses": (
        lambda: fcp.simulate(
            fcp.ulysses(fcp.ring(fcp.shard_seq(MODEL, axis=("a", "b")), axis="a"), axis="b"), a=2, b=2
        )(PARAMS, BATCH),
        "another transform replaced it. Apply ring over axis 'a' after",
    ),
    "a ring without slices": (
        lambda: fcp.simulate(fcp.ring(MODEL, axis="cp"), cp=2)(PARAMS, BATCH),
        "each rank has one slice of the sequence. Compose it with shard_seq",
    ),
    "a gather without slices": (
        lambda: fcp.simulate(fcp.gather(MODEL, axis="cp"), cp=2)(PARAMS, BATCH),
        "each rank has one slice of the sequence. Compose it with shard_seq",
    ),
    "no attention under a ring": (
        lambda: fcp.transform(plain, cp=2, cp_impl="ring")(TABLE, BATCH),
        "ring: the model never called ops.attention",
    ),
    # the rules
    "a misspelt rule": (
        lambda: _with_rules({**MODEL.rules, "model.layers.*.self_attn.qproj.weight": fcp.Split(0)}),
        "qproj.weight matches no parameter",
    ),
    "a leaf without a rule": (
        lambda: _with_rules({k: v for k, v in MODEL.rules.items() if "q_proj" not in k}),
        "q_proj.weight matches no rule",
    ),
    "a leaf with two rules": (
        lambda: _with_rules({**MODEL.rules, "*.q_proj.weight": fcp.Split(0)}),
        r"q_proj.weight matches .* and ",
    ),
    "a dim that is not there": (
        lambda: _with_rules({**MODEL.rules, "model.norm.weight": fcp.Split(1)}),
        r"model.norm.weight of shape \(32,\) has no dim 1",
    ),
    "pieces that do not add up": (
        lambda: _with_rules({**MODEL.rules, "model.norm.weight": fcp.Split(0, pieces=(8, 8))}),
        r"pieces \(8, 8\) do not add up to 32",
    ),
    "rules over two axes": (lambda: fcp.shard_params(MODEL, axis=("tp", "cp")), "rules split over one axis"),
    "stored twice": (
        lambda: fcp.simulate(fcp.shard_params(fcp.shard_params(MODEL, axis="fsdp"), axis="fsdp"), fsdp=2)(
            PARAMS, BATCH
        ),
        "stored over .* already",
    ),
    "another way": (lambda: inspect.unwrap(fcp.shard_params)(MODEL, axis="tp", how="columns"), "'rules' or 'gather'"),
    # the axes
    "an axis that nothing consumes": (
        lambda: fcp.simulate(MODEL, cp=2)(PARAMS, BATCH),
        "nothing consumed axis 'cp'",
    ),
    "an axis bound twice": (
        lambda: fcp.simulate(lambda p, b: fcp.transform(MODEL, cp=2)(p, b), cp=2)(PARAMS, BATCH),
        "'cp' is bound already",
    ),
    # the mesh
    "a mesh without names": (lambda: fcp.distribute(MODEL, Mesh(None, ())), "has no mesh_dim_names"),
    "a mesh of another size": (
        lambda: fcp.transform(MODEL, cp=4, mesh=Mesh(("cp",), (2,))),
        r"the mesh has the dimensions \{'cp': 2\}, and \{'cp': 4\} is asked for",
    ),
    "a mesh with one axis too many": (
        lambda: fcp.transform(MODEL, cp=2, mesh=Mesh(("cp", "tp"), (2, 2))),
        r"\{'cp': 2, 'tp': 1\} is asked for",
    ),
    "rows of its own, simulated": (
        lambda: fcp.transform(MODEL, dp=2, rows="own"),
        "one process is handed every rank's",
    ),
    "rows of its own, and none split": (
        lambda: fcp.transform(MODEL, cp=2, rows="own", mesh=Mesh(("cp",), (2,))),
        "rows='own' and no dp or fsdp",
    ),
    "rows of another kind": (lambda: UNCHECKED(MODEL, dp=2, rows="mine"), "rows='mine'; it is 'all' or 'own'"),
    "sums of integers": (lambda: fcp.transform(MODEL, dp=2, reduce_dtype=torch.int64), "summed in a floating dtype"),
    "shard_batch, rows of another kind": (
        lambda: inspect.unwrap(fcp.shard_batch)(MODEL, axis="dp", rows="mine"),
        "rows='mine'; it is",
    ),
    "shards of a plain function": (
        lambda: fcp.transform(plain, fsdp=2, mesh=Mesh(("fsdp",), (2,))).on_shards(TABLE, BATCH),
        "shards do not say how large",
    ),
    "DTensors in the simulator": (lambda: fcp.transform(MODEL, cp=2).to_dtensor(PARAMS), "no process holds a shard"),
    "shards of DTensors in the simulator": (
        lambda: fcp.transform(MODEL, cp=2).from_dtensor(PARAMS),
        "give transform a",
    ),
    "a mesh of other names": (lambda: fcp.transform(MODEL, cp=2, mesh=Mesh(("sp",), (2,))), "'sp': 2"),
    # the batch
    "4-D mask": (
        lambda: fcp.prepare({**BATCH, "attention_mask": torch.ones(2, 1, 8, 8)}),
        "position_ids or document_ids .* window or chunk",
    ),
    "unknown key": (lambda: fcp.prepare({**BATCH, "token_type_ids": IDS}), "batch has 'token_type_ids'"),
    "labels of another length": (lambda: fcp.prepare({"input_ids": IDS, "labels": IDS[:, :4]}), "labels of shape"),
    "no labels to differentiate": (
        lambda: fcp.value_and_grad(fcp.transform(MODEL, cp=2))(PARAMS, {"input_ids": IDS}),
        "give the batch labels",
    ),
    # attention
    "unknown kernel": (lambda: fcp.transform(MODEL, cp=2, kernel="flush"), "no attention kernel 'flush'"),
    "soft cap on the fused kernel": (
        lambda: fcp.attention(*[torch.randn(1, 2, 4, 8)] * 3, None, softcap=5.0, kernel="fused"),
        "no soft cap",
    ),
    "window of 0": (lambda: fcp.attention(*[torch.randn(1, 2, 4, 8)] * 3, None, window=0), "window=0 must be"),
}


def _with_rules(rules: Any) -> Any:
    return fcp.transform(dataclasses.replace(MODEL, rules=rules), tp=2)(PARAMS, BATCH)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Something unsupported that is accepted and computed as something else."""
    attempt, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        attempt()


def test_an_unknown_axis_is_a_type_error() -> None:
    """A misspelt axis that is swallowed."""
    with pytest.raises(TypeError, match="pp"):
        fcp.transform(MODEL, pp=2)


def test_what_is_next_to_a_refusal_is_accepted() -> None:
    """A refusal that is too wide: packed rows, an all-ones mask and every dividing size must work."""
    packed = {**batch_of(IDS), "position_ids": torch.tensor([PACK8] * 2), "attention_mask": torch.ones(2, 8)}
    for sizes in ({"cp": 8}, {"tp": 2}, {"dp": 2}, {"fsdp": 2, "cp": 2}):
        fcp.compare(MODEL, fcp.transform(MODEL, **sizes), PARAMS, packed).assert_close()

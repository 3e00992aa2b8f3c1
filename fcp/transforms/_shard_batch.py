"""shard_batch: each rank computes whole rows of the batch (data parallelism: axis dp, and the batch half of fsdp).

The loss needs nothing new. Every rank's loss is its rows' sum over the one global count of targets, which was taken
before anything was split, so the ranks' losses simply add up; a rank whose rows have no target adds zero.

Where every process has a reader of its own, a rank is handed its own rows alone, and nothing is split. The count must
then be that of all ranks' targets, which no rank's rows tell; `fcp.transform` asks the others.
"""

from dataclasses import replace
from typing import Literal

from fcp import pytree
from fcp.axes import Axes, axis_size, names_of
from fcp.collectives import psum, shard, unshard
from fcp.ops import Ops
from fcp.sharded import Sharded, add_varying
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["shard_batch"]


def shard_batch(model_fn: ModelFn, *, axis: Axes = "dp", rows: Literal["all", "own"] = "all") -> Sharded:
    """Splits the rows of the batch over `axis`: [batch, seq] to [batch_local, seq] (Li et al. 2020, section 3).

    Args:
        model_fn: any model function.
        axis: the axis whose ranks get different rows.
        rows: what a rank is handed: "all" rows, of which it takes its own, or its "own", any number of them. Own rows
            come with the whole batch's `Inputs.num_targets` and `num_positions`; the logits are those of the own rows.

    Raises:
        ValueError: when called, if the number of rows is not a multiple of the axis size.
    """
    if rows not in ("all", "own"):
        raise ValueError(f"shard_batch: rows={rows!r}; it is 'all' or 'own'")

    def run_own(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        out = inner(params, inputs, replace(ops, total=lambda x: psum(ops.total(x), axis)))
        return Output(None if out.loss is None else psum(out.loss, axis), out.logits, out.statistics)

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        rows, size = inputs.positions.shape[0], axis_size(axis)
        if rows % size:
            raise ValueError(
                f"shard_batch: {axis}={size} does not divide a batch of {rows} rows; give a multiple of {size} rows, "
                f"or split the sequence instead (cp)"
            )

        local = replace(
            inputs,
            **{
                name: pytree.map(lambda x: shard(x, axis, dim=0), getattr(inputs, name))
                for name in ("tokens", "embeds", "positions", "targets", "mask", "real")
            },
        )
        out = inner(params, local, replace(ops, total=lambda x: psum(ops.total(x), axis)))
        return Output(
            loss=None if out.loss is None else psum(out.loss, axis),
            logits=None if out.logits is None else unshard(out.logits, axis, dim=0),
            statistics=out.statistics,
        )

    name = f"shard_batch({' x '.join(names_of(axis))})"
    return Sharded(model_fn, name, run if rows == "all" else run_own, add_varying(axis))

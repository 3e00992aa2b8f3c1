"""train_step: one step of training as a pure function, (state, batch) -> (state, metrics).

    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-3), max_norm=1.0)
    state = step.init(sharded.shard(params))
    state, metrics = step(state, batch)

The same lines run in the simulator, where the shards are the parameters, and on processes, where each rank's state is
its shards and their moments. What decides anything is the same on every rank: the loss and the norm are of all ranks,
so all clip alike, and all skip a step whose gradients are not finite on any of them.

A batch may be a list of micro-batches of any sizes: their gradients are summed, each loss divided by the one count of
targets of all of them, so that the step is that of the single large batch.

With `compute_dtype` the model computes in it, and the parameters, gradients and moments keep their own (float32 masters
of a bfloat16 model).

Left out: an auxiliary loss over several micro-batches. It is no sum over targets, so it would count once for each; that
is refused. The order of the data and what is written to disk are not a step's.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._optimizer import Optimizer
from fcp._prepare import prepare
from fcp._transformed import Transformed
from fcp._value_and_grad import value_and_grad
from fcp.typing import Inputs, Output, Params

__all__ = ["TrainState", "TrainStep", "train_step"]

Batch = Inputs | Mapping[str, Any]


@pytree.node()
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and gives.

    Attributes:
        params: this rank's shards; in the simulator the parameters.
        optimizer: the optimizer's state.
        step: int64 scalar, the steps taken, skipped ones included.
        skipped: int64 scalar, the steps whose gradients were not finite.
    """

    params: Any
    optimizer: Any
    step: Any
    skipped: Any


@dataclass(frozen=True)
class TrainStep:
    """A pure training step; `train_step` makes it, and says what the attributes are."""

    sharded: Transformed
    optimizer: Optimizer
    max_norm: float | None
    norm_order: float
    compute_dtype: torch.dtype | None
    donate: bool

    def init(self, shards: Params) -> TrainState:
        """The state before the first step, of what `sharded.shard(params)` gives."""
        zero = torch.zeros((), dtype=torch.int64)
        return TrainState(shards, self.optimizer.init(shards), zero, zero.clone())

    def __call__(self, state: TrainState, batch: Batch | Sequence[Batch]) -> tuple[TrainState, dict[str, Tensor]]:
        """One step.

        Args:
            state: what `init` or the last step gave.
            batch: what the model takes, or a list of micro-batches.

        Returns:
            The state after it, and the metrics, scalars: `loss` (of the parameters before the step), `norm` (of the
            gradients before clipping, float64), `skipped` (bool, this step).

        Raises:
            ValueError: no batch; micro-batches of which some say `num_items_in_batch` and some do not, or that say
                different ones; several micro-batches of a model with an auxiliary loss; or processes that were handed
                different numbers of them, or what else does not belong together.
        """
        loss, grads = self._gradients(state.params, _counted(batch))
        norm = self.sharded.norm(grads, self.norm_order)
        finite = math.isfinite(float(norm))
        metrics = {"loss": loss, "norm": norm, "skipped": torch.tensor(not finite)}
        after = replace(state, step=state.step + 1, skipped=state.skipped + (not finite))
        if not finite:
            return after, metrics
        if self.max_norm is not None and float(norm) > self.max_norm:
            scale = self.max_norm / float(norm)
            grads = pytree.map(lambda g: g * scale, grads)
        params, optimizer = self.optimizer.update(state.params, grads, state.optimizer, donate=self.donate)
        return replace(after, params=params, optimizer=optimizer), metrics

    def _gradients(self, params: Params, batches: list[Batch]) -> tuple[Tensor, Params]:
        loss: Any = None
        grads: Any = None
        for index, each in enumerate(batches):
            forward = functools.partial(self._forward, micro_batch=(index, len(batches)))
            out, more = value_and_grad(forward)(params, each)
            if len(batches) > 1 and "auxiliary_loss" in (out.statistics or {}):
                raise ValueError(
                    f"train_step: {len(batches)} micro-batches of a model with an auxiliary loss, which is no sum over "
                    f"targets and would count {len(batches)} times. Give the step one batch."
                )
            loss = out.loss if loss is None else loss + out.loss
            grads = more if grads is None else pytree.map(torch.add, grads, more)
        return loss, grads

    def _forward(self, params: Params, batch: Batch, micro_batch: tuple[int, int]) -> Output:
        dtype = self.compute_dtype
        if dtype is not None:
            params = pytree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, params)
        return self.sharded.on_shards(params, batch, micro_batch=micro_batch)


def _counted(batch: Batch | Sequence[Batch]) -> list[Batch]:
    """The micro-batches, each with the count of targets of all."""
    if isinstance(batch, Inputs | Mapping):
        return [batch]
    given = list(batch)
    if not given:
        raise ValueError("train_step: no batch; give one, or a list of at least one micro-batch")
    said = [each.get("num_items_in_batch") if isinstance(each, Mapping) else None for each in given]
    if any(count is not None for count in said):
        if any(count is None for count in said) or len({int(count) for count in said if count is not None}) > 1:
            raise ValueError(
                f"train_step: the micro-batches say num_items_in_batch={said}; it counts the targets of all of them, "
                f"so give the same to each, or leave it out"
            )
        return given
    prepared = [prepare(each) for each in given]
    total = torch.stack([each.num_targets for each in prepared]).sum()
    return [replace(each, num_targets=total) for each in prepared]


def train_step(
    sharded: Transformed,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    norm_order: float = 2.0,
    compute_dtype: torch.dtype | None = None,
    donate: bool = False,
) -> TrainStep:
    """A training step of a transformed function: (state, batch) -> (state, metrics).

    Args:
        sharded: what `fcp.transform` gives, simulated or on processes.
        optimizer: what `fcp.optimizer` gives.
        max_norm: gradients of a larger norm are scaled down to it. None: never.
        norm_order: 2, another positive number, or infinity.
        compute_dtype: the dtype in which the model computes; None: that of the parameters.
        donate: overwrite the state that is passed in, which must not be used again.

    Raises:
        ValueError: an argument is not of its kind, or the optimizer was made for another transformed function.

    >>> import fcp, torch
    >>> from models import llama
    >>> model, ids = llama.tiny(), torch.arange(12)[None]
    >>> sharded = fcp.transform(model, cp=2)
    >>> step = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=0.1), max_norm=1.0)
    >>> state = step.init(sharded.shard(model.init(seed=0)))
    >>> state, first = step(state, {"input_ids": ids, "labels": ids})
    >>> state, second = step(state, {"input_ids": ids, "labels": ids})
    >>> bool(second["loss"] < first["loss"]), int(state.step)
    (True, 2)
    """
    if not isinstance(sharded, Transformed):
        raise ValueError(f"train_step: {sharded!r} is no transformed function; give fcp.transform(model, ...)")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"train_step: {optimizer!r} is no optimizer; give fcp.optimizer(torch.optim.AdamW, lr=...)")
    if optimizer.sharded is not None and optimizer.sharded is not sharded:
        raise ValueError("train_step: the optimizer was made for another transformed function; give it this one")
    if max_norm is not None and not 0 < max_norm < math.inf:
        raise ValueError(f"train_step: max_norm={max_norm!r} must be a positive number, or None")
    if not norm_order > 0:
        raise ValueError(f"train_step: norm_order={norm_order!r} must be a positive number, or infinity")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"train_step: compute_dtype={compute_dtype!r} is no floating dtype")
    return TrainStep(sharded, optimizer, max_norm, norm_order, compute_dtype, donate)

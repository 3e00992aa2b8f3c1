"""`compare`: is the sharded function the same function? The answer as data.

The promise of every transform is that loss, logits and each gradient leaf are those of the unsharded function. This
measures it, with one number a leaf, worst first. A gradient leaf that is missing is an error, not a zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._prepare import prepare
from fcp._value_and_grad import value_and_grad
from fcp.typing import Inputs, ModelFn, Params

__all__ = ["LeafError", "Report", "compare", "relative_error"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""What `assert_close` accepts by default, by the parameters' dtype; both functions round, and in differing orders."""

FLOOR = 1e-3
"""A leaf whose gradient is this much smaller than the largest leaf's is measured against that, not against its own
rounding noise (a leaf whose gradient is zero in exact arithmetic has no scale of its own)."""


@dataclass(frozen=True)
class LeafError:
    """The gradient of one leaf: `error` = max |sharded - reference| / its scale; inf where it is missing or NaN."""

    path: str
    error: float
    scale: float
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `compare` found. Prints as a table, worst leaf first.

    Attributes:
        reference_loss, loss: the two losses.
        loss_error: relative.
        logits_error: max |difference| / max |reference logit|; None where a function gives no logits.
        leaves: one entry a gradient leaf, worst first.
        tolerance: what `assert_close` accepts by default, by the dtype of the parameters.
        title: what was compared.
    """

    reference_loss: float
    loss: float
    loss_error: float
    logits_error: float | None
    leaves: tuple[LeafError, ...]
    tolerance: float
    title: str = ""

    @property
    def worst(self) -> float:
        """The largest error of all."""
        return max([self.loss_error, self.logits_error or 0.0, *(leaf.error for leaf in self.leaves)])

    def ok(self, tolerance: float | None = None) -> bool:
        return self.worst <= (self.tolerance if tolerance is None else tolerance)

    def assert_close(self, tolerance: float | None = None) -> None:
        """Raises AssertionError with the table if any error exceeds `tolerance` (default: `self.tolerance`)."""
        if not self.ok(tolerance):
            raise AssertionError(f"not the same function (tolerance {tolerance or self.tolerance:g})\n{self}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; errors that are inf become null-safe strings."""

        def number(x: float | None) -> float | str | None:
            return x if x is None or math.isfinite(x) else str(x)

        return {
            "title": self.title,
            "ok": self.ok(),
            "tolerance": self.tolerance,
            "reference_loss": number(self.reference_loss),
            "loss": number(self.loss),
            "loss_error": number(self.loss_error),
            "logits_error": number(self.logits_error),
            "gradients": [{"path": leaf.path, "error": number(leaf.error), "note": leaf.note} for leaf in self.leaves],
        }

    def __rich__(self) -> Any:
        from fcp.tables import report_table

        return report_table(self)

    def __str__(self) -> str:
        from fcp.tables import render

        return render(self.__rich__())


def compare(
    reference: ModelFn,
    sharded: ModelFn,
    params: Params,
    batch: Inputs | Mapping[str, Any],
) -> Report:
    """Runs both functions, forward and backward, and measures loss, logits and every gradient leaf.

    Args:
        reference: the unsharded model function.
        sharded: the transformed one.
        params: global parameters; the default tolerance follows their dtype.
        batch: a batch with labels.

    Returns:
        The errors as data; `print` shows a table, `assert_close()` raises.

    Raises:
        ValueError: the batch has no labels.
    """
    inputs = prepare(batch)
    expected, expected_grads = value_and_grad(reference)(params, inputs)
    actual, actual_grads = value_and_grad(sharded)(params, inputs)
    title = " vs ".join(type(fn).__name__ if not hasattr(fn, "axes") else repr(fn) for fn in (reference, sharded))
    return report(expected, expected_grads, actual, actual_grads, title=title)


def report(expected: Any, expected_grads: Params, actual: Any, actual_grads: Params, *, title: str = "") -> Report:
    """The report of two (Output, gradients) pairs that were computed already."""
    wanted = dict(zip(pytree.paths(expected_grads), pytree.leaves(expected_grads), strict=True))
    got = dict(zip(pytree.paths(actual_grads), pytree.leaves(actual_grads), strict=True))
    largest = max((_peak(x) for x in wanted.values()), default=0.0)
    leaves = []
    for path in {**wanted, **got}:
        if path not in got or path not in wanted:
            leaves.append(LeafError(path, math.inf, 0.0, "missing" if path not in got else "not in the reference"))
            continue
        scale = max(_peak(wanted[path]), FLOOR * largest)
        leaves.append(LeafError(path, relative_error(wanted[path], got[path], scale), scale))
    leaves.sort(key=lambda leaf: (-leaf.error, leaf.path))
    logits_error = None
    if expected.logits is not None and actual.logits is not None:
        logits_error = relative_error(expected.logits, actual.logits)
    dtypes = {x.dtype for x in wanted.values()}
    return Report(
        reference_loss=float(expected.loss),
        loss=float(actual.loss),
        loss_error=relative_error(expected.loss, actual.loss),
        logits_error=logits_error,
        leaves=tuple(leaves),
        tolerance=max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0),
        title=title,
    )


def relative_error(expected: Tensor, actual: Tensor, scale: float | None = None) -> float:
    """max |actual - expected| / scale, by default max |expected|; inf for NaN or another shape, 0 where both are 0."""
    if expected.shape != actual.shape:
        return math.inf
    difference = _peak(actual.double() - expected.double())
    scale = _peak(expected) if scale is None else scale
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def _peak(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0

"""`compare`: is the sharded function the same function? The answer as data.

Problem. A fault of sharding seldom raises: the loss is a little off, or it is exact and one gradient is half of what it
should be. A single "all close" over everything hides which, and by how much.

Idea. Loss, logits, each statistic and each gradient leaf get one number, max |difference| / max |reference|, and the
leaves are listed worst first. Nothing can pass by being absent: a leaf that is missing, one too many, another shape, an
infinity or a NaN on either side is an infinite error.

The one judgement is scale. A leaf whose gradient is zero in exact arithmetic (a key bias without rotary positions:
softmax does not see it) holds rounding noise alone, and noise measured against noise is never small; so a leaf is
measured against at least `FLOOR` of the largest gradient. What a dtype's rounding may amount to is `TOLERANCE`. Its
float32 bound is for deep models: over the 30 layers of a trained one (SmolLM2, 135 million parameters) float32
gradients lie 6e-5 from the float64 ones, sharded or not, and 4e-5 from each other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._prepare import prepare
from fcp._transformed import Transformed
from fcp._value_and_grad import value_and_grad
from fcp.model import Model
from fcp.sharded import Sharded
from fcp.typing import Inputs, ModelFn, Params

__all__ = ["LeafError", "Report", "compare", "relative_error"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""What `assert_close` accepts by default, by the parameters' dtype; both functions round, and in differing orders."""

FLOOR = 1e-3
"""A leaf whose gradient is this much smaller than the largest leaf's is measured against that, not against its own
rounding noise (a leaf whose gradient is zero in exact arithmetic has no scale of its own)."""


@dataclass(frozen=True)
class LeafError:
    """The gradient of one leaf.

    Attributes:
        path: the leaf's path, for a model its tensor's name in a checkpoint.
        error: max |sharded - reference| / scale; inf where the leaf is missing, not finite, or of another shape.
        scale: max |reference|, but at least FLOOR times the largest leaf's.
        note: why the error is inf, or empty.
    """

    path: str
    error: float
    scale: float
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `compare` found. Prints as a table, worst leaf first.

    Attributes:
        reference_loss, loss: the two losses.
        loss_error: |difference| / |reference loss|.
        logits_error: max |difference| / max |reference logit|; None where one of the functions gives no logits.
        leaves: one entry a gradient leaf, worst first.
        statistics: one entry a leaf of `Output.statistics` of the reference or of the other (none: there are none).
        tolerance: what `ok` and `assert_close` accept by default; it follows the dtype of the parameters.
        title: what was compared.
    """

    reference_loss: float
    loss: float
    loss_error: float
    logits_error: float | None
    leaves: tuple[LeafError, ...]
    tolerance: float
    title: str = ""
    statistics: tuple[LeafError, ...] = ()

    @property
    def worst(self) -> float:
        """The largest error of all."""
        leaves = (*self.leaves, *self.statistics)
        return max([self.loss_error, self.logits_error or 0.0, *(leaf.error for leaf in leaves)])

    def ok(self, tolerance: float | None = None) -> bool:
        """Whether no error exceeds `tolerance` (default: `self.tolerance`)."""
        return self.worst <= (self.tolerance if tolerance is None else tolerance)

    def assert_close(self, tolerance: float | None = None) -> None:
        """Raises AssertionError with the table if any error exceeds `tolerance` (default: `self.tolerance`)."""
        if not self.ok(tolerance):
            judged = self if tolerance is None else replace(self, tolerance=tolerance)
            raise AssertionError(f"not the same function (tolerance {judged.tolerance:g})\n{judged}")

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, which has no infinity: an error that is inf is the string "inf"."""

        def number(x: float | None) -> float | str | None:
            return x if x is None or math.isfinite(x) else str(x)

        def entry(leaf: LeafError) -> dict[str, Any]:
            return {"path": leaf.path, "error": number(leaf.error), "scale": number(leaf.scale), "note": leaf.note}

        return {
            "title": self.title,
            "ok": self.ok(),
            "tolerance": self.tolerance,
            "reference_loss": number(self.reference_loss),
            "loss": number(self.loss),
            "loss_error": number(self.loss_error),
            "logits_error": number(self.logits_error),
            "worst_error": number(self.worst),
            "gradients": [entry(leaf) for leaf in self.leaves],
            "statistics": [entry(leaf) for leaf in self.statistics],
        }

    def __rich__(self) -> Any:
        from fcp.tables import report_view

        return report_view(self)

    def __str__(self) -> str:
        from fcp.tables import render

        return render(self.__rich__())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        from fcp.tables import mimebundle

        return mimebundle(self.__rich__())


def compare(
    reference: ModelFn,
    sharded: ModelFn,
    params: Params,
    batch: Inputs | Mapping[str, Any],
) -> Report:
    """Runs both functions, forward and backward, and measures loss, logits and every gradient leaf.

    Args:
        reference: the unsharded model function.
        sharded: the transformed one, or any other that should be the same.
        params: global parameters; the default tolerance follows their dtype.
        batch: a batch with labels (see `fcp.prepare`).

    Returns:
        The errors as data; `print` shows a table, `assert_close()` raises.

    Raises:
        ValueError: the batch has no labels.
    """
    inputs = prepare(batch)
    expected, expected_grads = value_and_grad(reference)(params, inputs)
    actual, actual_grads = value_and_grad(sharded)(params, inputs)
    return report(expected, expected_grads, actual, actual_grads, title=f"{_name(sharded)} against {_name(reference)}")


def _name(fn: Callable[..., Any]) -> str:
    """A model function in a few words: what was applied to it, or which model it is."""
    if isinstance(fn, Transformed):
        return repr(fn)
    if isinstance(fn, Sharded):
        return " . ".join(reversed(fn.applied))
    if isinstance(fn, Model):
        return f"Model({getattr(fn.config, 'model_type', type(fn.config).__name__)})"
    wrapped = getattr(fn, "__wrapped__", None)  # as simulate leaves it
    if isinstance(wrapped, Transformed | Sharded | Model):
        return f"{getattr(fn, '__name__', type(fn).__name__)}({_name(wrapped)})"
    return getattr(fn, "__name__", type(fn).__name__)


def report(expected: Any, expected_grads: Params, actual: Any, actual_grads: Params, *, title: str = "") -> Report:
    """The report of two (Output, gradients) pairs that were computed already, as `value_and_grad` gives them.

    One reference may so be compared with several sharded functions. The parameters' dtypes are read off the gradients.
    """
    wanted, got = _by_path(expected_grads), _by_path(actual_grads)
    leaves = _errors(wanted, got, FLOOR * max((_peak(x) for x in wanted.values()), default=0.0))
    logits_error = None
    if expected.logits is not None and actual.logits is not None:
        logits_error = relative_error(expected.logits, actual.logits)
    dtypes = {x.dtype for x in wanted.values()}
    return Report(
        reference_loss=float(expected.loss),
        loss=float(actual.loss),
        loss_error=relative_error(expected.loss, actual.loss),
        logits_error=logits_error,
        leaves=leaves,
        tolerance=max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0),
        title=title,
        statistics=_errors(_by_path(expected.statistics), _by_path(actual.statistics), 0.0),
    )


def _by_path(tree: Any) -> dict[str, Tensor]:
    return {} if tree is None else dict(zip(pytree.paths(tree), pytree.leaves(tree), strict=True))


def _errors(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor], floor: float) -> tuple[LeafError, ...]:
    """One entry a leaf of either, worst first; no leaf is measured against less than `floor`."""
    leaves = []
    for path in {**wanted, **got}:
        if path not in got or path not in wanted:
            leaves.append(LeafError(path, math.inf, 0.0, "missing" if path not in got else "not in the reference"))
            continue
        scale = max(_peak(wanted[path]), floor)
        error = relative_error(wanted[path], got[path], scale)
        leaves.append(LeafError(path, error, scale, _why(wanted[path], got[path]) if error == math.inf else ""))
    return tuple(sorted(leaves, key=lambda leaf: (-leaf.error, leaf.path)))


def relative_error(expected: Tensor, actual: Tensor, scale: float | None = None) -> float:
    """max |actual - expected| / scale, by default max |expected|.

    0 where the two are equal; inf for another shape, and for NaN or an infinity on either side.
    """
    if expected.shape != actual.shape:
        return math.inf
    difference = _peak(actual.double() - expected.double())
    scale = _peak(expected) if scale is None else scale
    if not math.isfinite(difference) or not math.isfinite(scale):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def _why(expected: Tensor, actual: Tensor) -> str:
    if expected.shape != actual.shape:
        return f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not bool(expected.isfinite().all()):
        return "not finite in the reference"
    return "" if bool(actual.isfinite().all()) else "not finite"


def _peak(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0

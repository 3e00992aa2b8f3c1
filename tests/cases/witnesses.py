"""Witnesses: checks that many cases share, each written so that a fault makes it raise, and the ways to put a fault in.

A *fault* is put in on one side of a comparison only: around the functions under test (`outside`, `inside`), or by a
patched function after the expected values were found. `assert_trips` states that the witness notices: it must raise.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from tests.tolerances import FLOAT64

LN64 = 4.158883083359672
"""The loss of every token under a head of zeros over 64 tokens."""

NOTICED = 1e-6
"""A fault must move something by more than this; rounding stays below tolerances.FLOAT64."""

Result = tuple[fcp.Output, Any]
"""An output and the gradients of its loss."""


def mesh_name(mesh: Mapping[str, int]) -> str:
    return "-".join(f"{name}{size}" for name, size in mesh.items()) or "one"


# --- the same function ------------------------------------------------------------------------------------------------


def run_outside(fn: Any, params: Any, batch: Any) -> Result:
    """The output, and torch.func.grad of the whole with the simulated ranks inside it."""
    return fn(params, batch), torch.func.grad(lambda p: fn(p, batch).loss)(params)


def run_inside(sharded: fcp.Transformed, params: Any, batch: Any) -> Result:
    """Each simulated rank differentiates its own function, as a process does."""
    run = fcp.value_and_grad(sharded.model_fn)
    return (fcp.simulate(run, **sharded.axes) if sharded.axes else run)(params, fcp.prepare(batch))


def assert_same_function(model: Any, sharded: fcp.Transformed, params: Any, batch: Any) -> None:
    """Loss, logits and every gradient leaf, by both ways of differentiating, are those of `model`, and finite."""
    assert_matches(run_outside(model, params, batch), sharded, params, batch)


def assert_matches(expected: Result, sharded: fcp.Transformed, params: Any, batch: Any) -> None:
    """As `assert_same_function`, against what was found in another way; expected logits of None are not compared."""
    for way, (out, grads) in (
        ("outside", run_outside(sharded, params, batch)),
        ("inside", run_inside(sharded, params, batch)),
    ):
        assert_close(f"loss {way}", expected[0].loss, out.loss)
        if expected[0].logits is not None:
            assert_close(f"logits {way}", expected[0].logits, out.logits)
        assert_same_tree(expected[1], grads, way)


def assert_close(what: str, expected: Tensor, actual: Tensor, scale: float | None = None) -> None:
    """Equal up to rounding, relative to the largest entry (or `scale`), and finite on both sides."""
    assert bool(torch.isfinite(expected).all()), f"{what}: the expected value is not finite"
    error = fcp.relative_error(expected, actual, scale)
    assert error <= FLOAT64, f"{what}: relative error {error:.1e}"


def assert_same_tree(expected: Any, actual: Any, what: str = "") -> None:
    """Two pytrees with the same paths, every leaf equal up to rounding; a missing leaf is not a zero one."""
    assert pytree.paths(expected) == pytree.paths(actual)
    wanted = pytree.leaves(expected)
    largest = max(float(x.abs().max()) for x in wanted)
    for path, a, b in zip(pytree.paths(expected), wanted, pytree.leaves(actual), strict=True):
        # A leaf that is zero but for rounding (a key bias, say) has no scale of its own.
        assert_close(f"{path} {what}", a, b, max(float(a.abs().max()), 1e-3 * largest))


def add(*results: Result) -> Result:
    """The sum of losses and of gradients, the logits left out."""
    losses, grads = [out.loss for out, _ in results], [grads for _, grads in results]
    total = pytree.map(lambda *leaves: torch.stack(leaves).sum(0), grads[0], *grads[1:])
    return fcp.Output(torch.stack(losses).sum(), None), total


def caller_loss(fn: Any, params: Any, batch: Any) -> Tensor:
    """A loss that the caller computes on the logits, with its own weight for each of them."""
    logits = fn(params, batch).logits
    weights = torch.cos(torch.arange(logits.numel(), dtype=logits.dtype)).reshape(logits.shape)
    return (logits.log_softmax(-1) * weights).sum() / 7


def assert_same_caller_gradient(model: Any, sharded: fcp.Transformed, params: Any, batch: Any) -> None:
    """The gradient of a loss on gathered logits, by both ways of differentiating."""
    inputs = fcp.prepare(batch)
    expected = torch.func.grad(lambda p: caller_loss(model, p, inputs))(params)
    assert_same_tree(expected, torch.func.grad(lambda p: caller_loss(sharded, p, inputs))(params), "outside")
    run = fcp.value_and_grad(lambda p: caller_loss(sharded.model_fn, p, inputs))
    _, grads = (fcp.simulate(run, **sharded.axes) if sharded.axes else run)(params)
    assert_same_tree(expected, grads, "inside")


# --- who may influence whom -------------------------------------------------------------------------------------------


def as_embeds(params: Any, batch: Mapping[str, Any], path: str = "embed.weight") -> dict[str, Any]:
    """The batch with its tokens looked up already in the leaf at `path`."""
    table = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))[path]
    rest = {name: value for name, value in batch.items() if name != "input_ids"}
    return {**rest, "inputs_embeds": table[batch["input_ids"]]}


def jacobian_probe(fn: Any, params: Any, batch: Mapping[str, Any], row: int = 0) -> Tensor:
    """[seq, seq]: entry (i, j) is how much the logits of token i depend on the input embedding of token j.

    It is the sum of absolute values of the gradient of the logits of token i, each with its own weight. Exactly zero
    where j may not influence i. `batch` has `inputs_embeds`; `row` is the row of the batch that is looked at.
    """

    def of_embeds(embeds: Tensor) -> Tensor:
        logits = fn(params, {**batch, "inputs_embeds": embeds}).logits[row]
        return logits @ torch.sin(1.0 + torch.arange(logits.shape[-1], dtype=logits.dtype))

    embeds = batch["inputs_embeds"]
    _, vjp = torch.func.vjp(of_embeds, embeds)
    rows = [vjp(one)[0] for one in torch.eye(embeds.shape[1], dtype=embeds.dtype)]
    jacobian = torch.stack(rows)  # [seq, batch, seq, hidden]
    others = [r for r in range(embeds.shape[0]) if r != row]
    assert not bool(jacobian[:, others].any()), "a row of the batch influences another"
    return jacobian[:, row].abs().sum(-1)


def assert_influence(allowed: Tensor, influence: Tensor) -> None:
    """influence[i, j] is non-zero exactly where allowed[i, j], or on the diagonal (the residual stream)."""
    allowed = allowed | torch.eye(allowed.shape[0], dtype=torch.bool)
    assert bool(torch.isfinite(influence).all())
    wrong = ((influence != 0) != allowed).nonzero().tolist()
    assert not wrong, f"(query, key) pairs whose influence is not as the mask says: {wrong}"


def blocks(*lengths: int) -> Tensor:
    """The causal mask of documents of these lengths in one row: bool [seq, seq]."""
    return torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()


# --- scale, refusals, traces ------------------------------------------------------------------------------------------


def constant_loss(params: Any, path: str = "lm_head.weight") -> Any:
    """The parameters with the head at `path` zero: every token's loss is ln(vocab), whatever the input."""
    return pytree.map_with_path(lambda name, x: torch.zeros_like(x) if name == path else x, params)


def assert_loss(expected: float, fn: Any, params: Any, batch: Any) -> None:
    got = float(fn(params, batch).loss)
    assert abs(got - expected) <= FLOAT64 * max(1.0, abs(expected)), f"loss {got}, expected {expected}"


def assert_refused(call: Callable[[], Any], match: str) -> None:
    """The call raises a ValueError that says `match`, before any collective has run."""
    with fcp.record() as events:
        said = None
        try:
            call()
        except ValueError as error:
            said = str(error)
    assert said is not None, "not refused"
    assert match in said, f"refused, but not for {match!r}: {said}"
    assert events == [], f"refused only after {events[0]}"


def trace(fn: Any, params: Any, batch: Any) -> list[fcp.Event]:
    """Every collective of one step, forward and backward, as every rank sees it."""
    with fcp.record() as events:
        run_inside(fn, params, batch)
    return events


# --- looking at a rank, putting a fault in ----------------------------------------------------------------------------

Change = Callable[[Any], Any]


def unchanged(x: Any) -> Any:
    return x


def outside(
    sharded: fcp.Transformed, inputs: Change = unchanged, *, ops: Change = unchanged, params: Change = unchanged
) -> fcp.Transformed:
    """`sharded` with something changed above all of its transforms: the whole batch, or the Ops that they wrap."""

    def run(inner: Any, local: Any, whole: fcp.Inputs, here: fcp.Ops) -> fcp.Output:
        return inner(params(local), inputs(whole), ops(here))

    return fcp.Transformed(fcp.Sharded(sharded.model_fn, "outside", run), sharded.axes)


def inside(
    model: Any, *, inputs: Change = unchanged, ops: Change = unchanged, output: Change = unchanged
) -> fcp.Sharded:
    """`model` with something changed below all transforms that are then applied: on each rank, what is local to it."""

    def run(inner: Any, params: Any, local: fcp.Inputs, here: fcp.Ops) -> fcp.Output:
        return output(inner(params, inputs(local), ops(here)))

    return fcp.Sharded(model, "inside", run)


def of_ranks(x: Tensor, axis: str) -> Tensor:
    """[ranks, ...]: what each rank of `axis` holds; for use inside the map."""
    return fcp.unshard(x.unsqueeze(0), axis, dim=0)


def spy(found: list[Any], look: Callable[[Any], Any]) -> Change:
    """A change that changes nothing and notes `look` of what passes."""

    def change(x: Any) -> Any:
        found.append(look(x))
        return x

    return change


def attention_spy(look: Callable[..., None]) -> Change:
    """A change of Ops that shows every attention call to `look(q, k, v, mask, **options)`."""

    def change(ops: fcp.Ops) -> fcp.Ops:
        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
            look(q, k, v, mask, **options)
            return ops.attention(q, k, v, mask, **options)

        return replace(ops, attention=attention)

    return change


def attention_options(**changes: Any) -> Change:
    """A fault: attention is called with other options than the model gave (None: the option is dropped)."""

    def change(ops: fcp.Ops) -> fcp.Ops:
        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
            given = {
                name: new(options.get(name)) if callable(new := changes.get(name, unchanged)) else new
                for name in options
            }
            return ops.attention(q, k, v, mask, **given)

        return replace(ops, attention=attention)

    return change


def assert_trips(witness: Callable[[], Any], error: type[Exception] = AssertionError, match: str | None = None) -> None:
    """The witness raises; `match` where the fault is caught by a message and not by a number."""
    with pytest.raises(error, match=match):
        witness()

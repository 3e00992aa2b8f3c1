"""ContextParallelTesterMixin: what a transformers model has to satisfy under fcp's transforms, as pytest tests.

    class TestMyModel(fcp.testing.ContextParallelTesterMixin):
        config = MyConfig(hidden_size=32, num_hidden_layers=2, ...)        # or a function that makes one

Two kinds of truth are held against each other. The functional form must be the module: its own forward, eager and
sdpa, on whole rows, on each document alone, on each row without its padding. And each transform must be the functional
form: loss, logits and every gradient, in float64, also where the module itself would cast to float32 (`wide`).

A module whose control flow depends on values cannot be run by simulated ranks together; it is run on processes instead.
A model that fcp refuses is not a failure: it must be refused with a ValueError, in the simulator and on each of two
processes with the same words, and then its tests skip with that reason.
"""

import math
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fcp import pytree
from fcp._compare import relative_error, report
from fcp._launch import launch
from fcp._simulate import simulate
from fcp._transform import transform
from fcp._value_and_grad import value_and_grad
from fcp.huggingface import functional
from fcp.testing._tiny import tiny_module
from fcp.testing._wide import wide

__all__ = ["ContextParallelTesterMixin"]

SEQ = 12
DOCUMENTS = (5, 7)
"""Of a packed row; the second crosses the edge between two shards."""

REAL = 8
"""Tokens of the second row that are no padding."""


class ContextParallelTesterMixin:
    """pytest tests of one transformers causal language model under cp, tp and fsdp.

    Attributes:
        config: a tiny configuration of transformers, or a function that makes one. Windows and chunks longer than 12
            tokens would not be seen.
        tolerance: of every comparison, relative.
        on_processes: whether a refusal is also asked of two processes.
    """

    config: Any = None
    tolerance: float = 1e-8
    on_processes: bool = True
    _held: "_Case | None" = None

    @classmethod
    def case(cls) -> "_Case":
        """The model and what it was found to be, made once for all tests of the class."""
        held = cls.__dict__.get("_held")
        if held is None:
            held = cls._held = _Case(cls.config)
        return held

    # --- the functional form is the module

    def test_function_is_module_eager(self) -> None:
        self._is_module("eager")

    def test_function_is_module_sdpa(self) -> None:
        self._is_module("sdpa")

    def test_gradients_are_the_modules(self) -> None:
        case = self.case()
        with wide():
            _, grads = case.reference("plain")
            loss = nn.functional.cross_entropy(
                case.own(case.tokens, grad=True)[:, :-1].flatten(0, 1), case.tokens[:, 1:].flatten()
            )
            case.module.zero_grad()
            loss.backward()
        named = dict(zip(pytree.paths(grads), pytree.leaves(grads), strict=True))
        largest = max(float(x.abs().max()) for x in named.values())
        for name, x in case.module.named_parameters():
            if not x.requires_grad:  # a table that is computed, not learned
                named.pop(name)
                continue
            wanted = torch.zeros_like(x) if x.grad is None else x.grad  # unused, or used where no gradient comes
            scale = max(float(wanted.abs().max()), 1e-6 * largest)
            error = relative_error(wanted, named.pop(name), scale)
            assert error <= self.tolerance, f"{name}: relative error {error:.2e} above {self.tolerance:.0e}"
        assert not named, f"{', '.join(named)}: no parameter of the module"

    def test_packed_is_each_document_alone(self) -> None:
        case = self.case()
        with wide():
            apart = torch.cat([case.own(part) for part in case.tokens.split(DOCUMENTS, 1)], 1)
            self._close(apart, case.reference("packed")[0].logits)

    def test_left_padded_is_rows_alone(self) -> None:
        self._is_rows("left_padded", slice(SEQ - REAL, SEQ))

    def test_right_padded_is_rows_alone(self) -> None:
        self._is_rows("right_padded", slice(0, REAL))

    # --- each transform is the functional form

    def test_cp(self) -> None:
        self._compare("plain", cp=2)

    def test_cp_packed(self) -> None:
        self._compare("packed", cp=2)

    def test_cp_left_padded(self) -> None:
        self._compare("left_padded", cp=2)

    def test_cp_right_padded(self) -> None:
        self._compare("right_padded", cp=2)

    def test_cp_embeds(self) -> None:
        self._compare("embeds", cp=2)

    def test_cp_derivative_on_each_rank(self) -> None:
        """As processes do: a parameter that no rank marked, or a sum that only the map's outside takes, is seen."""
        self._inside("packed", cp=2)

    def test_fsdp(self) -> None:
        self._compare("packed", fsdp=2)

    def test_remat(self) -> None:
        self._compare("packed", cp=2, remat=True)

    def test_tp(self) -> None:
        self._compare("packed", tp=2)

    def test_cp_tp(self) -> None:
        self._compare("packed", cp=2, tp=2)

    def test_tp_derivative_on_each_rank(self) -> None:
        self._inside("packed", tp=2)

    # --- how

    def _close(self, expected: Tensor, actual: Tensor) -> None:
        error = relative_error(expected, actual)
        assert error <= self.tolerance, f"relative error {error:.2e} above {self.tolerance:.0e}"

    def _is_module(self, attention: str) -> None:
        case = self.case()
        with wide():
            own = case.own(case.tokens, attention)
            self._close(own, case.reference("plain")[0].logits)

    def _is_rows(self, name: str, rows: slice) -> None:
        case = self.case()
        with wide():
            logits = case.reference(name)[0].logits
            self._close(case.own(case.tokens[:1]), logits[:1])
            self._close(case.own(case.tokens[1:, rows]), logits[1:, rows])

    def _transformed(self, **sizes: Any) -> Any:
        case = self.case()
        if sizes.get("tp", 1) > 1 and case.model.rules is None:
            _skip("refused: the module carries no tensor-parallel plan")
        try:
            return transform(case.model, **sizes)
        except ValueError as error:
            if self.on_processes:
                _refused_on_processes(case.module, sizes, str(error))
            _skip(f"refused: {error}")

    def _compare(self, name: str, **sizes: Any) -> None:
        case = self.case()
        with wide():
            sharded = self._transformed(**sizes)
            expected = case.reference(name)
            actual = self._values(sharded, name, sizes)
            report(*expected, *actual, title=f"{sharded} on {name} rows").assert_close(self.tolerance)
            slices = zip(expected[0].logits.chunk(2, 1), actual[0].logits.chunk(2, 1), strict=True)
            for theirs, mine in slices:  # each rank's
                self._close(theirs, mine)

    def _values(self, sharded: Any, name: str, sizes: dict[str, Any]) -> Any:
        """(Output, gradients), from processes where simulated ranks cannot run the module."""
        case = self.case()
        if case.branches is not None:
            found = partial(_values_here, case.module, sizes, case.batches[name])
            return launch(found, num_processes=math.prod(_axes(sizes).values()))[0]
        try:
            return value_and_grad(sharded)(case.params, case.batches[name])
        except ValueError as error:
            _skip(f"refused: {error}")

    def _inside(self, name: str, **sizes: int) -> None:
        case = self.case()
        with wide():
            sharded = self._transformed(**sizes)
            expected, wanted = case.reference(name)
            if case.branches is not None:
                _skip(f"on processes: {case.branches}")
            out, grads = simulate(value_and_grad(sharded.model_fn), **sizes)(case.params, case.batches[name])
            title = f"{sharded}, the derivative on each rank, on {name} rows"
            report(expected, wanted, out, grads, title=title).assert_close(self.tolerance)


class _Case:
    """One configuration's module, and its functional form or the reason why it has none."""

    def __init__(self, config: Any) -> None:
        self._why: str | None = None
        self._references: dict[str, Any] = {}
        self.tokens = torch.randint(3, 60, (2, SEQ), generator=torch.Generator().manual_seed(1))
        try:
            with wide():
                self.module = tiny_module(config() if callable(config) else config)
                self.own(self.tokens)
        except Exception as error:  # of every kind: this is somebody's module
            self._why = f"not constructible: {type(error).__name__}: {_line(error)}"
            return
        try:
            with wide():
                self._model, self._params = functional(self.module)
        except ValueError as error:
            self._why = f"refused: {error}"

    @property
    def model(self) -> Any:
        if self._why is not None:
            _skip(self._why)
        return self._model

    @property
    def params(self) -> Any:
        if self._why is not None:
            _skip(self._why)
        return self._params

    @property
    def batches(self) -> dict[str, dict[str, Tensor]]:
        """By name: plain, packed, padded and embedded rows."""
        if self._why is not None:
            _skip(self._why)
        plain = {"input_ids": self.tokens, "labels": self.tokens}
        restarting = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
        mask = {name: torch.ones(2, SEQ, dtype=torch.int64) for name in ("left_padded", "right_padded")}
        mask["left_padded"][1, : SEQ - REAL] = 0
        mask["right_padded"][1, REAL:] = 0
        positions = {name: (x.cumsum(-1) - 1).clamp(min=0) for name, x in mask.items()}
        width = self.module.get_input_embeddings().weight.shape[-1] if hasattr(self.module, "config") else 0
        embeds = torch.randn(2, SEQ, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        return {
            "plain": plain,
            "packed": {**plain, "position_ids": restarting},
            "embeds": {"inputs_embeds": embeds, "labels": self.tokens},
            **{
                name: {
                    "input_ids": self.tokens,
                    "labels": self.tokens.masked_fill(x == 0, -100),
                    "attention_mask": x,
                    "position_ids": positions[name],
                }
                for name, x in mask.items()
            },
        }

    @property
    def branches(self) -> str | None:
        """Why simulated ranks cannot run it together; None where they can."""
        return self.model.apply.proof.branches

    def reference(self, name: str) -> Any:
        """(Output, gradients) of the unsharded function, computed once a batch."""
        if name not in self._references:
            try:
                self._references[name] = value_and_grad(self.model)(self.params, self.batches[name])
            except ValueError as error:
                _skip(f"refused: {error}")
        return self._references[name]

    def own(self, tokens: Tensor, attention: str = "eager", *, grad: bool = False) -> Tensor:
        """The logits of the module's own forward."""
        if self._why is not None:
            _skip(self._why)
        module = self.module
        if attention != "eager":
            try:
                module = tiny_module(module.config, attention=attention)
            except ValueError as error:
                _skip(f"not constructible: {_line(error)}")
        with torch.set_grad_enabled(grad):
            logits = module(input_ids=tokens, use_cache=False).logits
        if tuple(logits.shape[:2]) != tuple(tokens.shape):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}")
        return logits


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _skip(reason: str) -> NoReturn:
    import pytest  # needed where tests run, and nowhere else

    pytest.skip(reason)


def _refused_on_processes(module: Any, sizes: dict[str, Any], reason: str) -> None:
    found = launch(partial(_refusal_here, module, sizes), num_processes=2)
    assert found == [reason, reason], found


def _refusal_here(module: Any, sizes: dict[str, Any]) -> str | None:
    """What this process says; None if it does not refuse."""
    try:
        with wide():
            model, _ = functional(module)
            transform(model, **sizes, mesh=_mesh(sizes))
    except ValueError as error:
        return str(error)
    return None


def _values_here(module: Any, sizes: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """(Output, gradients) of this process."""
    with wide():
        model, params = functional(module)
        return value_and_grad(transform(model, **sizes, mesh=_mesh(sizes)))(params, batch)


def _axes(sizes: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if type(size) is int}


def _mesh(sizes: dict[str, Any]) -> Any:
    axes = _axes(sizes)
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

"""Faulty adapters, each put in on purpose: a test of ContextParallelTesterMixin fails, or the proof refuses.

Each is a fault that a wrapper around somebody's modules really has: an argument that is swallowed, a number that is
counted in the slice, a state that starts again on every rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import huggingface
from fcp.huggingface import _functional, _interfaces, _skeleton
from tests.huggingface.modules import mixin_of, passes

pytest.importorskip("transformers")

Patch = Callable[[pytest.MonkeyPatch], None]


def forgets(**forgotten: Any) -> Patch:
    """The attention that the adapter calls is not given some of what the module gave."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = _interfaces.attend

        def attend(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **{name: x for name, x in kwargs.items() if name not in forgotten}, **forgotten)

        monkeypatch.setattr(_functional, "register", partial(_register, attend))

    return patch


def swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    real, known = _interfaces.attend, ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal")

    def attend(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{name: x for name, x in kwargs.items() if name in known})

    monkeypatch.setattr(_functional, "register", partial(_register, attend))


def _register(attend: Any) -> None:
    from transformers import AttentionInterface

    huggingface._interfaces.register()  # type: ignore[attr-defined]
    AttentionInterface.register(_interfaces.NAME, attend)


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    """The registries are the process's."""
    _interfaces.register()
    yield
    _interfaces.register()


def words(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = _interfaces.words_of
        monkeypatch.setattr(_interfaces, "words_of", lambda function: change(*real(function)))

    return patch


def counts_in_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _functional.Call

    def call(ops: Any, mask: Any, positions: Tensor) -> Any:
        return real(ops, mask, torch.arange(positions.shape[-1]).expand(positions.shape))

    monkeypatch.setattr(_functional, "Call", call)


def changes_mask(change: Callable[[Any], Any]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = _functional.Call
        monkeypatch.setattr(_functional, "Call", lambda ops, mask, positions: real(ops, change(mask), positions))

    return patch


def counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_functional, "_first_positions", lambda module: [0])


def splits_a_tied_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets storage of its own, as sharding each module by itself does."""
    real = _functional.bare_parameters

    def parameters(module: Any) -> dict[str, Tensor]:
        table = module.get_output_embeddings().weight
        return {**real(module), "lm_head.weight": table.detach().clone()}

    monkeypatch.setattr(_functional, "bare_parameters", parameters)


def detaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather without an adjoint: what a layer is handed does not learn."""
    real = _skeleton.Unit.__call__

    def call(self: Any, params: Any, *args: Any) -> Any:
        held = {name: x.detach() if "norm" in name else x for name, x in params.items()}
        return real(self, held, *args)

    monkeypatch.setattr(_skeleton.Unit, "__call__", call)


MUTANTS: dict[str, tuple[str, dict[str, Any], Patch, str]] = {
    "window dropped": ("gemma2", {}, words(lambda window, chunk: (None, chunk)), "test_function_is_module_eager"),
    "window one too long": (
        *("cohere2", {}, words(lambda window, chunk: (window and window + 1, chunk))),
        "test_function_is_module_eager",
    ),
    "chunk taken for a window": (
        *("llama4_text", {}, words(lambda window, chunk: (chunk, None))),
        "test_function_is_module_eager",
    ),
    "scale dropped": ("granite", {}, forgets(scaling=None), "test_function_is_module_eager"),
    "soft cap dropped": ("gemma2", {}, forgets(softcap=None), "test_function_is_module_eager"),
    "sinks dropped": ("gpt_oss", {}, forgets(s_aux=None), "test_function_is_module_eager"),
    "unknown argument swallowed": ("inkling_text", {}, swallows, "test_function_is_module_eager"),
    "positions of the slice": ("gpt2", {}, counts_in_the_slice, "test_cp"),
    "rotary positions of the slice": ("llama", {}, counts_in_the_slice, "test_cp_packed"),
    "positions from the wrong first one": ("roberta", {}, counts_from_zero, "test_function_is_module_eager"),
    "documents dropped": (
        *("llama", {}, changes_mask(lambda mask: fcp.masks.describe(torch.arange(mask.seq).expand(2, -1)))),
        "test_packed_is_each_document_alone",
    ),
    "padding seen": (
        *("qwen3", {}, changes_mask(lambda mask: fcp.masks.describe(torch.arange(mask.seq).expand(2, -1)))),
        "test_left_padded_is_rows_alone",
    ),
    "tied weight split": ("llama", {"tie_word_embeddings": True}, splits_a_tied_pair, "test_gradients_are_the_modules"),
    "a gradient lost": ("llama", {}, detaches, "test_gradients_are_the_modules"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_adapter_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model_type, changes, patch, test = MUTANTS[name]
    patch(monkeypatch)
    with pytest.raises((AssertionError, pytest.skip.Exception)) as caught:
        getattr(mixin_of(model_type, **changes), test)()
    if isinstance(caught.value, pytest.skip.Exception):  # refused, where without the fault it is not
        monkeypatch.undo()
        _interfaces.register()
        passes(mixin_of(model_type, **changes), test)

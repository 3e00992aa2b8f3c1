"""Tiny modules of transformers by model type, and the mixin's tests as functions."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp.testing import ContextParallelTesterMixin, tiny_config, tiny_module


def config_of(model_type: str, **changes: Any) -> Any:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def module_of(model_type: str, **changes: Any) -> Any:
    """In float64, in evaluation mode, every parameter random."""
    return tiny_module(config_of(model_type, **changes))


def tokens() -> Tensor:
    """[2, 12], none of them special."""
    return torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def mixin_of(model_type: str, **changes: Any) -> Any:
    """The mixin's tests of one model type, as methods to call."""
    made = {"config": staticmethod(partial(config_of, model_type, **changes)), "on_processes": False}
    return type("Mixed", (ContextParallelTesterMixin,), made)()


def passes(mixed: Any, *tests: str) -> None:
    """Runs these tests of a mixin; one that is skipped, because the model is refused, has not passed."""
    for test in tests:
        try:
            getattr(mixed, test)()
        except pytest.skip.Exception as skipped:
            pytest.fail(f"{test}: {skipped}")

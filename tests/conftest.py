"""Shape annotations become checks in every test; ranks share this process, so one thread is enough and repeatable."""

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

# Before anything imports fcp: the hook rewrites modules as they are first imported.
install_import_hook(["fcp", "models"], "beartype.beartype")

torch.set_num_threads(1)


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """The registry of attention kernels, and which of them were checked, put back afterwards."""
    from fcp import _kernel_check, kernels

    before, checked = dict(kernels._registry), set(_kernel_check._checked)
    yield kernels._registry
    kernels._registry.clear()
    kernels._registry.update(before)
    _kernel_check._checked.clear()
    _kernel_check._checked.update(checked)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shape annotations off, as they are for users: the library's own message is what is tested."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

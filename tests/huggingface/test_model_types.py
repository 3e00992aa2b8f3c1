"""Every causal language model type of the installed transformers, under cp, tp and fsdp, or refused with the reason.

The types of `CONTEXT_PARALLEL_TEST_MODEL_TYPES` run in the suite; all of them run in the session `sweep_hf`, which also
writes SUPPORT.md. None: all of them run in the suite.
"""

from functools import partial
from typing import Any

import pytest

import fcp
from fcp.testing import ContextParallelTesterMixin, tiny_config, tiny_module

transformers = pytest.importorskip("transformers")

CONTEXT_PARALLEL_TEST_MODEL_TYPES: tuple[str, ...] | None = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "cohere2", "phi3", "gpt2", "gpt_neox", "gpt_oss"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "llama4_text", "olmo2", "smollm3"),
)


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _class_of(model_type: str) -> Any:
    quick = CONTEXT_PARALLEL_TEST_MODEL_TYPES is None or model_type in CONTEXT_PARALLEL_TEST_MODEL_TYPES
    made = {
        "config": staticmethod(partial(tiny_config, model_type)),
        "on_processes": False,  # below, for all at once
        "pytestmark": [] if quick else [pytest.mark.sweep_hf],
    }
    return type(f"Test[{model_type}]", (ContextParallelTesterMixin,), made)


for _type in model_types():
    globals()[f"Test_{_type}"] = _class_of(_type)


# --- the same words on every process ----------------------------------------------------------------------------------

REFUSED = ("mamba", "rwkv", "bloom", "roformer", "llama")
"""Some that are refused, each for another reason, and one that is not."""


def refusals(types: tuple[str, ...], *, processes: bool) -> dict[str, str | None]:
    """What is said of cp=2 for each model type; None where it is not refused."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)) if processes else None
    found: dict[str, str | None] = {}
    for model_type in types:
        try:
            module = tiny_module(tiny_config(model_type))
        except Exception:  # not constructible, which the tests of the type say
            continue
        try:
            fcp.transform(fcp.huggingface.functional(module)[0], cp=2, mesh=mesh)
            found[model_type] = None
        except ValueError as error:
            found[model_type] = str(error)
    return found


@pytest.mark.parametrize(
    "types", [REFUSED, pytest.param(tuple(model_types()), marks=pytest.mark.sweep_hf)], ids=["some", "all"]
)
def test_processes_refuse_what_the_simulator_refuses(types: tuple[str, ...]) -> None:
    """A refusal that one rank alone comes to leaves the others waiting."""
    expected = refusals(types, processes=False)
    assert [name for name in REFUSED if expected.get(name) is None] == ["llama"]
    assert fcp.launch(partial(refusals, types, processes=True), num_processes=2) == [expected, expected]

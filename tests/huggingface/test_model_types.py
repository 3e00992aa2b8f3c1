"""Every causal language model type of the installed transformers, under cp, tp and fsdp, or refused with the reason.

The types of `CONTEXT_PARALLEL_TEST_MODEL_TYPES` run in the suite; all of them run in the session `sweep_hf`, which also
writes SUPPORT.md. None: all of them run in the suite.
"""

from functools import partial
from typing import Any

import pytest

from fcp.testing import ContextParallelTesterMixin, tiny_config

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

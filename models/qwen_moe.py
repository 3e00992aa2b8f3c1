"""Qwen2-MoE and Qwen3-MoE: the families of `models.mixtral` under their own name.

    Qwen2-MoE   Yang et al. 2024, section 2.2.2     a shared expert behind a gate; `tiny(model_type="qwen2_moe")`
    Qwen3-MoE   Yang et al. 2025, section 2         norms on each query and key head; `tiny()`

What they compute differs from Mixtral in a setting or two, which `models.mixtral` reads off the config.
"""

from typing import Any

from fcp.model import Model
from models import mixtral
from models.mixtral import Config, config_from_json, config_to_json, load, model, save

__all__ = ["Config", "config_from_json", "config_to_json", "load", "model", "save", "tiny"]


def tiny(**overrides: Any) -> Model:
    """A small Qwen3-MoE, or Qwen2-MoE with `model_type="qwen2_moe"`."""
    return mixtral.tiny(**{"model_type": "qwen3_moe", **overrides})

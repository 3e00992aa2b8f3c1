"""The equivalence grid: what is crossed with what. `test_grid.py` runs a seeded sample of it, and under `-m sweep` all.

Sizes are chosen to be awkward: 11 tokens (no cp divides them, so every cp pads), 2 rows, a vocabulary of 61 (no tp
divides it), documents that cross shard edges, and head counts that cp divides, exceeds, or does not divide.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import fcp
from models import deepseek, gemma, gpt2, gpt_neox, gpt_oss, llama, llama4
from tests.toys import batch_of, gradient, randomized, tokens

BATCH, SEQ, VOCAB = 2, 11, 61

LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "mistral": {"model_type": "mistral"},
    "qwen2": {
        "model_type": "qwen2",
        "max_position_embeddings": 6,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "qwen3": {"model_type": "qwen3"},
    "smollm": {"tie_word_embeddings": True},
}

Make = Callable[[int, int, dict[str, Any]], fcp.Model]


def _llama(family: str) -> Make:
    return lambda heads, kv_heads, windows: llama.tiny(
        **{**LLAMAS[family], **windows}, **LIKE_LLAMA, num_attention_heads=heads, num_key_value_heads=kv_heads
    )


def _gpt2(heads: int, kv_heads: int, windows: dict[str, Any]) -> fcp.Model:
    return gpt2.tiny(vocab_size=VOCAB, n_embd=4 * heads, n_head=heads, n_inner=24, n_positions=SEQ)


def _gpt_neox(heads: int, kv_heads: int, windows: dict[str, Any]) -> fcp.Model:
    return gpt_neox.tiny(vocab_size=VOCAB, hidden_size=4 * heads, num_attention_heads=heads, intermediate_size=24)


def _llama4(heads: int, kv_heads: int, windows: dict[str, Any]) -> fcp.Model:
    return llama4.tiny(**LIKE_LLAMA, num_attention_heads=heads, num_key_value_heads=kv_heads, num_experts_per_tok=2)


def _deepseek(heads: int, kv_heads: int, windows: dict[str, Any]) -> fcp.Model:
    return deepseek.tiny(vocab_size=VOCAB, num_attention_heads=heads, intermediate_size=24)


def _gpt_oss(heads: int, kv_heads: int, windows: dict[str, Any]) -> fcp.Model:
    return gpt_oss.tiny(
        **{"sliding_window": None, "layer_types": None, **windows},
        **LIKE_LLAMA,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def _gemma(family: str) -> Make:
    return lambda heads, kv_heads, windows: gemma.tiny(
        **{"sliding_window": None, "layer_types": None, **windows},
        **LIKE_LLAMA,
        model_type=family,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


LIKE_LLAMA: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": 24, "head_dim": 4}

FAMILIES: dict[str, Make] = {
    **{name: _llama(name) for name in LLAMAS},
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma("gemma2"),
    "gemma3_text": _gemma("gemma3_text"),
    "llama4": _llama4,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""(query heads, kv heads, what a config says of windows) -> the model; one without grouped heads has the former."""

NO_WINDOWS = ("llama4", "deepseek_v3", "gpt2", "gpt_neox")

MASKS = ("causal", "packed", "left pad", "right pad", "window", "packed window", "mixed layers")

MESHES: tuple[dict[str, int], ...] = (
    {"cp": 2},
    {"cp": 3},
    {"cp": 4},
    {"cp": 8},
    {"tp": 2},
    {"tp": 4},
    {"fsdp": 2},
    {"dp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "fsdp": 2},
    {"cp": 2, "tp": 2, "fsdp": 2},
)

WAYS: tuple[dict[str, Any], ...] = (
    {"cp": 2, "cp_impl": "ring"},
    {"cp": 3, "cp_impl": "ring", "layout": "zigzag"},
    {"cp": 2, "cp_impl": "ring", "layout": "balanced"},
    {"cp": 4, "cp_impl": "ring"},
    {"cp": 4, "cp_impl": "ring", "layout": "balanced"},
    {"cp": 8, "cp_impl": "ring", "layout": "zigzag"},
    {"cp": 2, "cp_impl": "gather"},
    {"cp": 4, "cp_impl": "gather", "layout": "zigzag"},
    {"cp": 3, "cp_impl": "gather", "layout": "balanced"},
    {"cp": (2, 2)},
    {"cp": (2, 2), "layout": "zigzag"},
    {"cp": (2, 3), "layout": "balanced"},
    {"cp": (2, 2), "cp_impl": "gather"},
    {"cp": 2, "tp": 2, "cp_impl": "ring", "layout": "zigzag"},
    {"cp": 2, "fsdp": 2, "cp_impl": "ring", "layout": "balanced"},
    {"cp": 2, "dp": 2, "cp_impl": "ring"},
    {"cp": (2, 2), "fsdp": 2},
    {"cp": 2, "tp": 2, "fsdp": 2, "cp_impl": "gather"},
)
"""Other ways to attend across slices than Ulysses, and orders in which ranks hold the sequence."""

HEADS = ((8, 4), (6, 2), (9, 3), (4, 1))
"""Query and kv heads: cp divides both; kv heads below cp; counts that cp does not divide; one kv head for all."""


@dataclass(frozen=True)
class Case:
    """`mesh` is what `fcp.transform` is asked for: sizes of axes, and how their ranks attend."""

    family: str
    mask: str
    mesh: tuple[tuple[str, Any], ...]
    heads: tuple[int, int]

    @property
    def ranks(self) -> int:
        sizes = (size for _, size in self.mesh if not isinstance(size, str))
        return math.prod(math.prod(size) if isinstance(size, tuple) else size for size in sizes)

    @property
    def name(self) -> str:
        mesh = "x".join(f"{name}{size}".replace(", ", "_") for name, size in self.mesh)
        return f"{self.family}-{self.mask.replace(' ', '_')}-{mesh}-{self.heads[0]}q{self.heads[1]}kv"


def cases(meshes: tuple[dict[str, Any], ...] = MESHES) -> list[Case]:
    """Every case; a tp that does not divide the heads is refused, which is tested elsewhere."""
    return [
        Case(family, mask, tuple(mesh.items()), heads)
        for heads in HEADS
        for family in FAMILIES
        for mask in MASKS
        for mesh in meshes
        if all(count % mesh.get("tp", 1) == 0 for count in heads)
        and not (family in NO_WINDOWS and ("window" in mask or mask == "mixed layers"))
    ]


def sample(count: int, seed: int = 0, *, meshes: tuple[dict[str, Any], ...] = MESHES) -> list[Case]:
    """A seeded sample that holds every family, mask, mesh and head count at least once."""
    everything = cases(meshes)
    random.Random(seed).shuffle(everything)
    chosen: list[Case] = []
    seen: set[Any] = set()
    for case in everything:
        parts = {case.family, case.mask, case.mesh, case.heads}
        if parts - seen:
            chosen.append(case)
            seen |= parts
    rest = [case for case in everything if case not in chosen]
    return (chosen + rest)[:count]


BASIC: tuple[dict[str, int], ...] = ({"cp": 2}, {"cp": 3}, {"cp": 4}, {"tp": 2}, {"fsdp": 2}, {"cp": 2, "tp": 2})


def basic(families: tuple[str, ...], seed: int = 0) -> list[Case]:
    """For each of the families one case of each basic mesh, the masks and head counts drawn."""
    draw, every = random.Random(seed), cases()
    return [
        draw.choice([case for case in every if case.family == family and dict(case.mesh) == mesh])
        for family in families
        for mesh in BASIC
    ]


@cache
def model_of(family: str, mask: str, heads: tuple[int, int]) -> tuple[fcp.Model, Any]:
    windows: dict[str, Any] = {}
    if "window" in mask:
        windows["sliding_window"] = 3
    if mask == "mixed layers":
        windows.update(sliding_window=3, layer_types=("full_attention", "sliding_attention"))
    model = FAMILIES[family](*heads, windows)
    return model, randomized(model)


def batch(mask: str) -> dict[str, Any]:
    ids = tokens(BATCH, SEQ, vocab=VOCAB)
    if "packed" in mask:
        return batch_of(ids, position_ids=torch.tensor([[*range(3), *range(8)], [*range(7), *range(4)]]))
    if mask.endswith("pad"):
        lengths = torch.tensor([[6], [SEQ]])
        row = torch.arange(SEQ)
        real = row < lengths if mask == "right pad" else row >= SEQ - lengths
        return batch_of(ids, attention_mask=real.long())
    return batch_of(ids)


@cache
def reference(family: str, mask: str, heads: tuple[int, int]) -> tuple[fcp.Output, Any]:
    """The unsharded function's output and, by torch.func.grad, its gradients."""
    model, params = model_of(family, mask, heads)
    return model(params, batch(mask)), gradient(model, params, batch(mask))

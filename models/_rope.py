"""Rotary position embeddings and their scalings (Su et al. 2021, section 3.4), shared by the families.

Everything here is computed from position ids, never from a local length. One scaling, "dynamic", depends on how long
the sequence is: it reads `num_positions`, counted once on the whole batch, because a slice would take its own.

The formulas are those of transformers' `modeling_rope_utils`, which checkpoints were made for, with two differences.
Tables of a float64 model are float64 (transformers' are float32 at the widest). And "dynamic" is a function of the
batch at hand, where a transformers module keeps the longest stretch it has met until a sequence fits the original
length again.

A head may be rotated in part (`apply_partial_rope`), or in pairs of neighbours (`apply_rope_to_pairs`), where the
default pairs its first half with its second. The tables are the same.

Left out: "longrope", which is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["apply_partial_rope", "apply_rope", "apply_rope_to_pairs", "check_rope", "rope_tables"]

TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What each scaling needs."""

OPTIONAL = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
}
"""What else it reads; any other key is refused, because it would be passed over."""


def check_rope(scaling: Mapping[str, Any] | None) -> None:
    """Raises ValueError for a scaling that is not among `TYPES`, lacks a number, or has one that is not read."""
    if not scaling:
        return
    kind = rope_type(scaling)
    if kind not in TYPES:
        raise ValueError(f"rope_scaling: type {kind!r} is not supported; supported are {', '.join(TYPES)}")
    given = {name: value for name, value in scaling.items() if name not in ("rope_type", "type") and value is not None}
    if given.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("rope_scaling: partial_rotary_factor: this family rotates whole heads")
    missing = [name for name in TYPES[kind] if name not in given]
    unknown = [name for name in given if name not in (*TYPES[kind], *OPTIONAL.get(kind, ()))]
    wrong = [f"needs {', '.join(missing)}"] * bool(missing) + [f"does not read {', '.join(unknown)}"] * bool(unknown)
    wrong += [
        f"{name} {value!r} is no positive number"
        for name, value in given.items()
        if name not in (*unknown, "truncate")
        and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0)
    ]
    if kind == "llama3" and not wrong and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        wrong.append("high_freq_factor is not above low_freq_factor")
    if wrong:
        raise ValueError(f"rope_scaling: type {kind!r}: {'; '.join(wrong)}")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    scaling = scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"  # older files say "type"


def rope_tables(
    positions: Int[Tensor, "batch seq"],
    num_positions: Int[Tensor, ""],
    *,
    dim: int,
    theta: float,
    max_position_embeddings: int,
    scaling: Mapping[str, Any] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "batch 1 seq dim"], Float[Tensor, "batch 1 seq dim"]]:
    """cos and sin of each position's angles, computed in float32 or wider and given in `dtype`.

    Args:
        positions: position ids.
        num_positions: the largest position id of the whole batch, plus one.
        dim: the size of a head.
        theta: the base wavelength.
        max_position_embeddings: the length the model was made for.
        scaling: config.json's `rope_scaling`, or None.
        dtype: of the result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim
    kind = rope_type(scaling)
    factor = float((scaling or {}).get("factor") or 1.0)
    gain = 1.0
    if kind == "dynamic":
        length = num_positions.clamp(min=max_position_embeddings).to(wide)
        stretch = factor * length / max_position_embeddings - (factor - 1)
        frequency = (theta * stretch ** (dim / (dim - 2))) ** -exponent
    else:
        frequency = theta**-exponent
    if kind == "linear":
        frequency = frequency / factor
    elif kind == "yarn":
        assert scaling is not None
        frequency, gain = _yarn(frequency, scaling, dim, theta, max_position_embeddings)
    elif kind == "llama3":
        assert scaling is not None
        frequency = _llama3(frequency, scaling)
    angles = positions[..., None].to(wide) * frequency
    angles = torch.cat([angles, angles], -1)[:, None]
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def _llama3(frequency: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])


def _yarn(frequency: Tensor, scaling: Mapping[str, Any], dim: int, theta: float, length: int) -> tuple[Tensor, float]:
    """Frequencies by parts, and the gain on cos and sin (Peng et al. 2023, sections 3.2 and 3.4)."""
    original = scaling.get("original_max_position_embeddings") or length
    factor = scaling["factor"]

    def pair(turns: float) -> float:
        """The pair of dims that makes this many turns over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(float(scaling.get("beta_fast") or 32)), pair(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, device=frequency.device, dtype=frequency.dtype)
    # Where no pair makes as much as one turn, high falls below low and every pair counts as a fast one.
    stretched = ((index - low) / ((high - low) or 0.001)).clamp(0, 1)

    def gain(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given, mscale, mscale_all = (scaling.get(n) for n in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is None:
        given = gain(float(mscale)) / gain(float(mscale_all)) if mscale and mscale_all else gain(1.0)
    return frequency * (1 - stretched) + frequency / factor * stretched, float(given)


def apply_rope(
    x: Float[Tensor, "batch heads seq dim"],
    cos: Float[Tensor, "batch 1 seq dim"],
    sin: Float[Tensor, "batch 1 seq dim"],
) -> Float[Tensor, "batch heads seq dim"]:
    """Rotates each pair (x_i, x_{i + dim/2}) by its position's angle."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def apply_partial_rope(
    x: Float[Tensor, "batch heads seq dim"],
    cos: Float[Tensor, "batch 1 seq rotated"],
    sin: Float[Tensor, "batch 1 seq rotated"],
) -> Float[Tensor, "batch heads seq dim"]:
    """Rotates the first dims of each head, as many as the tables have; the rest stays."""
    rotated = cos.shape[-1]
    return torch.cat([apply_rope(x[..., :rotated], cos, sin), x[..., rotated:]], -1)


def apply_rope_to_pairs(
    x: Float[Tensor, "batch heads seq dim"],
    cos: Float[Tensor, "batch 1 seq dim"],
    sin: Float[Tensor, "batch 1 seq dim"],
) -> Float[Tensor, "batch heads seq dim"]:
    """Rotates each pair of neighbours (x_2i, x_{2i + 1}) by its position's angle."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

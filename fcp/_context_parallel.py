"""Ways of attending across slices of the sequence, by name: the registry behind `cp_impl`, and how one is chosen.

    name       what travels for a layer, forward and backward       a rank attends with        heads
    ulysses    q, k, v and the output, there and back               its heads of the sequence  padded to a multiple
    ring       k and v twice, their gradients once, in float32      one slice after another    any
    gather     k and v once, their gradients once, in float32       the whole sequence's keys  any

`volume` gives these in bytes. "auto" compares them: ulysses where no more than an eighth of the heads it computes is
padding; gather where the keys of the whole sequence are no more than a rank's own queries; ring always. The least
bytes win.

Ulysses within and ring across (`cp=(2, 4)`, the first fastest) is the same two transforms over two axes: Ulysses' ranks
are few, near each other, and bounded by the heads; the ring's are many (Fang and Zhao 2024, section 3).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fcp.axes import Axes
from fcp.sharded import Sharded
from fcp.transforms._gather import gather
from fcp.transforms._ring import ring
from fcp.transforms._ulysses import plan, ulysses
from fcp.typing import ModelFn

__all__ = ["Choice", "choose", "context_parallel", "cp_impls", "register_cp", "volume"]

_registry: dict[str, Callable[..., Sharded]] = {"ulysses": ulysses, "ring": ring, "gather": gather}
cp_impls: Mapping[str, Callable[..., Sharded]] = MappingProxyType(_registry)
"""The registered ways of attending across slices, by name."""


def register_cp(name: str, transform: Callable[..., Sharded]) -> None:
    """Adds a way of attending across slices of the sequence, to be asked for as `fcp.transform(..., cp_impl=name)`.

    Args:
        name: what to call it.
        transform: (model_fn, *, axis) -> model function, like `fcp.ulysses`: it replaces `Ops.attention` by one that
            is handed a slice of the queries, keys and values, and the mask of the whole sequence.

    Raises:
        ValueError: the name is taken, or `transform` does not take `axis` by name.
    """
    if name in _registry or name == "auto":
        raise ValueError(f"register_cp: {name!r} is taken; registered are {', '.join(_registry)}, and auto chooses")
    if not callable(transform) or "axis" not in inspect.signature(transform).parameters:
        raise ValueError(f"register_cp: {transform!r} is no transform (model_fn, *, axis) -> model function")
    _registry[name] = transform


def context_parallel(model_fn: ModelFn, impl: str, within: Axes | None, across: Axes | None) -> ModelFn:
    """`model_fn` attending across slices: by `impl` over `across`; with `within`, Ulysses over that first."""
    if within is not None:
        model_fn = ulysses(model_fn, axis=within)
    return model_fn if across is None else _registry[impl](model_fn, axis=across)


@dataclass(frozen=True)
class Choice:
    """What "auto" chose, its layout, and why."""

    impl: str
    layout: str
    why: str


def volume(impl: str, heads: int, kv_heads: int, head_dim: int, size: int, *, itemsize: int = 2) -> int:
    """The bytes that one rank sends for one layer and one token of its slice, forward and backward.

    Args:
        impl: "ulysses", "ring" or "gather".
        heads, kv_heads: the query heads, and the key and value heads, of one tp rank.
        head_dim: of all of them.
        size: the number of ranks.
        itemsize: bytes of a number of q, k and v; sums of gradients travel in 4 or more.
    """
    kept, wide = head_dim * itemsize, head_dim * max(itemsize, 4)
    if impl == "ulysses":
        spread = plan(heads, kv_heads, size)
        return 2 * (size - 1) * 2 * (spread.heads + spread.kv_heads) // size * kept  # size divides both
    if impl == "ring":
        return (size - 1) * 2 * kv_heads * (2 * kept + wide)  # where every rank sees some of every block
    if impl == "gather":
        return (size - 1) * 2 * kv_heads * (kept + wide)
    raise ValueError(f"volume: no formula for {impl!r}; there is one for ulysses, ring and gather")


def choose(config: Any, size: int, tp: int, layout: str | None = None) -> Choice:
    """What `cp_impl="auto"` is for a model of this config; `layout` is the order that was asked for, if one was."""
    found, ordered = _heads(config), layout not in (None, "contiguous")
    if found is None:
        why = "the config names no number of attention heads, and it serves any"
        return Choice("ring", layout or "zigzag", why) if ordered else Choice("ulysses", "contiguous", why)
    heads, kv_heads, head_dim = found[0] // tp, max(1, found[1] // tp), found[2]
    able = ["ring"]
    words = [f"{heads} query heads and {kv_heads} of keys and values on each of {size} ranks"]
    padded = plan(heads, kv_heads, size).heads
    if ordered:
        words.append(f"layout={layout!r} is for ranks that keep their own queries, and under ulysses none does")
    elif 8 * padded <= 9 * heads:
        able.insert(0, "ulysses")
    if padded > heads:
        words.append(f"ulysses pads the query heads to {padded}")
    if kv_heads * size <= heads:
        able.append("gather")
    else:
        words.append("the keys of the whole sequence, which gather holds, would be more than a rank's queries")
    bytes_of = {impl: volume(impl, heads, kv_heads, head_dim, size) for impl in able}
    impl = min(able, key=lambda name: bytes_of[name])
    told = ", ".join(f"{name} {count:,}" for name, count in bytes_of.items())
    words.append(f"bytes sent a token, layer and rank in bfloat16: {told}")
    return Choice(impl, layout or ("contiguous" if impl == "ulysses" else "zigzag"), "; ".join(words))


def _heads(config: Any) -> tuple[int, int, int] | None:
    """Query heads, key and value heads, and their width, as far as a config says."""

    def first(*names: str) -> int | None:
        found = (getattr(config, name, None) for name in names)
        return next((n for n in found if isinstance(n, int)), None)

    heads = first("num_attention_heads", "n_head")
    if heads is None:
        return None
    width = first("head_dim") or (first("hidden_size", "n_embd") or heads) // heads
    return heads, first("num_key_value_heads") or heads, width

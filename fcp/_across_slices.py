"""What every way of attending across slices of the sequence has in common: `ulysses`, `ring`, `gather`, a user's own.

Each replaces `Ops.attention` by one that brings the slices of an axis together. Two faults would otherwise pass without
a word: a model in which nothing attends through `ops.attention`, whose tokens see their own slice alone; and layers
that carry a state along the sequence, which nothing hands from one slice to the next.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fcp.axes import Axes, names_of
from fcp.masks import Mask
from fcp.ops import Attention, Ops
from fcp.sharded import Sharded, base_model
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["Across", "across_slices", "check_slices"]

Across = Callable[..., Tensor]
"""An `Ops.attention` that is handed slices, and always the mask."""

_STATEFUL = {"linear", "lightning", "recurrent", "mamba", "mamba2", "ssm", "conv", "hybrid", "rwkv", "retention"}


def across_slices(
    model_fn: ModelFn, name: str, axis: Axes, replaced: Callable[[Attention, Axes], Attention]
) -> Sharded:
    """The transform `name` whose attention over `axis` is `replaced(attention, axis)`.

    Raises:
        ValueError: the config lists layers that carry a state along the sequence; or, when called, the model never
            calls `ops.attention`, or calls it without the mask.
    """
    stateful = sorted({kind for kind in _layer_kinds(base_model(model_fn)) if _STATEFUL & set(kind.split("_"))})
    if stateful:
        raise ValueError(
            f"{name}: the config has layers of kind {', '.join(stateful)}. They carry a state along the sequence, and "
            f"nothing hands it from one slice of axis {axis!r} to the next; split the batch or the parameters instead."
        )

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        called: list[bool] = []
        across = replaced(ops.attention, axis)

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **options: Any) -> Tensor:
            called.append(True)
            if mask is None:
                raise ValueError(f"{name}: attention needs the mask of the whole sequence; pass inputs.mask")
            return across(q, k, v, mask, **options)

        out = inner(params, inputs, replace(ops, attention=attention))
        if not called:
            raise ValueError(
                f"{name}: the model never called ops.attention, so nothing brought the slices of axis {axis!r} "
                f"together. Call ops.attention in the model, or leave {name} out if no token looks at another."
            )
        return out

    return Sharded(model_fn, f"{name}({' x '.join(names_of(axis))})", run)


def check_slices(user: str, q: Tensor, k: Tensor, mask: Mask, size: int) -> None:
    """Raises ValueError where q and k are not equal slices, one for each of `size` ranks, of what `mask` describes."""
    if q.shape[2] != k.shape[2] or q.shape[2] * size != mask.seq:
        raise ValueError(
            f"{user}: {q.shape[2]} queries and {k.shape[2]} keys on each of {size} ranks, of a sequence of {mask.seq}; "
            f"each rank has one slice of the sequence. Compose it with shard_seq over the same axis."
        )


def _layer_kinds(model: Any) -> list[str]:
    """The kinds of layers that a config names, by any of the names that config.json files use."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("layer_types", "layers_block_type", "block_types"))
    return [kind for kinds in found if isinstance(kinds, list | tuple) for kind in kinds if isinstance(kind, str)]

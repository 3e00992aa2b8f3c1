"""What of `fcp.transform` spends compute to hold less memory: no logits, tiles of tokens, layers computed again.

Each is a transform like the others: it replaces Ops and names itself, and moves nothing. They lie outside of those that
spread the model over ranks (except `drop_logits`, whose loss these replace), so they wrap what a rank does.

    logits=False     the logits leave no function, and a large loss is made in tiles of tokens (`_tiled_loss.py`)
    loss_tile=       how many tokens such a tile has
    mlp_tile=        the MLP's activations, several times the width of the layer's, live for one tile
    remat=           what of a layer backward finds, and what it computes again (`remat.py`)
    offload=         where a layer's input waits for backward (`_host.py`)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fcp.ops import Ops
from fcp.remat import POLICIES, in_tiles_of_tokens, rematerialize
from fcp.sharded import Sharded
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["check_memory", "drop_logits", "remat_layers", "tile_mlp"]


def check_memory(
    remat: str | bool, offload: bool, logits: bool, loss_tile: int | None, mlp_tile: int | None, mesh: Any
) -> str:
    """The policy's name ("nothing" for False, "layer" for True).

    Raises:
        ValueError: an unknown policy; tiles of no token; a tiled loss where logits are asked for; offload where nothing
            is computed again, or where the ranks are processes on CPUs.
    """
    policy = {True: "layer", False: "nothing"}.get(remat, remat) if isinstance(remat, bool) else remat
    known = ("nothing", *sorted(POLICIES))
    if policy not in known:
        raise ValueError(f"transform: remat={remat!r}; the policies are {', '.join(map(repr, known))}")
    for name, tile in (("loss_tile", loss_tile), ("mlp_tile", mlp_tile)):
        if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
            raise ValueError(f"transform: {name}={tile!r} must be a number of tokens, 1 or more")
    if loss_tile is not None and logits:
        raise ValueError(
            f"transform: loss_tile={loss_tile}, and the logits of all tokens are asked for; pass logits=False"
        )
    if offload and policy == "nothing":
        raise ValueError("transform: offload=True moves what remat keeps of a layer, its input; choose a remat policy")
    if offload and getattr(mesh, "device_type", None) == "cpu":
        raise ValueError("transform: offload=True on a mesh of CPUs, whose activations are on the host already")
    return str(policy)


def drop_logits(model_fn: ModelFn, loss_tile: int | None) -> Sharded:
    """No logits; the loss in tiles of `loss_tile` tokens, None for as many as are worth it."""
    more: dict[str, Any] = {"logits": False} if loss_tile is None else {"logits": False, "tile": loss_tile}

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        return inner(params, inputs, replace(ops, loss=partial(ops.loss, **more)))

    return Sharded(model_fn, "drop_logits" if loss_tile is None else f"tile_loss({loss_tile})", run)


def tile_mlp(model_fn: ModelFn, tile: int) -> Sharded:
    """What a model hands to `ops.tokenwise`, `tile` tokens at a time."""

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        called: list[bool] = []

        def tokenwise(fn: Callable[[Params, Tensor], Tensor], params: Params, x: Tensor) -> Tensor:
            called.append(True)
            return in_tiles_of_tokens(partial(ops.tokenwise, fn), params, x, tile)

        out = inner(params, inputs, replace(ops, tokenwise=tokenwise))
        if not called:
            raise ValueError(
                f"transform: mlp_tile={tile}, and the model never called ops.tokenwise, so nothing was done in tiles. "
                f"Leave mlp_tile out, or call the model's MLPs through ops.tokenwise(fn, params, x)."
            )
        return out

    return Sharded(model_fn, f"tile_mlp({tile})", run)


def remat_layers(model_fn: ModelFn, policy: str, offload: bool) -> Sharded:
    """Every call of `ops.layer` computed again in backward, but for what the policy keeps."""

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        if offload and inputs.positions.device.type != "cuda":
            raise ValueError(
                f"transform: offload=True, and the batch is on {inputs.positions.device}: activations are on the host "
                f"already. Leave offload out."
            )

        def layer(fn: Callable[..., Any], layer_params: Params, *args: Any) -> Any:
            whole = partial(ops.layer, fn)
            return rematerialize(whole, policy=policy, offload=offload)(layer_params, *args)

        return inner(params, inputs, replace(ops, layer=layer))

    name = "remat" if policy == "layer" else f"remat({policy})"
    return Sharded(model_fn, name + (" on host" if offload else ""), run)

"""`fcp.transform`: the door. It validates every size against the model, then composes the transforms in one order.

By hand the same thing is a line of its own,

    fcp.simulate(fcp.shard_params(fcp.ulysses(fcp.shard_seq(model, axis="cp"), axis="cp"), axis="tp"), cp=2, tp=2)

and any order of the transforms gives the same function. What the door adds: the refusals, each before a tensor moves;
the usual wiring (cp is shard_seq and a way to attend across slices; fsdp splits the batch and stores parameters over
fsdp x cp; remat wraps each layer; the logits may be left out); and a record of what was applied.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch

from fcp._context_parallel import context_parallel
from fcp._ep_view import EpView, check_experts, view
from fcp._memory import check_memory, drop_logits, remat_layers, tile_mlp
from fcp._transformed import Transformed
from fcp._validate import check_cp, check_mesh, check_model, check_rows
from fcp.axes import Axes
from fcp.ops import Ops
from fcp.sharded import Placement, Shapes, Sharded, base_model
from fcp.transforms._experts import experts
from fcp.transforms._shard_batch import shard_batch
from fcp.transforms._shard_params import shard_params
from fcp.transforms._shard_seq import shard_seq
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["transform"]


def transform(
    model_fn: ModelFn,
    *,
    cp: int | tuple[int, int] = 1,
    tp: int = 1,
    fsdp: int = 1,
    dp: int = 1,
    ep: int = 1,
    ep_plan: Literal["dispatch", "all_reduce"] = "dispatch",
    cp_impl: str | None = None,
    layout: Literal["contiguous", "zigzag", "balanced"] | None = None,
    remat: Literal["nothing", "attention", "layer"] | bool = "nothing",
    offload: bool = False,
    logits: bool = True,
    loss_tile: int | None = None,
    mlp_tile: int | None = None,
    kernel: str = "auto",
    rows: Literal["all", "own"] = "all",
    reduce_dtype: torch.dtype | None = None,
    mesh: Any = None,
) -> Transformed:
    """Spreads a model function over ranks; loss, logits and every gradient stay those of the function.

    Args:
        model_fn: a `Model`, or any model function (see `fcp.typing.ModelFn`); tp needs a model with rules.
        cp: context parallelism: ranks that share one sequence (`shard_seq`, and `ulysses` or another `cp_impl`). Two
            numbers are Ulysses within and a ring across: of cp=(2, 4), `axes` names cp_ring=4 and cp_ulysses=2.
        tp: tensor parallelism: ranks that share each matrix, by the model's rules (`shard_params`).
        fsdp: ranks that store the parameters in pieces, over fsdp x cp, and compute different rows (`shard_params`,
            `shard_batch`).
        dp: ranks that compute different rows with whole parameters (`shard_batch`); with fsdp this is HSDP.
        ep: ranks that share the experts, a view of fsdp x cp x tp with the fastest names first (`experts`); the rest of
            that product stores each expert in pieces. An axis that ep covers in part is split: of fsdp=4 under ep=2,
            `axes` names fsdp=2 and fsdp_ep=2.
        ep_plan: "dispatch" sends tokens to the ranks of their experts; "all_reduce" sums what each rank's experts make
            of tokens that tp ranks share (ep equal to tp).
        cp_impl: how attention brings the slices of the sequence together: "ulysses" (by default), "ring" (by default
            where cp is two numbers: it is then the one across), "gather", a name given to `register_cp`, or "auto",
            which compares heads and bytes; `Transformed.why` says what it found.
        layout: the order in which the ranks hold the sequence (`shard_seq`): "contiguous" by default; "zigzag" or
            "balanced" give ranks that keep their own queries equal work, which under Ulysses they have already. With
            cp_impl="auto" it is chosen too, unless given.
        remat: what of a layer backward computes again: "nothing"; "layer", all of it; "attention", all but what the
            attention kernel gave. True and False stand for "layer" and "nothing".
        offload: the input of each layer that is computed again lies in pinned host memory until backward (CUDA, and
            first derivatives by `fcp.value_and_grad`).
        logits: False leaves `Output.logits` None, and makes a loss of many logits in tiles of tokens: those of all
            tokens never lie in memory, and second derivatives are refused.
        loss_tile: the tokens of such a tile, whatever the number of logits. None: as many as have 2^25 logits.
        mlp_tile: what an MLP computes on the way lives for this many tokens at a time, and is computed again in
            backward (of models that call `ops.tokenwise`). None: for all tokens.
        kernel: the attention kernel ("auto", "fused", "reference", or a registered one).
        rows: "own", on processes: each rank of dp and fsdp is handed its own rows alone (any number), and the ranks
            of a cp or tp group the same ones; the logits are those of the own rows. The loss is that of all.
        reduce_dtype: the dtype in which the ranks' parameter gradients are summed and travel (float32 for bfloat16
            parameters, say); a gradient comes back in its parameter's dtype. None: the parameter's.
        mesh: a torch DeviceMesh whose dimensions are named as the axes, in any order, and have their sizes: the ranks
            are its processes. Every process passes the same parameters and batch, and gets the whole loss, logits and
            gradients. None: the ranks are simulated in this process.

    Raises:
        ValueError: a size that is no positive integer; tp without rules, or one that the model's heads, widths or
            layers do not divide by; ep without experts, one that does not divide them, covers no whole view, or whose
            plan needs tokens that are not shared; an unknown kernel or remat policy; tiles of no tokens, or of a loss
            whose logits are asked for; offload where activations are on the host already; a model with dropout; a model
            that was transformed already; a mesh of other names or sizes; rows of its own where no process is handed
            any; an unknown cp_impl or layout, one without a cp, or an order that would change nothing.

    >>> import fcp, torch
    >>> from models import llama
    >>> model = llama.tiny()
    >>> params, ids = model.init(seed=0), torch.arange(10)[None]
    >>> sharded = fcp.transform(model, cp=2, tp=2)
    >>> sharded
    Transformed(cp=2, tp=2: shard_seq(cp) . ulysses(cp) . shard_params(tp))
    >>> batch = {"input_ids": ids, "labels": ids}
    >>> bool(torch.isclose(sharded(params, batch).loss, model(params, batch).loss))
    True
    """
    ulysses_size, ring_size = cp if isinstance(cp, tuple) and len(cp) == 2 else (cp, None)
    given = {"cp": ulysses_size} if ring_size is None else {"cp_ring": ring_size, "cp_ulysses": ulysses_size}
    sizes: dict[str, Any] = {"dp": dp, "fsdp": fsdp, **given, "tp": tp}
    check_model(model_fn, {**sizes, "ep": ep}, kernel)
    how = check_cp(base_model(model_fn), cp, tp, cp_impl, layout)
    policy = check_memory(remat, offload, logits, loss_tile, mlp_tile, mesh)
    split = check_rows(rows, sizes, mesh)
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ValueError(f"transform: reduce_dtype={reduce_dtype!r}; gradients are summed in a floating dtype")
    group = view(sizes, ep)
    check_experts(base_model(model_fn), group, ep, ep_plan)
    if mesh is not None:
        mesh = _split_mesh(mesh, sizes, group)
    parts = group.parts
    slow, fast = (_several(parts[name], group) for name in ("cp_ring", "cp_ulysses")) if ring_size else ((), ())
    whole = slow + fast if ring_size else _several(parts["cp"], group)  # the axes that split the sequence
    fn = model_fn if logits else drop_logits(model_fn, loss_tile)
    if tp > 1:
        fn = shard_params(fn, axis="tp")
    order = tuple(group.sizes) if mesh is None else mesh.mesh_dim_names  # several axes of a mesh are named in its order
    if ep > 1:
        names = tuple(name for name in order if name in group.names)
        fn = experts(fn, axis=names, plan=ep_plan, shared=tuple(name for name in names if name == "tp"))
    if fsdp > 1:
        stored = tuple(name for name in order if name in _several(parts["fsdp"], group) + whole)
        fn = shard_params(fn, axis=stored, how="gather")
    if whole:
        across = slow if ring_size else whole
        fn = context_parallel(
            fn, how.impl, within=_one(fast) if fast else None, across=_one(across) if across else None
        )
        fn = shard_seq(fn, axis=_one(whole), layout=cast(Any, how.layout))
    for axis in ("fsdp", "dp"):
        if sizes[axis] > 1:
            fn = shard_batch(fn, axis=_one(parts[axis]), rows=rows)
    if reduce_dtype is not None:
        fn = _sum_in(fn, reduce_dtype)
    if mlp_tile is not None:
        fn = tile_mlp(fn, mlp_tile)
    if policy != "nothing":
        fn = remat_layers(fn, policy, offload)  # outside of the gathers: what is computed again does not gather again
    if kernel != "auto":
        fn = _use_kernel(fn, kernel)
    own = tuple(name for axis in split for name in parts[axis])
    return Transformed(fn, {name: size for name, size in group.sizes.items() if size > 1}, mesh, own, how.why)


def _one(names: tuple[str, ...]) -> Axes:
    return names[0] if len(names) == 1 else names


def _several(names: tuple[str, ...], group: EpView) -> tuple[str, ...]:
    return tuple(name for name in names if group.sizes[name] > 1)


def _split_mesh(mesh: Any, sizes: Mapping[str, int], group: EpView) -> Any:
    """The mesh with cp as two dimensions where it is two axes, and every axis that the expert group covers in part.

    Raises:
        ValueError: its dimensions have other names or sizes than the axes.
    """
    hybrid = tuple(name for name in ("cp_ring", "cp_ulysses") if name in sizes)
    asked = {name: size for name, size in sizes.items() if name not in hybrid}
    if hybrid:
        asked["cp"] = math.prod(sizes[name] for name in hybrid)
    check_mesh(mesh, asked)
    if hybrid and "cp" in mesh.mesh_dim_names:
        mesh = _unflattened(mesh, "cp", {name: sizes[name] for name in hybrid})
    for name, parts in group.parts.items():
        if len(parts) > 1:
            mesh = _unflattened(mesh, name, {part: group.sizes[part] for part in parts})
    return mesh


def _unflattened(mesh: Any, name: str, sizes: dict[str, int]) -> Any:
    """`mesh` with its dimension `name` as several. It is made once and lives as long as the mesh: its groups have
    threads of their own, and a function that is transformed often would gather them."""
    made = mesh.__dict__.setdefault("_fcp_unflattened", {})
    key = (name, *sizes.items())
    if key not in made:
        made[key] = mesh._unflatten(name, tuple(sizes.values()), tuple(sizes))
    return made[key]


def _sum_in(model_fn: ModelFn, dtype: torch.dtype) -> Sharded:
    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        return inner(params, inputs, ops)

    def place(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
        return {path: replace(p, sum_dtype=dtype) for path, p in placements.items()}

    return Sharded(model_fn, f"sum_in({str(dtype).removeprefix('torch.')})", run, place)


def _use_kernel(model_fn: ModelFn, kernel: str) -> Sharded:
    """Outermost: the attention that every other transform wraps."""

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        local: Any = ops.attention  # fcp.attention, which alone of all Ops.attention takes a kernel
        return inner(params, inputs, replace(ops, attention=partial(local, kernel=kernel)))

    return Sharded(model_fn, f"kernel({kernel})", run)

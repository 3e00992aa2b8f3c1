"""The simulator: the ranks of an axis as one vmapped dimension of this process.

`simulate(fn, cp=2, tp=2)` is `fn` with the names bound. An axis is bound by vmapping its rank index alone; everything
that enters is unbatched, the same for all ranks, and becomes varying only where a collective makes it so. Work on
values that are the same on every rank is therefore done once, not once a rank, and a simulated step costs about what
the plain one does.

What leaves must be the same on every rank. A loss that is still varying is a forgotten `psum`; a gradient taken
inside the map that is still varying is a forgotten `pvary`. Both are errors here that name the axis, where on real
processes they would be wrong numbers. One forgotten pvary leaves nothing varying and is not seen: that of a value with
which all ranks do the same work, whose results a psum then counts once a rank. The gradients taken inside the map and
outside it then differ.

`map_ranks` is the one place that opens a vmap level. It also gives back which outputs are batched, which
rematerialisation needs to bind an axis again around a function that it replays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp.axes import Axis, bind, bound, varying

__all__ = ["map_ranks", "simulate"]


def simulate(fn: Callable[..., Any], **sizes: int) -> Callable[..., Any]:
    """Binds axis names to `sizes` simulated ranks around `fn`: global values in, global values out.

    Args:
        fn: any function of pytrees of tensors; under the names it may call the collectives.
        **sizes: axis name = number of ranks; the first is the outermost level (no result depends on the order).

    Returns:
        A function of the same signature. Its tensors are what every rank holds.

    Raises:
        ValueError: a size below 1, a name that is bound already, an axis that nothing in `fn` used, or an output that
            differs between the ranks.

    >>> import fcp, torch
    >>> mean = fcp.simulate(lambda x: fcp.psum(fcp.shard(x, "cp", dim=0).sum(), "cp") / 4, cp=2)
    >>> mean(torch.arange(4.0))
    tensor(1.5000)
    """
    if not sizes:
        raise ValueError("simulate: name at least one axis, as in fcp.simulate(fn, cp=2)")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"simulate: {name}={size!r} must be a number of ranks, 1 or more")

    @functools.wraps(fn, updated=())
    def simulated(*args: Any, **keywords: Any) -> Any:
        again = [name for name in sizes if name in bound()]
        if again:
            raise ValueError(f"simulate: axis {again[0]!r} is bound already around this call; give it another name")
        run: Callable[..., Any] = functools.partial(fn, **keywords)
        for name, size in reversed(sizes.items()):
            run = functools.partial(_over_one_axis, run, name, size)
        return run(*args)

    return simulated


def _over_one_axis(fn: Callable[..., Any], name: str, size: int, *args: Any) -> Any:
    used: list[str] = []
    spec: Any = None
    paths: list[str] = []

    def flat() -> list[Any]:
        nonlocal spec, paths
        out = fn(*args)
        found, spec = pytree.flatten(out)
        paths = pytree.paths(out)
        return found

    found, dims = map_ranks(flat, name, size, (), (), used)
    still = [path or "the result" for path, dim in zip(paths, dims, strict=True) if dim is not None]
    if still:
        raise ValueError(
            f"simulate: {', '.join(still[:4])}{', ...' if len(still) > 4 else ''} still varies over axis {name!r}: "
            f"every rank would return another value. For a loss, a psum is missing: fcp.psum(loss, {name!r}). For a "
            f"slice, join it: fcp.unshard(x, {name!r}, dim=...). For a gradient taken inside the map, a pvary is "
            f"missing: fcp.pvary(parameter, {name!r}) before the work that differs between the ranks."
        )
    if size > 1 and not used:
        raise ValueError(
            f"simulate: nothing consumed axis {name!r}: no collective named it, so its {size} ranks did the same work. "
            f"Apply a transform over {name!r}, or leave the axis out."
        )
    return pytree.unflatten(spec, found)


def map_ranks(
    fn: Callable[..., Sequence[Any]],
    name: str,
    size: int,
    args: Sequence[Any],
    in_dims: Sequence[int | None],
    used: list[str] | None = None,
) -> tuple[list[Any], list[int | None]]:
    """Runs `fn(*args)` with axis `name` bound to a new vmap level of `size` ranks.

    `in_dims` says which dim of each argument is the rank dim (None: the same for all ranks). Returns the outputs with
    their rank dims: 0 where an output varies, None where it is the same on every rank and so comes out as it is.
    """
    if size == 1:
        with bind(Axis(name, 1, used=used if used is not None else [])):
            found = list(fn(*args))
        return found, [None] * len(found)
    outputs: list[Any] = []
    dims: list[int | None] = []

    def per_rank(index: Tensor, *inner: Any) -> tuple[Tensor, ...]:
        with bind(Axis(name, size, index, used=used if used is not None else [])):
            outputs.extend(fn(*inner))
            dims.extend(0 if isinstance(x, Tensor) and name in varying(x) else None for x in outputs)
        # A tensor that is not batched at this level may leave it as it is; the index only gives vmap something to map.
        return index, *(x for x, dim in zip(outputs, dims, strict=True) if dim is not None)

    _, *batched = torch.func.vmap(per_rank, in_dims=(0, *in_dims))(torch.arange(size), *args)
    rest = iter(batched)
    return [x if dim is None else next(rest) for x, dim in zip(outputs, dims, strict=True)], dims

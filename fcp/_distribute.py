"""The processes: the ranks of an axis as the processes along one dimension of a torch DeviceMesh.

`distribute(fn, mesh)` is `fn` with the mesh's dimension names bound: the same lines that run under `simulate`, global
values in, global values out, each rank computing its part. torch.distributed is the engine: its launcher starts the
processes, its groups carry the collectives (gloo on CPU, NCCL on CUDA).

Every rank passes the same parameters and the same batch, and differentiates its own function: the gradients that it
gets are whole and the same on every rank, because each adjoint in the function sums what has to be summed. The
simulator shows beforehand, by differentiating inside, whether they would be.

A rank that raises, dies or stalls ends the call on every other rank (`_watch.py`).

Left out: that ranks really pass the same values is not checked here, but by `fcp.transform` (`_agree.py`).
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from fcp._watch import explained, watch_of
from fcp.axes import Axis, bind, bound

__all__ = ["distribute"]


def distribute(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Binds the dimension names of a DeviceMesh around `fn`, so that its collectives run between processes.

    Args:
        fn: any function that calls the collectives under the mesh's dimension names.
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with `mesh_dim_names`; every process calls with the same.

    Returns:
        A function of the same signature, to be called by every process of the mesh.

    Raises:
        ValueError: the mesh has no names; a name is bound already; or, after the call, a dimension of several ranks
            that nothing in `fn` used.
        RankError: when called, if another rank raised, died or did not come; it says which, and in which collective.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise ValueError("distribute: the mesh has no mesh_dim_names; give each dimension the name of its axis")

    @functools.wraps(fn, updated=())
    def distributed(*args: Any, **keywords: Any) -> Any:
        again = [name for name in names if name in bound()]
        if again:
            raise ValueError(f"distribute: axis {again[0]!r} is bound already around this call; give it another name")
        watch_of()
        axes = []
        for dim, name in enumerate(names):
            size = mesh.size(dim)
            index = None if size == 1 else torch.tensor(mesh.get_local_rank(name))
            axes.append(Axis(name, size, index, mesh))
        with contextlib.ExitStack() as stack:
            for axis in axes:
                stack.enter_context(bind(axis))
            try:
                out = fn(*args, **keywords)
            except (ValueError, NameError):  # what callers get wrong, all ranks alike
                raise
            except BaseException as error:
                known = explained(error)
                if known is error:
                    raise
                raise known from error
        idle = [axis for axis in axes if axis.size > 1 and not axis.used]
        if idle:
            raise ValueError(
                f"distribute: nothing consumed axis {idle[0].name!r}: no collective named it, so its {idle[0].size} "
                f"ranks did the same work. Apply a transform over {idle[0].name!r}, or leave it out of the mesh."
            )
        return out

    return distributed

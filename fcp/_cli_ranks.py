"""The ranks of a command: simulated in this process, or the processes of a launcher (torchrun).

Every command that computes takes the same words for them. On processes one rank speaks and the others work in silence,
but for what they refuse, and a mesh that does not have as many ranks as the launcher started is refused on all.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fcp._cli_args import AXES, seconds
from fcp._launch import process_group

__all__ = ["add_ranks", "ranks"]


def add_ranks(add: Any) -> None:
    """Adds the flags that say where the ranks are; `add` is a parser's `add_argument`."""
    add("--distributed", action="store_true", help="the ranks are the launcher's processes (torchrun), not simulated")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="seconds that a rank waits for another (600)")


@contextlib.contextmanager
def ranks(command: str, distributed: bool, timeout: float, meshes: list[dict[str, int]]) -> Iterator[list[Any]]:
    """A DeviceMesh for each mesh, on the processes of the launcher; None for each where ranks are simulated.

    Args:
        command: whose ranks they are, for what is refused.
        distributed: whether they are processes.
        timeout: seconds that a collective waits for a rank.
        meshes: axis name to size, each.
    """
    if not distributed:
        yield [None] * len(meshes)
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"--distributed needs a launcher: torchrun --nproc-per-node N -m fcp {command} ... --distributed"
        )
    world = int(os.environ["WORLD_SIZE"])
    wrong = [sizes for sizes in meshes if _ranks_of(sizes) != world or world == 1]
    with process_group(timeout, "gloo"):
        if wrong:
            dist.barrier()  # the launcher ends all ranks when the first has ended: let each be here to say why
            raise ValueError(
                f"--distributed: {wrong[0]} is a mesh of {_ranks_of(wrong[0])} ranks, and the launcher started "
                f"{world} processes; start as many as the mesh has ranks, 2 or more"
            )
        names = [tuple(axis for axis in AXES if axis in sizes) for sizes in meshes]
        shapes = [tuple(sizes[axis] for axis in order) for sizes, order in zip(meshes, names, strict=True)]
        made = [init_device_mesh("cpu", s, mesh_dim_names=n) for s, n in zip(shapes, names, strict=True)]
        with contextlib.ExitStack() as stack:
            if dist.get_rank():
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
                stack.enter_context(contextlib.redirect_stderr(silence))
            yield made


def _ranks_of(sizes: dict[str, int]) -> int:
    return math.prod(size for name, size in sizes.items() if name in AXES)

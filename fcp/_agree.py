"""Do all processes ask for the same thing? Found out before a collective would mix what does not belong together.

A global-in function is handed the same batch and parameters of the same shapes on every rank. If one rank reads another
row, nothing fails: its slice of the sequence is cut from another text, and attention joins the two. If one rank's
tensors have another shape, a collective hangs or fills its result with what lies in memory.

So each call first gathers a fingerprint from every rank: 16 bytes of what the batch holds, and 16 of the shapes and
dtypes of the parameters. Where they differ, every rank raises the same ValueError, which names the ranks that differ
from the first.

Left out: the values of the parameters (hashing them would cost more than the step), and those of input embeddings.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fcp import pytree
from fcp._process import group_of
from fcp.axes import bare
from fcp.typing import Inputs, Params

__all__ = ["check_agreement"]

WHAT = ("batch", "parameters (their names, shapes or dtypes)")


def check_agreement(mesh: Any, params: Params, inputs: Inputs) -> None:
    """Raises the same ValueError on every process of `mesh` if they were handed differing batches or parameters."""
    # Under torch.func.grad every operation's result is wrapped, and what is wrapped has no bytes to read.
    with temporarily_clear_interpreter_stack():
        by_rank = _gathered(mesh, params, inputs)
    for part, what in enumerate(WHAT):
        differing = [rank for rank, each in enumerate(by_rank) if each[part] != by_rank[0][part]]
        if differing:
            raise ValueError(
                f"transform: the ranks {differing} of the mesh were handed another {what} than rank 0. Every rank "
                f"passes the same global ones; which part of them is its own, the transforms decide."
            )


def _gathered(mesh: Any, params: Params, inputs: Inputs) -> list[list[list[int]]]:
    """[rank][batch, parameters] -> the fingerprint."""
    mine = torch.tensor(_fingerprint(inputs, values=True) + _fingerprint(params, values=False))
    group = group_of(mesh, tuple(mesh.mesh_dim_names))
    everyone = torch.empty(dist.get_world_size(group) * 4, dtype=torch.int64, device=mesh.device_type)
    dist.all_gather_single(everyone, mine.to(mesh.device_type), group)
    return everyone.view(-1, 2, 2).tolist()


def _fingerprint(tree: Any, *, values: bool) -> list[int]:
    """Two 64-bit numbers of the tree's paths, shapes and dtypes, and of the integers that it holds."""
    digest = hashlib.blake2b(digest_size=16)
    for path, x in zip(pytree.paths(tree), pytree.leaves(tree), strict=True):
        digest.update(f"{path} {tuple(x.shape)} {x.dtype};".encode())
        if values and not x.is_floating_point():
            digest.update(bare(x).cpu().contiguous().numpy().tobytes())
    first, second = digest.digest()[:8], digest.digest()[8:]
    return [int.from_bytes(half, "big", signed=True) for half in (first, second)]

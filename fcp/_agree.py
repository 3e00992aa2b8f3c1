"""Do all processes ask for the same thing? Found out before a collective would mix what does not belong together.

A global-in function is handed the same batch and parameters of the same shapes on every rank. If one rank reads another
row, nothing fails: its slice of the sequence is cut from another text, and attention joins the two. If one rank's
tensors have another shape, a collective hangs or fills its result with what lies in memory.

So each call first gathers a fingerprint from every rank: 16 bytes of what the batch holds, and 16 of the shapes and
dtypes of the parameters. Where they differ, every rank raises the same ValueError, which names the ranks that differ.

The ranks of an axis that splits rows (dp, fsdp) may each be handed their own rows alone. Then only the ranks that share
rows must agree, and what a loss needs to know of the whole batch (how many targets, how long a row) travels along. But
all pass as many micro-batches (else they would wait for each other in different collectives), and one count of targets.

Left out: the values of the parameters (hashing them would cost more than the step), and those of input embeddings.
"""

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fcp import pytree
from fcp._process import group_of
from fcp._watch import collective
from fcp.axes import bare
from fcp.typing import Inputs, Params

__all__ = ["agree"]

GLOBAL = "Every rank passes the same global ones; which part of them is its own, the transforms decide."
OWN_ROWS = "Each rank of dp and fsdp passes its own rows, and the ranks that share rows (cp, tp) pass the same."
WHAT = {  # each with the way out
    "another transform (its axes, sizes or options)": GLOBAL,
    "other parameters (their names, shapes or dtypes)": GLOBAL,
    "another number of micro-batches": "Each rank takes part in every one: pass as many, of any sizes.",
    "another num_items_in_batch": "It counts the targets of all ranks together: pass the same, or none.",
    "another batch": GLOBAL,
}


def agree(
    mesh: Any,
    params: Params,
    inputs: Inputs,
    *,
    what: str,
    own: tuple[str, ...] = (),
    counted: bool = True,
    micro_batch: tuple[int, int] = (0, 1),
) -> Inputs:
    """The batch as every process sees it, when all were handed what belongs together.

    Args:
        mesh: the DeviceMesh of the processes.
        params: what this process was handed as parameters, or as its shards.
        inputs: what it was handed as batch: the whole one, or the rows of its own rank on the axes `own`.
        what: what this process is about to compute: the transforms and the mesh.
        own: the axes whose ranks were each handed their own rows.
        counted: `inputs.num_targets` counts these rows alone; False where the caller gave the count of all.
        micro_batch: which micro-batch of a step the inputs are, and of how many.

    Returns:
        The inputs, `num_targets` and `num_positions` those of the whole batch.

    Raises:
        ValueError: the same on every process, naming the ranks that were handed another batch than those with whom they
            share it, other parameters, another transform, or another number of micro-batches or targets.
    """
    # Under torch.func.grad every operation's result is wrapped, and what is wrapped has no bytes to read.
    with temporarily_clear_interpreter_stack():
        mine = [
            _digest(what.encode()),
            _fingerprint(params, values=False),
            list(micro_batch),
            [0, 0] if counted else [1, int(bare(inputs.num_targets))],
            _fingerprint(inputs, values=True),
            [int(bare(inputs.num_targets)), int(bare(inputs.num_positions))],
        ]
        by_rank = _gathered(mesh, mine)
    # The ranks in the mesh's order; those with one index on every axis of `own` share rows.
    names, sizes = mesh.mesh_dim_names, [mesh.size(dim) for dim in range(mesh.ndim)]
    places = [dict(zip(names, place, strict=True)) for place in itertools.product(*map(range, sizes))]
    first: dict[tuple[int, ...], int] = {}
    shares = [first.setdefault(tuple(place[name] for name in own), rank) for rank, place in enumerate(places)]
    for part, (kind, way_out) in enumerate(WHAT.items()):
        like = shares if kind == "another batch" else [0] * len(shares)
        differing = [rank for rank, other in enumerate(like) if by_rank[rank][part] != by_rank[other][part]]
        if differing:
            others = sorted({like[rank] for rank in differing})
            whose = f"rank {others[0]}" if len(others) == 1 else f"the ranks {others}"
            rule = OWN_ROWS if own and kind == "another batch" else way_out
            raise ValueError(f"transform: the ranks {differing} of the mesh were handed {kind} than {whose}. {rule}")
    if not own:
        return inputs
    counts = [by_rank[rank][-1] for rank in first.values()]
    like = inputs.num_targets
    return replace(
        inputs,
        num_targets=like.new_tensor(sum(targets for targets, _ in counts)) if counted else inputs.num_targets,
        num_positions=like.new_tensor(max(positions for _, positions in counts)),
    )


def _gathered(mesh: Any, pairs: list[list[int]]) -> list[list[list[int]]]:
    """[rank in the mesh's order][its pairs]."""
    mine = torch.tensor(pairs).view(-1).to(mesh.device_type)
    # Ranks that disagree on the mesh would not find each other in a group of the mesh; the world's is there for all.
    world = mesh.size() == dist.get_world_size()
    group = dist.group.WORLD if world else group_of(mesh, tuple(mesh.mesh_dim_names))
    everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
    with collective("the agreement", tuple(mesh.mesh_dim_names)):
        dist.all_gather_single(everyone, mine, group)
    by_rank = everyone.view(-1, len(pairs), 2).tolist()
    return [by_rank[rank] for rank in mesh.mesh.flatten().tolist()] if world else by_rank


def _fingerprint(tree: Any, *, values: bool) -> list[int]:
    """Two 64-bit numbers of the tree's paths, shapes and dtypes, and of the integers that it holds."""
    digest = hashlib.blake2b(digest_size=16)
    for path, x in zip(pytree.paths(tree), pytree.leaves(tree), strict=True):
        digest.update(f"{path} {tuple(x.shape)} {x.dtype};".encode())
        if values and not x.is_floating_point():
            digest.update(bare(x).cpu().contiguous().numpy().tobytes())
    return _halves(digest)


def _digest(data: bytes) -> list[int]:
    return _halves(hashlib.blake2b(data, digest_size=16))


def _halves(digest: Any) -> list[int]:
    both = digest.digest()
    return [int.from_bytes(half, "big", signed=True) for half in (both[:8], both[8:])]

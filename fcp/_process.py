"""What a collective does on real processes: the last column of the table, on torch.distributed.

A row arrives with this process's tensor alone. Where the row's `dense` map needs all ranks' tensors (a join), they are
gathered with the rank dim in front and `dense` is called on them, so that the layout has one definition for simulator
and processes. The others have a collective of their own: a sum, a scattered sum, an exchange.

A reduction is always SUM. Several axes are one flattened group of the mesh, its ranks in the mesh's order; so a tuple
of names must be in that order.

Left out: overlap, but for what is asked for ahead of its use (`start_gather`, `start_permute`). Each other call waits.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments would keep the world's
from torch import Tensor

from fcp._selfcheck import check_once
from fcp._watch import collective, watch_of

if TYPE_CHECKING:
    from fcp._collective import Rule

__all__ = ["group_of", "on_processes", "start_gather", "start_permute"]


def on_processes(rules: "Sequence[Rule]", xs: Sequence[Tensor], mesh: Any, names: tuple[str, ...]) -> list[Tensor]:
    """This process's result of a collective of each tensor, over the dimensions `names` of `mesh`, in one exchange.

    Raises:
        ValueError: the names are not in the mesh's order, or several tensors differ in dtype.
    """
    name = rules[0].name
    if name == "pvary":
        return [x.view_as(x) for x in xs]
    if name == "shard":
        return [_own(x, rule.dims[0], group_of(mesh, names)) for x, rule in zip(xs, rules, strict=True)]
    if len({x.dtype for x in xs}) > 1:
        raise ValueError(
            f"{name}: tensors that travel together have one dtype, not {sorted({str(x.dtype) for x in xs})}"
        )
    group = group_of(mesh, names)
    with collective(name, names):
        check_once(rules[0], xs[0], group, _one)
        return [_one(rules[0], xs[0], group)] if len(xs) == 1 else _several(rules, xs, group)


def _own(x: Tensor, dim: int, group: Any) -> Tensor:
    return x.unflatten(dim, (dist.get_world_size(group), -1)).select(dim, dist.get_rank(group)).contiguous()


def _several(rules: "Sequence[Rule]", xs: Sequence[Tensor], group: Any) -> list[Tensor]:
    size = dist.get_world_size(group)
    match rules[0].name:
        case "psum":
            flat = torch.cat([x.reshape(-1).to(rules[0].travels_in(x)) for x in xs])
            dist.all_reduce(flat, dist.ReduceOp.SUM, group)
            summed = flat.to(xs[0].dtype).split([x.numel() for x in xs])
            return [part.view(x.shape) for part, x in zip(summed, xs, strict=True)]
        case "all_gather":
            whole = [x.new_empty(size * x.numel()) for x in xs]
            for waiting in [_gather(x, flat, group) for x, flat in zip(xs, whole, strict=True)]:
                waiting.wait()
            stacked = [flat.view(size, *x.shape) for flat, x in zip(whole, xs, strict=True)]
            return [rule.dense(x, size, rule) for x, rule in zip(stacked, rules, strict=True)]
        case "psum_scatter" | "all_to_all":
            parts = [x.unflatten(r.dims[0], (size, -1)).movedim(r.dims[0], 0) for x, r in zip(xs, rules, strict=True)]
            ends = list(itertools.accumulate((part[0].numel() for part in parts), initial=0))
            columns = [slice(start, end) for start, end in itertools.pairwise(ends)]
            rows = xs[0].new_empty(size, ends[-1], dtype=rules[0].travels_in(xs[0]))  # [to, ...]
            for part, column in zip(parts, columns, strict=True):
                rows[:, column].unflatten(1, part.shape[1:]).copy_(part)
            if rules[0].name == "psum_scatter":
                mine = rows.new_empty(ends[-1])
                dist.reduce_scatter_single(mine, rows.view(-1), dist.ReduceOp.SUM, group)
                mine = mine.to(xs[0].dtype)
                return [mine[column].view(part.shape[1:]) for part, column in zip(parts, columns, strict=True)]
            arrived = torch.empty_like(rows)  # [sender, ...]
            dist.all_to_all_single(arrived.view(-1), rows.view(-1), group=group)
            found = [
                arrived[:, column].unflatten(1, part.shape[1:]) for part, column in zip(parts, columns, strict=True)
            ]
            return [
                y.movedim(0, r.dims[1]).flatten(r.dims[1], r.dims[1] + 1) for y, r in zip(found, rules, strict=True)
            ]
    raise TypeError(f"{rules[0].name}: no rule for several tensors on processes")


def _one(rule: "Rule", x: Tensor, group: Any) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    match rule.name:
        case "psum" | "pmax":
            y = x.to(rule.travels_in(x), copy=True, memory_format=torch.contiguous_format)
            dist.all_reduce(y, dist.ReduceOp.SUM if rule.name == "psum" else dist.ReduceOp.MAX, group)
            return y.to(x.dtype)
        case "unshard" | "all_gather":
            gathered = x.new_empty(size * x.numel())  # flat: what a backend makes of more dims is its own
            dist.all_gather_single(gathered, x.reshape(-1), group)
            return rule.dense(gathered.view(size, *x.shape), size, rule)
        case "psum_scatter":
            (dim,) = rule.dims
            parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).to(rule.travels_in(x)).contiguous()
            y = torch.empty_like(parts[0])
            dist.reduce_scatter_single(y.view(-1), parts.view(-1), dist.ReduceOp.SUM, group)
            return y.to(x.dtype)
        case "all_to_all":
            split, concat = rule.dims
            parts = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
            arrived = torch.empty_like(parts)  # [sender, ...]
            dist.all_to_all_single(arrived.view(-1), parts.view(-1), group=group)
            return arrived.movedim(0, concat).flatten(concat, concat + 1)
        case "ppermute":
            return _permute(rule, x.contiguous(), group, rank)
    raise TypeError(f"{rule.name}: no rule for processes")


def _permute(rule: "Rule", x: Tensor, group: Any, rank: int) -> Tensor:
    y, waiting = _send(rule, x, group, rank)
    for work in waiting:
        work.wait()
    return y


def _send(rule: "Rule", x: Tensor, group: Any, rank: int) -> tuple[Tensor, list[Any]]:
    """What will hold the tensor that arrives here (zeros where none does), and what to wait for before it does."""
    sends = [target for source, target in rule.perm if source == rank]
    receives = [source for source, target in rule.perm if target == rank]
    if sends == receives == [rank]:
        return x.clone(), []
    y = torch.empty_like(x) if receives else torch.zeros_like(x)
    ranks = dist.get_process_group_ranks(group)
    waiting = [dist.P2POp(dist.isend, x, ranks[target], group) for target in sends]
    waiting += [dist.P2POp(dist.irecv, y, ranks[source], group) for source in receives]
    return y, dist.batch_isend_irecv(waiting) if waiting else []


def start_permute(rule: "Rule", x: Tensor, mesh: Any, names: tuple[str, ...]) -> Callable[[], Tensor]:
    """Issues a permutation; gives what waits for it and hands over what arrived.

    Ranks issue those of one group in the same order, so that the messages between two of them match.
    """
    group = group_of(mesh, names)
    with collective(rule.name, names):
        check_once(rule, x, group, _one)
        x = x.contiguous()
        y, waiting = _send(rule, x, group, dist.get_rank(group))

    def wait() -> Tensor:
        with collective(rule.name, names):
            for work in waiting:
                work.wait()
        return y

    return wait


def start_gather(rule: "Rule", x: Tensor, whole: Tensor, mesh: Any, names: tuple[str, ...]) -> Callable[[], None]:
    """Issues the gather of every process's `x`, one after the other, into the flat `whole`; gives what waits for it.

    `rule` is the row of the table that this carries out.
    """
    group = group_of(mesh, names)
    with collective(rule.name, names):
        check_once(rule, x, group, _one)
    waiting = _gather(x, whole, group)

    def wait() -> None:
        with collective("all_gather", names):
            waiting.wait()

    return wait


def _gather(x: Tensor, whole: Tensor, group: Any) -> Any:
    return dist.all_gather_single(whole, x.reshape(-1), group, async_op=True)


def group_of(mesh: Any, names: tuple[str, ...]) -> Any:
    """The process group of one dimension of the mesh, or of several flattened.

    The mesh makes it once, and it is told once how long to wait. It is looked up anew each time (10 microseconds): a
    cache here would keep groups alive past `destroy_process_group`, and their threads would fall with the interpreter.
    """
    if len(names) == 1:
        group = mesh.get_group(names[0])
    else:
        order = tuple(name for name in mesh.mesh_dim_names if name in names)
        if order != names:
            raise ValueError(f"a collective over {names}: the mesh has them in the order {order}; name them so")
        group = mesh[names]._flatten("_".join(names)).get_group()
    watch = watch_of()
    if watch is not None:
        watch.hurry(group)
    return group

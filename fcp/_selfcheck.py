"""Does this backend do what a collective means? Asked once, before the first answer is relied on.

A backend that averages where it should sum, or leaves a rank's part out for one dtype, raises nothing. So a collective
that a group uses for the first time, in a dtype, is first given small whole numbers that every rank knows. What comes
back must be what the row's `dense` map makes of all ranks' numbers, which is what the simulator computes. Every rank of
the group runs the same collectives in the same order, so all are at this check together.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcp._watch import watch_of

if TYPE_CHECKING:
    from fcp._collective import Rule

__all__ = ["check_once"]


def check_once(rule: "Rule", x: Tensor, group: Any, run: Callable[["Rule", Tensor, Any], Tensor]) -> None:
    """Checks the rule's collective on `group`, for tensors like `x`, if this process has not yet.

    Raises:
        RuntimeError: the backend gave something else than the collective means.
    """
    watch = watch_of()
    kind = (group.group_name, rule.name, rule.travels_in(x), x.device.type)
    if watch is None or kind in watch.checked:
        return
    watch.checked.add(kind)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    known = replace(rule, dims=tuple(range(len(rule.dims))))
    everyone = torch.arange(size * size * size).view(size, size, size) % 3
    everyone = (everyone + torch.arange(size).view(size, 1, 1) % 5).to(x.device, x.dtype)
    if rule.takes == "invariant":
        everyone = everyone[:1].expand(size, -1, -1)
    expected = rule.dense(everyone[0] if rule.takes == "invariant" else everyone, size, known)
    expected = expected[rank] if rule.gives == "varying" else expected
    found = run(known, everyone[rank].contiguous(), group)
    if not torch.equal(found, expected):
        raise RuntimeError(
            f"{rule.name} on {dist.get_backend(group)} of {kind[2]} ({x.device.type}, {size} ranks): the backend gave "
            f"{found.flatten()[:4].tolist()} where the ranks' numbers make {expected.flatten()[:4].tolist()}. No "
            f"result of this run would be right; use another backend or build."
        )

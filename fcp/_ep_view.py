"""Which ranks are an expert-parallel group: ep as a view of fsdp x cp x tp, the fastest names first.

Expert parallelism brings no ranks of its own. The ranks that share a layer's work anyway (tp), then those with other
slices of the same sequences (cp), then those with other rows (fsdp) each keep some of the experts, until ep of them
do; ranks that are near each other exchange tokens. What remains, efsdp = fsdp * cp * tp / ep, stores an expert
in pieces, as fsdp x cp does every other parameter.

Where ep covers only a part of cp or fsdp, the axis is split into two, the fast one within the group: fsdp=4 under ep=2
becomes fsdp=2 and fsdp_ep=2. tp is never split: its ranks would hold copies of an expert and compute it twice.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fcp.typing import Expert

__all__ = ["EpView", "check_experts", "view"]


@dataclass(frozen=True)
class EpView:
    """`sizes`: the axes after splitting, outermost first; `names`: those of the group, the first slowest; `parts`: for
    each axis that was asked for, its axes now."""

    sizes: dict[str, int]
    names: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]


def view(sizes: Mapping[str, int], ep: int) -> EpView:
    """The group of `ep` ranks within the axes of `sizes`: dp, fsdp, cp (one axis or two) and tp, the fastest last.

    Raises:
        ValueError: no group of that size can be made, with the sizes that can.
    """
    found = _taken(sizes, ep)
    if found is None:
        shared = {name: size for name, size in sizes.items() if name != "dp"}
        able = [str(size) for size in range(1, math.prod(shared.values()) + 1) if _taken(sizes, size) is not None]
        have = ", ".join(f"{name}={size}" for name, size in shared.items())
        raise ValueError(
            f"transform: ep={ep} covers no whole view of {have}: an expert group is all of tp, then ranks of cp, then "
            f"of fsdp. With these, ep may be {', '.join(able)}."
        )
    split: dict[str, int] = {}
    parts: dict[str, tuple[str, ...]] = {}
    names: list[str] = []
    for name, size in sizes.items():
        taken = found.get(name, 1)
        if 1 < taken < size:
            split.update({name: size // taken, f"{name}_ep": taken})
            parts[name] = (name, f"{name}_ep")
            names.append(f"{name}_ep")
        else:
            split[name] = size
            parts[name] = (name,)
            names += [name] if taken > 1 else []
    return EpView(split, tuple(names), parts)


def _taken(sizes: Mapping[str, int], ep: int) -> dict[str, int] | None:
    """How many ranks of each axis the group takes, or None."""
    taken, left = {}, ep
    for name, size in reversed(list(sizes.items())):
        if left == 1 or name == "dp":
            break
        if left % size == 0:
            taken[name], left = size, left // size
        elif size % left == 0 and name != "tp":
            taken[name], left = left, 1
        else:
            return None
    return taken if left == 1 else None


def check_experts(model: object, view: EpView, ep: int, plan: str) -> None:
    """Raises ValueError for a model without experts, a number that ep does not divide, a plan that does not fit."""
    if plan not in ("dispatch", "all_reduce"):
        raise ValueError(f"transform: ep_plan={plan!r}; it is 'dispatch' or 'all_reduce'")
    if ep == 1:
        return
    counts = sorted({rule.num for rule in (getattr(model, "rules", None) or {}).values() if isinstance(rule, Expert)})
    if not counts:
        raise ValueError(
            f"transform: ep={ep} needs a model with experts, and no rule of {model!r} says that a parameter counts any."
            f" Write fcp.Expert(num) as the rule of parameters [experts, ...], or leave ep out."
        )
    wrong = [count for count in counts if count % ep]
    if wrong:
        smaller = [str(size) for size in range(1, min(wrong) + 1) if not any(count % size for count in counts)]
        raise ValueError(f"transform: ep={ep} does not divide {wrong[0]} experts; ep may be {', '.join(smaller)}")
    if plan == "all_reduce" and view.names != ("tp",):
        raise ValueError(
            f"transform: ep_plan='all_reduce' sums what each rank's experts make of tokens that the group shares, and "
            f"ep={ep} is a group over {' x '.join(view.names)}, where only tp ranks share tokens. Take ep equal to tp, "
            f"or ep_plan='dispatch'."
        )

"""experts: each rank of a group holds some of the experts (Lepikhin et al. 2021, section 3; Rajbhandari et al. 2022).

Two plans. **Dispatch**: every rank sends each of its tokens' rows to the rank that has the expert, and gets back what
the expert made of it. How many rows go where is known only once they are routed, so counts travel first; no expert has
a capacity and no token is dropped. Ranks that share tokens (tp) first divide them, so that none is computed twice.
**All-reduce**: where the whole group shares tokens, each rank runs its own experts on all of them and the results are
summed; nothing else travels.

Gradients need no scale. A rank's experts meet the tokens of the whole group, and its gradient of them is the sum over
all of these, whoever's rows they were; over the other axes it is summed as every parameter's is. The gradient of a
routing weight is found where the token is, from the expert's result that came back.

Under `simulate` the ranks' experts are joined and all their tokens pass through them (`_experts.py`), which is what
the exchange comes to: no row is padded. On processes `_dispatch.py` moves the rows.

Left out: overlap of the exchange with the shared expert.
"""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from fcp import pytree
from fcp._dispatch import dispatch_on_processes, note_exchange
from fcp._experts import experts_over
from fcp._grouped import ExpertFn
from fcp.axes import Axes, axis_index, axis_size, lookup, names_of
from fcp.collectives import psum, pvary, shard, unshard
from fcp.ops import Experts, Ops
from fcp.sharded import Placement, Shapes, Sharded, base_model, pad_to
from fcp.typing import Expert, Inputs, ModelFn, Output, Params, Split

__all__ = ["experts"]


def experts(
    model_fn: ModelFn,
    *,
    axis: Axes = "ep",
    plan: Literal["dispatch", "all_reduce"] = "dispatch",
    shared: tuple[str, ...] = (),
) -> Sharded:
    """Splits the experts over `axis`: parameters [experts, ...] to [experts_local, ...].

    Args:
        model_fn: a model whose rules name its expert parameters (`fcp.Expert`), and that calls `ops.experts`.
        axis: one name or several (the product, as ("cp", "tp")).
        plan: "dispatch" sends tokens to their experts; "all_reduce" sums what the ranks' experts make of tokens that
            all ranks of `axis` share.
        shared: those names of `axis` whose ranks hold the same tokens (tp). Under "all_reduce" that is all of them.

    Raises:
        ValueError: an unknown plan; no rule names an expert; a name in `shared` that `axis` lacks; or, when called, the
            axis does not divide the number of experts, or the model never calls `ops.experts`.
    """
    names = names_of(axis)
    rules = getattr(base_model(model_fn), "rules", None) or {}
    patterns = {pattern: rule.num for pattern, rule in rules.items() if isinstance(rule, Expert)}
    if plan not in ("dispatch", "all_reduce"):
        raise ValueError(f"experts: plan={plan!r}; it is 'dispatch' or 'all_reduce'")
    if not patterns:
        raise ValueError(
            f"experts: no rule of {base_model(model_fn)!r} says that a parameter counts experts; write fcp.Expert(num) "
            f"as the rule of each parameter [experts, ...]"
        )
    if not set(shared) <= set(names):
        raise ValueError(f"experts: shared={shared} names an axis that {names} does not")

    def place(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
        size = axis_size(names)
        found, wrong = dict(placements), []
        for path, p in placements.items():
            num = next((num for pattern, num in patterns.items() if fnmatchcase(path, pattern)), None)
            if num is None:
                continue
            if shapes[path][:1] != (num,) or num % size:
                wrong.append(f"{path} of shape {shapes[path]}: {size} ranks of {names} do not divide {num} experts")
            found[path] = replace(p, slices=(*p.slices, (names, Split(0))))
        if wrong:
            raise ValueError(f"experts: {'; '.join(wrong)}")
        return found

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        called: list[bool] = []
        op = _dispatched(names, shared, called) if plan == "dispatch" else _summed(ops.experts, names, called)
        out = inner(params, inputs, replace(ops, experts=op))
        if not called:
            raise ValueError(
                f"experts: the model never called ops.experts, so each rank of {names} would have used its own experts "
                f"alone. Call ops.experts in the model."
            )
        return out

    return Sharded(model_fn, f"experts({' x '.join(names)}, {plan})", run, place)


def _summed(inner: Experts, names: tuple[str, ...], called: list[bool]) -> Experts:
    def summed(x: Tensor, weights: Tensor, indices: Tensor, params: Params, fn: ExpertFn) -> Tensor:
        called.append(True)
        local = pytree.leaves(params)[0].shape[0]
        here = indices - axis_index(names).to(indices.device) * local
        mine = torch.where((here >= 0) & (here < local), here, -1)
        return psum(inner(pvary(x, names), pvary(weights, names), mine, params, fn), names)

    return summed


def _dispatched(names: tuple[str, ...], shared: tuple[str, ...], called: list[bool]) -> Experts:
    def dispatched(x: Tensor, weights: Tensor, indices: Tensor, params: Params, fn: ExpertFn) -> Tensor:
        called.append(True)
        rows, lead = x.flatten(0, -2), x.shape[:-1]
        weights, indices = weights.flatten(0, -2), indices.flatten(0, -2)
        tokens = rows.shape[0]
        if shared:
            size = axis_size(shared)
            length = -(-tokens // size) * size
            rows, weights = pad_to(rows, length, 0), pad_to(weights, length, 0)
            indices = pad_to(indices, length, 0, -1)  # no token, no expert
            rows, weights, indices = (shard(each, shared, dim=0) for each in (rows, weights, indices))
        axes = lookup(names, "experts")
        if axes[0].mesh is not None:
            y = dispatch_on_processes(rows, weights, indices, params, fn, axes)
        else:
            rows, note_back = note_exchange(rows, indices, axes)
            y = note_back(experts_over(rows, weights, indices, params, fn, axes))
        if shared:
            y = unshard(y, shared, dim=0)[:tokens]
        return y.unflatten(0, lead)

    return dispatched

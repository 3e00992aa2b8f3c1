"""What families with experts share: the router's scores, the auxiliary loss, and what one gated expert does.

A router's logits, its softmax and the choice are taken in float32 or wider, whatever the model computes in: two
experts whose logits round to one value in bfloat16 are still told apart, and a layer that is computed again in
backward chooses the same experts (Zoph et al. 2022, section 3).

The auxiliary loss is a product of two sums over all tokens of the whole batch, so the mean of the ranks' values is not
its value. One factor, how many tokens chose each expert, has no gradient: `ops.total` makes it the whole batch's on
every rank. What is left is a sum over tokens, of which each rank has its own part, as of the loss of the targets.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import silu

from fcp import linear
from fcp.ops import Ops
from fcp.typing import Output, Params

__all__ = [
    "auxiliary",
    "gated_expert",
    "route_sums",
    "router_logits",
    "softmax_top_k",
    "top_k_of_groups",
    "with_statistics",
]


def router_logits(
    x: Float[Tensor, "batch seq hidden"],
    weight: Float[Tensor, "experts hidden"],
    bias: Float[Tensor, " experts"] | None = None,
) -> Float[Tensor, "batch seq experts"]:
    """x @ weight^T + bias in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def softmax_top_k(
    logits: Float[Tensor, "batch seq experts"], k: int, *, normalize: bool
) -> tuple[Float[Tensor, "batch seq experts"], Float[Tensor, "batch seq k"], Int[Tensor, "batch seq k"]]:
    """(probabilities of all experts, those of the k largest, which these are); `normalize`: the k add up to 1."""
    probabilities = logits.softmax(-1)
    weights, indices = probabilities.topk(k, dim=-1)
    return probabilities, weights / weights.sum(-1, keepdim=True) if normalize else weights, indices


def top_k_of_groups(
    scores: Float[Tensor, "batch seq experts"], k: int, *, groups: int, kept: int
) -> Int[Tensor, "batch seq k"]:
    """The k best experts of the `kept` best of `groups` equal groups, one being worth the sum of its two best scores.

    (DeepSeek-AI 2024, section 2.1.2: a token travels to few ranks.)
    """
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2).topk(k, dim=-1).indices


def route_sums(
    probabilities: Float[Tensor, "batch seq experts"],
    indices: Int[Tensor, "batch seq k"],
    real: Bool[Tensor, "batch seq"] | None,
) -> tuple[Float[Tensor, " experts"], Int[Tensor, " experts"]]:
    """Over the real tokens here: each expert's probabilities added up, and how many tokens chose it."""
    chosen = torch.zeros_like(probabilities, dtype=torch.int64).scatter(-1, indices, 1)
    if real is not None:
        probabilities = torch.where(real[..., None], probabilities, 0.0)
        chosen = torch.where(real[..., None], chosen, 0)
    return probabilities.sum((0, 1)), chosen.sum((0, 1))


def auxiliary(
    ops: Ops, sums: list[tuple[Tensor, Tensor]], num_experts_per_tok: int
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The part of the load-balancing loss that the tokens here contribute, and the statistics of the whole batch.

    experts * sum over experts e of f_e P_e (Fedus et al. 2022, equations 4 to 6), with f_e the choices of e a token
    and P_e its mean probability, over all real tokens of all layers with experts.

    Args:
        sums: what `route_sums` gave, layer by layer.
        num_experts_per_tok: how many experts a token chooses.
    """
    counts = ops.total(torch.stack([count for _, count in sums]))
    probabilities = torch.stack([each for each, _ in sums]).sum(0)
    tokens = (counts.sum() // num_experts_per_tok).clamp(min=1).to(probabilities.dtype)
    share = counts.sum(0).to(probabilities.dtype) / tokens
    part = share.numel() * (share * (probabilities / tokens)).sum()
    return part, {"tokens_per_expert": counts, "auxiliary_loss": ops.total(part.detach())}


def with_statistics(
    ops: Ops,
    loss: Float[Tensor, ""] | None,
    logits: Tensor | None,
    sums: list[tuple[Tensor, Tensor]],
    num_experts_per_tok: int,
    coefficient: float | None,
) -> Output:
    """What a model with experts gives: `coefficient` times the auxiliary loss is added to the loss (None: nothing is).

    No sums (no layer has experts): no statistics.
    """
    if not sums:
        return Output(loss, logits)
    part, statistics = auxiliary(ops, sums, num_experts_per_tok)
    if loss is not None and coefficient is not None:
        loss = loss + coefficient * part.to(loss.dtype)
    return Output(loss, logits, statistics)


def gated_expert(rows: Float[Tensor, "rows hidden"], params: Params, project: object) -> Float[Tensor, "rows hidden"]:
    """down(silu(gate x) * up x), gate and up side by side in one matrix [experts, 2 * width, hidden]."""
    gate, up = project(rows, params["gate_up_proj"]).chunk(2, -1)  # type: ignore[operator]
    return project(silu(gate) * up, params["down_proj"])  # type: ignore[operator]

"""The grid of experts: what is crossed with what. `test_experts_grid.py` runs a sample, `-m sweep` all of it.

How tokens are routed is part of a case. The first hidden coordinate of every embedding is large, so that after the norm
it is the same positive number for all tokens, and the first column of a router acts as a bias on each expert.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import fcp
from models import deepseek, gpt_oss, llama4, mixtral
from tests.toys import batch_of, gradient, randomized, tokens

BATCH, SEQ, VOCAB, EXPERTS = 4, 11, 61, 8
MASKS = ("plain", "packed", "left pad")
ROUTES = ("uneven", "all to one", "one unused")
FAMILIES: dict[str, Any] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), mixtral),
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "deepseek_v3": deepseek,
}
NO_AUXILIARY_LOSS = ("llama4", "deepseek_v3")
ROUTERS = {"gpt_oss": "router", "llama4": "router"}
"""What a family's router is called; "gate" for the others."""
SOFTMAX_OF_CHOSEN = ("mixtral", "gpt_oss")
"""Their one of one would have the weight 1, and the router no gradient: there a second expert is chosen freely."""
MESHES: tuple[dict[str, Any], ...] = (
    {"cp": 2, "ep": 2},
    {"cp": 2, "fsdp": 2, "ep": 4},
    {"cp": 2, "fsdp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 4},
    {"cp": 2, "dp": 2, "fsdp": 2, "ep": 2},
    {"fsdp": 4, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 2, "ep_plan": "all_reduce"},
    {"tp": 2, "ep": 2, "ep_plan": "all_reduce"},
    {"tp": 2, "ep": 2},
    {"cp": 4, "ep": 2},
    {"cp": 2, "tp": 2, "fsdp": 2, "ep": 4},
)
"""Those of more than one plan; the last three: tp ranks that divide their tokens, a split cp, an expert in pieces."""


@dataclass(frozen=True)
class Case:
    family: str
    mask: str
    routes: str
    auxiliary: bool
    mesh: tuple[tuple[str, Any], ...]

    @property
    def ranks(self) -> int:
        return 1 if not self.mesh else torch.Size([n for k, n in self.mesh if k not in ("ep", "ep_plan")]).numel()

    @property
    def name(self) -> str:
        mesh = "x".join(f"{name}{size}" for name, size in self.mesh)
        words = (self.family, self.mask, self.routes, "auxiliary" if self.auxiliary else "plain loss", mesh)
        return "-".join(words).replace(" ", "_")


def cases() -> list[Case]:
    return [
        Case(family, mask, routes, auxiliary, tuple(mesh.items()))
        for mesh in MESHES
        for mask in MASKS
        for routes in ROUTES
        for auxiliary in (True, False)
        for family in FAMILIES
        if not (auxiliary and family in NO_AUXILIARY_LOSS)
    ]


def sample(count: int, *, ranks: int | None = None, seed: int = 0) -> list[Case]:
    """A seeded sample, of every mesh and everything else in turn before anything comes twice."""
    found = [case for case in cases() if ranks in (None, case.ranks)]
    random.Random(seed).shuffle(found)
    chosen: list[Case] = []
    seen: set[Any] = set()
    for case in found:
        parts = {case.mesh, (case.mask, case.routes), (case.family, case.auxiliary)}
        if parts - seen:
            chosen.append(case)
            seen |= parts
    return (chosen + [case for case in found if case not in chosen])[:count]


@cache
def model_of(family: str, routes: str, auxiliary: bool) -> tuple[fcp.Model, Any]:
    k = 1 if routes == "all to one" and family not in SOFTMAX_OF_CHOSEN else 2
    settings: dict[str, Any] = {"n_routed_experts" if family == "deepseek_v3" else "num_local_experts": EXPERTS}
    if family not in NO_AUXILIARY_LOSS:
        settings.update(output_router_logits=auxiliary, router_aux_loss_coef=0.5)
    if family == "llama4":
        settings.update(moe_layers=(0, 1))
    if family == "deepseek_v3":
        settings.update(first_k_dense_replace=0, n_group=2, topk_group=1, norm_topk_prob=k > 1)
    if FAMILIES[family] is mixtral:
        settings.update(model_type=family, norm_topk_prob=family == "mixtral")
    model = FAMILIES[family].tiny(**settings, vocab_size=VOCAB, num_experts_per_tok=k)
    params = randomized(model)
    params["model"]["embed_tokens"]["weight"][:, 0] = 9.0
    bias = {"uneven": {}, "all to one": {3: 2.0}, "one unused": {5: -2.0}}[routes]
    for layer in params["model"]["layers"]:
        layer["post_attention_layernorm"]["weight"][0] = 1.0
        router = layer["feed_forward" if family == "llama4" else "mlp"][ROUTERS.get(family, "gate")]["weight"]
        if family == "deepseek_v3":
            layer["mlp"]["gate"]["e_score_correction_bias"] *= 0.1
        router[:, 0] = 0.0
        for expert, value in bias.items():
            router[expert, 0] = value
    return model, params


def batch(mask: str) -> dict[str, Any]:
    ids = tokens(BATCH, SEQ, vocab=VOCAB)
    if mask == "packed":
        rows = [[*range(3), *range(8)], [*range(7), *range(4)], list(range(11)), [*range(1), *range(10)]]
        return batch_of(ids, position_ids=torch.tensor(rows))
    if mask == "left pad":
        return batch_of(ids, attention_mask=(torch.arange(SEQ) >= SEQ - torch.tensor([[6], [11], [1], [9]])).long())
    return batch_of(ids)


@cache
def reference(family: str, routes: str, auxiliary: bool, mask: str) -> tuple[fcp.Output, Any]:
    model, params = model_of(family, routes, auxiliary)
    return model(params, batch(mask)), gradient(model, params, batch(mask))

"""functional: a causal language model of transformers as a pure function of its parameters and a batch.

    model, params = fcp.huggingface.functional(module)

`params` are the module's own tensors, nested by transformers' names; the module is not changed, now or later. `model`
is an `fcp.Model`, so the transforms apply to it.

What goes where: attention to `Ops.attention` with fcp's mask of the whole sequence; the module's logits, whatever
scale or cap it puts on them, to `Ops.loss`; each decoder layer to `Ops.layer`. Position ids are passed, always, and an
attention mask of ones, which says nothing, so that no module makes up the ones it would guess from a slice.

A transform that splits the sequence asks for a proof first (`_proof.py`), once a model.

Left out: tensor parallelism (the model has no rules), the auxiliary losses of routers, caches, and encoders.
"""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fcp import pytree
from fcp.huggingface._interfaces import Call, register
from fcp.huggingface._plan import Plan, plan_of
from fcp.huggingface._plan_proof import PlanRules
from fcp.huggingface._proof import Proof
from fcp.huggingface._skeleton import PARTITIONS, Skeleton
from fcp.loss import mean_loss
from fcp.model import Model
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params, Rules

__all__ = ["functional"]


def functional(module: Any, *, skip_proof: bool = False) -> tuple[Model, Params]:
    """A transformers causal language model as (model, params), for the transforms of fcp.

    Args:
        module: a causal language model of transformers, as `AutoModelForCausalLM` makes them.
        skip_proof: split the sequence without proof that each position outside attention stands for itself.

    Returns:
        model: an `fcp.Model`; (params, batch) -> Output(loss, logits). It computes in the module's mode: in training, a
            dropout above zero is refused by `fcp.transform`.
        params: the module's parameters by transformers' names (they share its memory). Tied weights are one leaf.

    Raises:
        ValueError: no causal language model, or a module that cannot be run as such a function, with the reason.
        ImportError: transformers is not installed.
    """
    _check(module)
    register()
    params = _nested({name: x.detach() for name, x in module.named_parameters()})
    accepted = frozenset(inspect.signature(module.forward).parameters)
    plan = plan_of(module)
    apply, proof, rules = _fitting(module, accepted, plan)
    model = Model(
        config=_config_of(module),
        apply=apply,
        init=partial(_init, type(module), module.config),
        rules=rules,
        prove=None if skip_proof else proof.demand,
    )
    return model, params


def _check(module: Any) -> None:
    held: Any = module
    if not isinstance(module, nn.Module) or not hasattr(module, "get_output_embeddings"):
        raise ValueError(
            f"functional: {type(module).__name__} is no causal language model of transformers; give what "
            f"AutoModelForCausalLM.from_pretrained(...) gives"
        )
    unmoving = [f"{name} ({x.dtype})" for name, x in module.named_parameters() if not x.is_floating_point()]
    if unmoving:
        raise ValueError(f"functional: {unmoving[0]} is quantised, and has no gradient; load it unquantised")
    if getattr(held.config, "output_router_logits", False):
        raise ValueError(
            "functional: the config asks for a router's auxiliary loss (output_router_logits), which is not computed "
            "here; set it to False"
        )
    scaled = sorted(_length_scaled(held.config.get_text_config(decoder=True)))
    if scaled:
        raise ValueError(
            f"functional: rope scaling of kind {', '.join(scaled)} reads the length of the sequence off the positions "
            f"it is given, which a slice would change"
        )


def _length_scaled(config: Any) -> set[str]:
    """The kinds of rope scaling in a config that depend on the sequence's length."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [found, *(x for x in found.values() if isinstance(x, dict))]
    return {str(kind["rope_type"]) for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")}


def _fitting(module: nn.Module, accepted: frozenset[str], plan: Plan | None) -> tuple[Any, Proof, Rules | None]:
    """The function and its proof, over the finest partition into units under which the module runs."""
    errors: list[Exception] = []
    for partition in PARTITIONS:
        try:
            skeleton = Skeleton(module, partition, plan)
            proof = Proof(skeleton, partial(_logits, skeleton, accepted), module.config)
            offset = proof.run_whole(_first_positions(module))
        except Exception as error:  # of every kind: this is somebody's module
            errors.append(error)
        else:
            rules = None if plan is None else PlanRules(skeleton, plan, proof)
            return partial(_apply, skeleton, accepted, offset), proof, rules
    said = [error for error in errors if str(error).startswith("huggingface: ")]
    if said:
        raise ValueError(f"functional: {str(said[-1]).removeprefix('huggingface: ')}") from None
    reason = next(iter(str(errors[-1]).splitlines()), "")
    raise ValueError(
        f"functional: {type(module).__name__} does not run as a function of tokens and positions alone: "
        f"{type(errors[-1]).__name__}: {reason}"
    ) from errors[-1]


def _first_positions(module: nn.Module) -> list[int]:
    """What a module may count positions from: 0, or the one after that of padding."""
    held = (each for name, each in module.named_modules() if name.endswith("position_embeddings"))
    padding = {each.padding_idx for each in held if isinstance(each, nn.Embedding) and each.padding_idx is not None}
    return [0, *(index + 1 for index in sorted(padding))]


def _apply(
    skeleton: Skeleton, accepted: frozenset[str], offset: int, params: Params, inputs: Inputs, ops: Ops
) -> Output:
    leaves = {name: _at(params, name) for name in skeleton.names}
    logits = _logits(skeleton, accepted, leaves, inputs, Call(ops, inputs.mask, inputs.positions + offset))
    total, shown = ops.loss(logits, None, inputs.targets)
    return Output(mean_loss(total, inputs.num_targets), shown)


def _nested(named: dict[str, Tensor]) -> Params:
    """Nested by name; by whole names where the indices of a list have gaps (layers without parameters of their own)."""
    try:
        return pytree.nest(named)
    except ValueError:
        return named


def _at(params: Params, name: str) -> Any:
    if name in params:
        return params[name]
    for key in name.split("."):
        params = params[int(key) if isinstance(params, list) else key]
    return params


def _logits(
    skeleton: Skeleton, accepted: frozenset[str], leaves: Mapping[str, Any], inputs: Inputs, call: Call
) -> Tensor:
    """[batch, seq_local, vocab]: the module's logits."""
    given: dict[str, Any] = {"use_cache": False}
    given |= {"input_ids": inputs.tokens} if inputs.embeds is None else {"inputs_embeds": inputs.embeds}
    given["attention_mask"] = torch.ones(inputs.positions.shape, dtype=torch.int64, device=inputs.positions.device)
    lacking = sorted({"input_ids", "inputs_embeds"} & set(given) - accepted)
    if lacking:
        raise ValueError(f"huggingface: the module's forward takes no {lacking[0]}")
    if call.positions is not None:
        given["position_ids"] = call.positions
    keep = accepted | ({"position_ids"} if "kwargs" in accepted else set())
    # Modules go on with `view`; a slice of the sequence, as the simulator cuts it, does not lie dense.
    dense = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in given.items() if name in keep}
    return skeleton.run(call, leaves, dense).logits


def _config_of(module: nn.Module) -> Any:
    """The text model's configuration, as fcp reads it: its dropouts are those of the module's mode."""
    held: Any = module.config
    config = copy.deepcopy(held.get_text_config(decoder=True))
    if not module.training:
        for name, value in list(vars(config).items()):
            if "drop" in name and type(value) in (int, float):
                setattr(config, name, type(value)(0))
    active = [each.p for each in module.modules() if isinstance(each, nn.Dropout) and each.p and each.training]
    if active:
        config.dropout_of_modules = float(max(active))
    return config


def _init(kind: Any, config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Fresh parameters, as the class itself makes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind(copy.deepcopy(config))
    return _nested({name: x.detach().to(dtype) for name, x in made.named_parameters()})

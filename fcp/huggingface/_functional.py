"""functional: a causal language model of transformers as a pure function of its parameters and a batch.

    model, params = fcp.huggingface.functional(module)

`params` are the module's own tensors, nested by transformers' names; the module is not changed, now or later. `model`
is an `fcp.Model`, so the transforms apply to it.

What goes where: attention to `Ops.attention` with fcp's mask of the whole sequence; the module's logits, whatever
scale or cap it puts on them, to `Ops.loss`; each decoder layer to `Ops.layer`. Position ids are passed, always, and an
attention mask of ones, which says nothing, so that no module makes up the ones it would guess from a slice.

A transform that splits the sequence asks for a proof first (`_proof.py`), once a model.

Left out: the auxiliary losses of routers, caches, encoders, and reading a rank's own slices of a checkpoint.
"""

import copy
import inspect
import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp import pytree
from fcp.axes import batched
from fcp.huggingface._checkpoint import check_tensors, extra, is_gguf
from fcp.huggingface._interfaces import Call, register
from fcp.huggingface._proof import Proof, words
from fcp.huggingface._skeleton import PARTITIONS, Skeleton
from fcp.huggingface._tp_plan import Plan, plan_of
from fcp.huggingface._tp_proof import PlanRules
from fcp.loss import mean_loss
from fcp.model import Model, dropouts
from fcp.ops import Ops
from fcp.typing import Inputs, Output, Params

__all__ = ["functional", "save"]


def functional(module: Any, *, dtype: torch.dtype | None = None, skip_proof: bool = False) -> tuple[Model, Params]:
    """A transformers causal language model as (model, params), for the transforms of fcp.

    Args:
        module: a causal language model of transformers, as `AutoModelForCausalLM` makes them; or where to load one
            from: a folder with config.json and safetensors (one file or an index), or a GGUF file.
        dtype: of the parameters that are loaded; None keeps the checkpoint's. A module keeps its own.
        skip_proof: split the sequence without proof that each position outside attention stands for itself.

    Returns:
        (model, params). The model is an `fcp.Model`, whose rules are those of transformers' tensor-parallel plan,
        proven when tp first asks for them; None where the module carries no plan. The parameters are the module's, by
        transformers' names (they share its memory). Tied weights are one leaf.

    Raises:
        ValueError: no causal language model, one in training mode with a dropout above zero, or a module that cannot
            be run as such a function, with the reason.
        ImportError: transformers is not installed.
    """
    if isinstance(module, str | Path):
        module = _loaded(Path(module), dtype)
    elif dtype is not None:
        raise ValueError("functional: dtype is that of a checkpoint; module.to(dtype) converts a module")
    _check(module)
    register()
    params = _nested(bare_parameters(module))
    apply, rules = _fitting(module, plan_of(module))
    if skip_proof:
        apply.proof = None
    model = Model(
        config=_config_of(module),
        apply=apply,
        init=partial(_init, type(module), module.config),
        rules=rules,
        prove=None if apply.proof is None else apply.proof.demand,
    )
    return model, params


def _loaded(path: Path, dtype: torch.dtype | None) -> Any:
    """The module of a checkpoint on this disk, in evaluation mode."""
    transformers, from_gguf = extra("transformers"), is_gguf(path)
    if not from_gguf and not (path / "config.json").is_file():
        raise ValueError(f"functional: {path} is no folder with a config.json and no GGUF file")
    where: dict[str, Any] = {"gguf_file": path.name} if from_gguf else {}
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent if from_gguf else path), dtype=dtype or "auto", local_files_only=True, **where
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"functional: {path}: transformers does not load it: {error}") from error


def save(folder: str | Path, model: Model, params: Params) -> None:
    """Writes a folder that `from_pretrained` and `functional` read back bit for bit.

    Args:
        folder: made where it is not there.
        model: what `functional` gave.
        params: whole parameters of its names and shapes, a gathered tree (`unshard`) for instance.

    Raises:
        ValueError: another model, or parameters that are not its.
    """
    apply = model.apply
    if not isinstance(apply, Function):
        raise ValueError("huggingface.save: the model is not of huggingface.functional; its family's file has a save")
    named = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    check_tensors(folder, {name: tuple(x.shape) for name, x in apply.skeleton.parameters().items()}, named)
    written = apply.skeleton.with_parameters(named)
    written.hf_quantizer = None  # of a GGUF file, whose blocks are unpacked: what is written are floats
    if hasattr(written.config, "quantization_config"):
        del written.config.quantization_config
    written.save_pretrained(str(folder))


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
    if module.training:
        active = dropouts(held.config.get_text_config(decoder=True))
        active |= {name: x.p for name, x in module.named_modules() if isinstance(x, nn.Dropout) and x.p}
        if active:
            name, value = next(iter(active.items()))
            raise ValueError(
                f"functional: the module is in training mode with dropout ({name}={value}), which is not part of a "
                f"pure function; set it to 0, or the module to eval()"
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


def _fitting(module: nn.Module, plan: Plan | None) -> "tuple[Function, PlanRules | None]":
    """The function and its plan's rules, over the finest partition into units under which the module runs."""
    accepted = frozenset(inspect.signature(module.forward).parameters)
    errors: list[Exception] = []
    for follow, partition in itertools.product((False, True), PARTITIONS):
        try:
            skeleton = Skeleton(module, partition, plan, follow=follow)
            function = Function(skeleton, accepted)
            proof = Proof(skeleton, function.logits, module.config)
            state = torch.get_rng_state()
            function.offset = proof.run_whole(_first_positions(module))
            if not torch.equal(state, torch.get_rng_state()):
                raise ValueError("huggingface: the module draws random numbers when it runs, which no function does")
            function.proof = proof
        except Exception as error:  # of every kind: this is somebody's module
            errors.append(error)
        else:
            return function, None if plan is None else PlanRules(skeleton, plan, proof)
    said = [error for error in errors if str(error).startswith("huggingface: ")]
    if said:
        raise ValueError(f"functional: {str(said[-1]).removeprefix('huggingface: ')}") from None
    raise ValueError(
        f"functional: {type(module).__name__} does not run as a function of tokens and positions alone: "
        f"{words(errors[-1])}"
    ) from errors[-1]


def _first_positions(module: nn.Module) -> list[int]:
    """What a module may count positions from: 0, or the one after that of padding."""
    held = (each for name, each in module.named_modules() if name.endswith("position_embeddings"))
    padding = {each.padding_idx for each in held if isinstance(each, nn.Embedding) and each.padding_idx is not None}
    return [0, *(index + 1 for index in sorted(padding))]


class Function:
    """A module's skeleton as `Model.apply`: (params, Inputs, Ops) -> Output."""

    def __init__(self, skeleton: Skeleton, accepted: frozenset[str]) -> None:
        self.skeleton, self._accepted = skeleton, accepted
        self.offset = 0  # what the module counts positions from
        self.proof: Proof | None = None  # None: skipped by name

    def __call__(self, params: Params, inputs: Inputs, ops: Ops) -> Output:
        self._check(inputs)
        leaves = {name: _at(params, name) for name in self.skeleton.names}
        logits = self.logits(leaves, inputs, Call(ops, inputs.mask, inputs.positions + self.offset))
        total, shown = ops.loss(logits, None, inputs.targets)
        return Output(mean_loss(total, inputs.num_targets), shown)

    def _check(self, inputs: Inputs) -> None:
        """Raises ValueError for a batch that the module would compute something else of."""
        if self.proof is None:
            return
        lead: Any = inputs.tokens if inputs.embeds is None else inputs.embeds
        if not inputs.mask.plain and (reason := self.proof.mixes):
            raise ValueError(
                f"huggingface: the batch has packed documents or padding, which are told to attention alone, and in "
                f"this module positions reach each other elsewhere too: {reason}. Give rows of one document each, "
                f"without padding."
            )
        if batched(lead) and (reason := self.proof.branches):
            raise ValueError(f"huggingface: simulated ranks cannot run this module: {reason}. Processes can (mesh=).")
        if inputs.embeds is not None and (reason := self.proof.refuses_embeds):
            raise ValueError(f"huggingface: the module takes no embeddings in the place of tokens: {reason}")

    def logits(self, leaves: Mapping[str, Any], inputs: Inputs, call: Call) -> Tensor:
        """[batch, seq_local, vocab]: the module's logits."""
        given: dict[str, Any] = {"use_cache": False}
        given |= {"input_ids": inputs.tokens} if inputs.embeds is None else {"inputs_embeds": inputs.embeds}
        given["attention_mask"] = torch.ones(inputs.positions.shape, dtype=torch.int64, device=inputs.positions.device)
        lacking = sorted({"input_ids", "inputs_embeds"} & set(given) - self._accepted)
        if lacking:
            raise ValueError(f"huggingface: the module's forward takes no {lacking[0]}")
        if call.positions is not None:
            given["position_ids"] = call.positions
        keep = self._accepted | ({"position_ids"} if "kwargs" in self._accepted else set())
        # Modules go on with `view`; a slice of the sequence, as the simulator cuts it, does not lie dense.
        dense = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in given.items() if name in keep}
        return self.skeleton.run(call, leaves, dense).logits


def bare_parameters(module: nn.Module) -> dict[str, Tensor]:
    """By name, without a graph; a tied pair is one, under its first name."""
    return {name: x.detach() for name, x in module.named_parameters()}


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


def _config_of(module: Any) -> Any:
    """The text model's configuration, as fcp reads it: no dropout, since none is active."""
    config = copy.deepcopy(module.config.get_text_config(decoder=True))
    for name, value in dropouts(config).items():
        setattr(config, name, type(value)(0))
    return config


def _init(kind: Any, config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Fresh parameters, as the class itself makes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind(copy.deepcopy(config))
    return _nested({name: x.to(dtype) for name, x in bare_parameters(made).items()})

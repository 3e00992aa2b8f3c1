"""The private copy of a module: its code and buffers without its parameters, and units whose parameters Ops hands over.

`functional` must not change the caller's module, and must not share anything that a call changes (some modules keep
tables in attributes) with another thread. So the module is copied once, its parameters replaced by tensors on the meta
device that hold nothing, and every thread copies that copy for itself. On the copy, and only there, `forward` of some
modules is replaced.

A *unit* is a module that is called as a whole: each decoder layer, the embedding, the final norm, the head. Its call
becomes `ops.layer(fn, its parameters, its arguments)`, which is where sharded parameters are gathered and a layer is
rematerialised. `fn` runs the module by `torch.func.functional_call` on the parameters it was handed. Parameters outside
of units (those that a model reads itself) are gathered once, by an `ops.layer` of their own, at the start.

Which modules can be units is not known from their names: one whose parameters somebody else reads, or that is never
called, cannot be. `functional` tries the finest partition first and then coarser ones (`PARTITIONS`); a parameter that
nothing handed over is on the meta device, so a wrong partition cannot compute anything.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fcp import pytree
from fcp.huggingface._interfaces import NAME, Call, bound_call, current, kept_modes
from fcp.huggingface._tp_plan import Plan, surround
from fcp.huggingface._written_out import Following, read_triangles
from fcp.masks import Mask
from fcp.ops import Ops
from fcp.typing import Params

__all__ = ["PARTITIONS", "Skeleton", "Unit"]

PARTITIONS = ("layers and what surrounds them", "layers", "none")
"""What becomes a unit, finest first."""


class Skeleton:
    """The copies of one module.

    Attributes:
        partition: which of `PARTITIONS` it is cut by.
        names: every leaf. A parameter that several modules share is one leaf, under its first name.
        units: by the path of each unit, the names of its parameters in it and the leaves that they are.
        outside: the names of the parameters that belong to no unit, and the leaves that they are.

    `plan` is what surrounds the forward of parts of units, for tensor parallelism. `follow`: attention that the module
    writes out is followed.
    """

    def __init__(self, module: nn.Module, partition: str, plan: Plan | None = None, *, follow: bool = False) -> None:
        held: Any = module
        self._original, self._config = bare_copy(module), copy.deepcopy(held.config)
        self._local = threading.local()
        self.partition, self._follow = partition, follow
        if follow:
            read_triangles(self._original)
        first = {id(x): name for name, x in self._original.named_parameters()}
        self.names = tuple(first.values())
        self.units: dict[str, dict[str, str]] = {}
        for path in unit_paths(self._original, partition):
            inside = self._original.get_submodule(path).named_parameters(remove_duplicate=False)
            self.units[path] = {name: first[id(x)] for name, x in inside}
        held = {f"{path}.{name}" for path, names in self.units.items() for name in names}
        every = self._original.named_parameters(remove_duplicate=False)
        self.outside = {name: first[id(x)] for name, x in every if name not in held}
        planned = {} if plan is None else plan.around
        self._around = {path: what for path, what in planned.items() if self._in_unit(path)}

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def _in_unit(self, path: str) -> bool:
        return any(path == unit or path.startswith(f"{unit}.") for unit in self.units)

    def parameters(self) -> dict[str, Tensor]:
        """Every leaf by name, without storage."""
        return dict(self._original.named_parameters())

    def embedding_width(self) -> int:
        """The last dim of what stands in the place of tokens."""
        held: Any = self._original
        return held.get_input_embeddings().weight.shape[-1]

    def dtype(self) -> torch.dtype:
        return torch.promote_types(next(self._original.parameters()).dtype, torch.float32)

    def with_parameters(self, named: Mapping[str, Tensor]) -> Any:
        """A module of the original's class and configuration that holds these parameters."""
        made: Any = copy.deepcopy(self._original)
        made.config = copy.deepcopy(self._config)
        made.load_state_dict({name: x.detach() for name, x in named.items()}, strict=False, assign=True)
        made.tie_weights()
        return made

    def module(self) -> nn.Module:
        """This thread's copy, whose units' calls go through the call under way."""
        mine = getattr(self._local, "module", None)
        if mine is None:
            mine = self._local.module = bare_copy(self._original)
            for each in mine.modules():
                if isinstance(each, nn.Embedding) and "position_ids" in inspect.signature(each.forward).parameters:
                    each.forward = partial(_at_positions, each.forward)
            surround(mine, self._around)
            for path in self.units:
                unit = mine.get_submodule(path)
                unit.forward = partial(self._enter_unit, path, unit.forward)
        return mine

    def following(self, module: nn.Module) -> Any:
        """What `module` runs in."""
        return Following(module) if self._follow else contextlib.nullcontext()

    def _enter_unit(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = current()
        if call is None or call.unit is not None:
            return forward(*args, **kwargs)
        if any(x.device.type == "meta" for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)):
            raise RuntimeError("a tensor was moved to the device of a parameter outside of the unit it belongs to")
        given = {**dict(enumerate(args)), **kwargs}
        shared = {key: x for key, x in given.items() if isinstance(x, MutableMapping)}
        unit = Unit(self, path, call.ops, call.seen, {key: type(x) for key, x in shared.items()})
        given |= {key: dict(x) for key, x in shared.items()}
        out, after = call.ops.layer(unit, call.units[path], call.mask, call.positions, given)
        for key, x in shared.items():
            x.update(after[key])
        return out

    def run(self, call: Call, leaves: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
        """The whole module on `leaves` by name (some may be stored in pieces)."""
        outside = {name: leaves[leaf] for name, leaf in self.outside.items()}
        if outside:
            outside = call.ops.layer(_as_they_are, outside)
        units = {path: {name: leaves[leaf] for name, leaf in names.items()} for path, names in self.units.items()}
        with bound_call(replace(call, units=units)), self.following(self._original):
            return torch.func.functional_call(self.module(), outside, (), dict(kwargs), tie_weights=False)


class Unit:
    """A unit's forward as a function of the parameters it is handed and of its arguments.

    A backward may call it again, in whichever thread it runs. What it writes into a mapping that it shares with other
    units (keys and values that later layers use again) is part of what it gives: (the output, those mappings after it).
    """

    def __init__(self, skeleton: Skeleton, path: str, ops: Ops, seen: Any = None, shared: Any = None) -> None:
        self.skeleton, self.path, self.ops, self.seen = skeleton, path, ops, seen
        self.shared: Mapping[Any, Callable[[], Any]] = shared or {}
        self._run = kept_modes(self._run_module)

    def __call__(self, params: Params, mask: Mask, positions: Any, given: Mapping[Any, Any]) -> Any:
        return self._run(params, mask, positions, given)

    def with_ops(self, ops: Ops) -> "Unit":
        return Unit(self.skeleton, self.path, ops, self.seen, self.shared)

    def _run_module(self, params: Params, mask: Mask, positions: Any, given: Mapping[Any, Any]) -> Any:
        module = self.skeleton.module().get_submodule(self.path)
        call = Call(self.ops, mask, positions, unit=self.path, seen=self.seen)
        held = {key: make() for key, make in self.shared.items()}
        for key, x in held.items():
            x.update(given[key])
        given = {**given, **held}
        args = tuple(given[key] for key in sorted(key for key in given if isinstance(key, int)))
        kwargs = {key: x for key, x in given.items() if isinstance(key, str)}
        with bound_call(call), self.skeleton.following(module):
            out = torch.func.functional_call(module, params, args, kwargs, tie_weights=False)
        return out, {key: dict(x) for key, x in held.items()}


def _at_positions(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An embedding of positions: those of the call, where the module would hand it a count of its own tokens."""
    call = current()
    if call is None or call.positions is None:
        return forward(*args, **kwargs)
    out = forward(*args, **{**kwargs, "position_ids": call.positions})
    return out.squeeze(0) if out.dim() == 4 else out  # some put a batch in front of the [seq] that they expect


def _as_they_are(params: Params) -> Params:
    return params


def bare_copy(module: nn.Module) -> nn.Module:
    """A copy with parameters on the meta device and buffers of its own, which attends by Ops."""
    memo: dict[int, Any] = {
        id(x): nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=False) for x in module.parameters()
    }
    held = (x for each in module.modules() for x in vars(each).values() if isinstance(x, Tensor))
    memo |= {id(x): x.detach().clone() for x in held}  # a state that an earlier call left, with its graph
    made = copy.deepcopy(module, memo)
    for config in configs_of(made):
        config._attn_implementation_internal = NAME
        config.use_cache = False  # some take no such argument, and a backward that runs a layer again would add to it
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = NAME
    return made


def configs_of(module: nn.Module) -> list[Any]:
    """Every configuration that a part of the module reads, and those inside them."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for value in list(vars(config).values()):
            add(value)

    for each in module.modules():
        add(getattr(each, "config", None))
    return list(found.values())


def unit_paths(module: nn.Module, partition: str) -> Iterator[str]:
    """The paths of the units: the outermost elements of module lists, and what is called around them."""
    if partition == "none":
        return
    lists = nn.ModuleList, nn.ModuleDict

    def walk(here: nn.Module, path: str, inside_list: bool) -> Iterator[str]:
        if next(here.parameters(), None) is None:
            return
        if path and not isinstance(here, lists):
            holds_list = any(isinstance(each, lists) for each in here.modules())
            if inside_list or (not holds_list and partition == PARTITIONS[0]):
                yield path
                return
        for name, child in here.named_children():
            yield from walk(child, f"{path}.{name}" if path else name, inside_list or isinstance(here, lists))

    yield from walk(module, "", False)

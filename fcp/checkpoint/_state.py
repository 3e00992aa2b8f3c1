"""A training state as a checkpoint has it: leaves with names, each process's blocks of them, and JSON.

    params.model.layers.0.mlp.up_proj.weight                a parameter
    moments.exp_avg.model.layers.0.mlp.up_proj.weight       what the optimizer keeps of it

A moment of its parameter's shape lies like the parameter: a process has the same part of both. Another one (Adafactor's
rows and columns) exists only where every process has whole leaves, and is written whole. Scalars (Adam's count of steps
for each leaf) are JSON, which gives every bit of a number back.

Where a leaf has copies on several ranks, one of them writes it, and they take turns from leaf to leaf.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fcp import pytree
from fcp._layout import blocks, part_of
from fcp._shards import Held
from fcp._train_step import TrainState
from fcp._transformed import Transformed
from fcp.sharded import Placement, base_model
from fcp.typing import Params

__all__ = ["CODES", "Block", "Contents", "Wanted", "contents_of", "params_of", "state_of", "wanted_of"]

PARAMS, MOMENTS = "params.", "moments."
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""What can be stored, and what safetensors calls it."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True)
class Block:
    """A rectangle of a leaf.

    Attributes:
        name: the leaf's, in the checkpoint.
        shape: of the whole leaf.
        offsets: where the rectangle begins, for each dim.
        values: its entries; a block that is read is written into.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


# --- to a checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has, of which this process writes `blocks`.

    Attributes:
        step: of the state.
        leaves: name to dtype and shape of the whole leaf.
        values: state.json.
        blocks: what this process writes.
    """

    step: int
    leaves: dict[str, dict[str, Any]]
    values: dict[str, Any]
    blocks: list[Block]

    def digest(self) -> str:
        """Equal for two processes that save the same state."""
        return hashlib.sha256(json.dumps([self.step, self.leaves, self.values], sort_keys=True).encode()).hexdigest()


def contents_of(sharded: Transformed, state: TrainState, extra: Mapping[str, Any]) -> Contents:
    """Names and describes everything in the state.

    Raises:
        ValueError: the state is not one of `sharded`'s, an optimizer's state is not what `fcp.optimizer` makes, a dtype
            cannot be stored, or JSON would give back something else than `extra`.
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"checkpoint.save: {type(state).__name__} is no TrainState; give what fcp.train_step gives")
    optimizer = state.optimizer
    if not isinstance(optimizer, Mapping) or set(optimizer) != {"step", "moments"}:
        raise ValueError("checkpoint.save: the optimizer's state is not what fcp.optimizer makes")
    held = sharded.held(pytree.shapes(state.params))
    tensors = dict(zip(pytree.paths(state.params), pytree.leaves(state.params), strict=True))
    _check_params(held, tensors)
    named = {PARAMS + path: (x, held[path]) for path, x in tensors.items()}
    for path, moments in optimizer["moments"].items():
        for kind, x in moments.items():
            if path not in held or "." in kind:
                raise ValueError(f"checkpoint.save: the optimizer keeps {kind} of {path}, which is no parameter")
            named[f"{MOMENTS}{kind}.{path}"] = (x, _lies(tuple(x.shape), held[path], f"{kind} of {path}"))
    odd = [f"{name} is {x.dtype}" for name, (x, _) in named.items() if x.dtype not in CODES]
    if odd:
        raise ValueError(f"checkpoint.save: {'; '.join(odd[:8])}; stored are {', '.join(DTYPES)}")
    scalars, mine = {}, []
    for position, (name, (x, lies)) in enumerate(named.items()):
        if not lies.shape:
            scalars[name] = x.item()
        elif lies.copy == position % lies.copies:
            mine += _blocks(name, lies, x.detach())
    return Contents(
        step=int(state.step),
        leaves={
            name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(lies.shape)}
            for name, (x, lies) in named.items()
        },
        values={
            "step": int(state.step),
            "skipped": int(state.skipped),
            "optimizer_step": int(optimizer["step"]),
            "scalars": scalars,
            "extra": _json(extra),
        },
        blocks=mine,
    )


def _blocks(name: str, lies: Held, x: Tensor) -> list[Block]:
    """What of `x`, a process's part of a leaf, are entries of the leaf."""
    found = [Block(name, lies.shape, tuple(each.start for each in there), x[here]) for here, there in blocks(lies.part)]
    return [each for each in found if each.values.numel()]


def _check_params(held: Mapping[str, Held], tensors: Mapping[str, Tensor]) -> None:
    wrong = [f"{path} is missing" for path in held if path not in tensors]
    wrong += [f"{path} is unknown" for path in tensors if path not in held]
    wrong += [
        f"{path} has shape {tuple(tensors[path].shape)} and is {each.part.shape} on a rank ({each.shape} in all)"
        for path, each in held.items()
        if path in tensors and tuple(tensors[path].shape) != each.part.shape
    ]
    if wrong:
        raise ValueError(f"checkpoint.save: {'; '.join(wrong[:8])}. Save the state of this transformed function.")


def _lies(shape: tuple[int, ...], parameter: Held, what: str) -> Held:
    """How a moment lies whose shape, of a rank's part, is `shape`."""
    if shape == parameter.part.shape:
        return parameter
    return _whole(shape, parameter, what)


def _whole(shape: tuple[int, ...], parameter: Held, what: str) -> Held:
    if shape and parameter.part.shape != parameter.shape:
        raise ValueError(
            f"checkpoint: {what} is of the whole leaf, and processes hold pieces of it; use a mesh that divides no leaf"
        )
    return Held(shape, part_of(shape, Placement(), {}, {}), parameter.copies, parameter.copy)


def _json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` as JSON gives it back, which has to be what it was."""
    try:
        found = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint.save: extra is not for JSON ({error}); give numbers, strings, lists, dicts"
        ) from None
    if not _same(found, dict(extra)):
        raise ValueError(
            "checkpoint.save: JSON would give back another `extra`; write tuples as lists, and keys of dicts as strings"
        )
    return found


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


# --- from a checkpoint ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What this process reads, before it is read: tensors of its own, and the blocks of leaves that fill them.

    Attributes:
        tensors: by name, without scalars.
        blocks: views of them.
        spec: of the parameters' tree.
        paths: of the parameters, in the tree's order.
        dtypes: of every leaf that is wanted.
    """

    tensors: dict[str, Tensor]
    blocks: list[Block]
    spec: Any
    paths: list[str]
    dtypes: dict[str, torch.dtype]


def wanted_of(
    sharded: Transformed, leaves: Mapping[str, Mapping[str, Any]], like: TrainState | None, *, moments: bool
) -> Wanted:
    """The parts of `leaves` (what a manifest says) that this process holds under `sharded`.

    Raises:
        ValueError: the leaves are not those of `sharded`'s model, or of `like`; all that differ are named.
    """
    template = _template(sharded) if like is None else like.params
    paths, (found, spec) = pytree.paths(template), pytree.flatten(template)
    held = sharded.held(pytree.shapes(template))
    _check_leaves(held, leaves, None if like is None else dict(zip(paths, found, strict=True)))
    places = {PARAMS + path: held[path] for path in paths}
    if moments:
        kept = [name for name in leaves if name.startswith(MOMENTS)]
        if like is not None:
            _check_moments(kept, like)
        for name in kept:
            parameter, shape = held[_of(name)[1]], tuple(leaves[name]["shape"])
            places[name] = parameter if shape == parameter.shape else _whole(shape, parameter, name)
    devices = {} if like is None else {PARAMS + path: x.device for path, x in zip(paths, found, strict=True)}
    usual = "cpu" if sharded.mesh is None else sharded.mesh.device_type
    wanted = Wanted({}, [], spec, paths, {name: DTYPES[leaves[name]["dtype"]] for name in places})
    for name, lies in places.items():
        if not lies.shape:
            continue
        parameter = name if name.startswith(PARAMS) else PARAMS + _of(name)[1]
        x = torch.empty(lies.part.shape, dtype=wanted.dtypes[name], device=devices.get(parameter, usual))
        found = _blocks(name, lies, x)
        if sum(block.values.numel() for block in found) < x.numel():
            x.zero_()  # the rest is padding
        wanted.tensors[name] = x
        wanted.blocks.extend(found)
    return wanted


def state_of(wanted: Wanted, values: Mapping[str, Any]) -> TrainState:
    """The state of what was read, and of state.json."""
    scalars = {name: torch.tensor(value, dtype=wanted.dtypes[name]) for name, value in values["scalars"].items()}
    everything = {**scalars, **wanted.tensors}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, x in everything.items():
        if name.startswith(MOMENTS):
            kind, path = _of(name)
            moments.setdefault(path, {})[kind] = x
    step, skipped, updates = (torch.tensor(values[key]) for key in ("step", "skipped", "optimizer_step"))
    return TrainState(params_of(wanted, values), {"step": updates, "moments": moments}, step, skipped)


def params_of(wanted: Wanted, values: Mapping[str, Any]) -> Params:
    """The parameters alone."""
    scalars = values["scalars"]

    def leaf(path: str) -> Tensor:
        name = PARAMS + path
        return torch.tensor(scalars[name], dtype=wanted.dtypes[name]) if name in scalars else wanted.tensors[name]

    return pytree.unflatten(wanted.spec, [leaf(path) for path in wanted.paths])


def _template(sharded: Transformed) -> Params:
    """The tree of the model's parameters, none of them made."""
    model: Any = base_model(sharded.model_fn)
    if not hasattr(model, "init"):
        raise ValueError(
            f"checkpoint.load: {model!r} is a plain function, which does not say what its parameters are; give a state "
            f"of it as `like`"
        )
    with FakeTensorMode():
        return model.init(seed=0)


def _of(name: str) -> tuple[str, str]:
    """moments.exp_avg.a.b -> exp_avg, a.b"""
    kind, _, path = name.removeprefix(MOMENTS).partition(".")
    return kind, path


def _check_leaves(
    held: Mapping[str, Held], leaves: Mapping[str, Mapping[str, Any]], like: Mapping[str, Tensor] | None
) -> None:
    known = {name.removeprefix(PARAMS) for name in leaves if name.startswith(PARAMS)}
    wrong = [f"{path} is not in the checkpoint" for path in held if path not in known]
    wrong += [f"{path} is not in the model" for path in known if path not in held]
    for path in held.keys() & known:
        about = leaves[PARAMS + path]
        if tuple(about["shape"]) != held[path].shape:
            wrong.append(f"{path} is {tuple(about['shape'])} in the checkpoint and {held[path].shape} in the model")
        if like is not None and DTYPES[about["dtype"]] != like[path].dtype:
            wrong.append(f"{path} is {about['dtype']} in the checkpoint and {like[path].dtype} in the state")
    if wrong:
        raise ValueError(f"of another model: {_listed(sorted(wrong))}")


def _check_moments(names: Iterable[str], like: TrainState) -> None:
    known = {f"{MOMENTS}{kind}.{path}" for path, each in like.optimizer["moments"].items() for kind in each}
    wrong = sorted(known ^ set(names))
    if known and wrong:
        raise ValueError(f"of another optimizer: only one of the checkpoint and the state has {_listed(wrong)}")


def _listed(wrong: list[str]) -> str:
    return "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")

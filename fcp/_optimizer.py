"""optimizer: a class of torch.optim as a pure pair, (init, update), over pytrees.

    adam = fcp.optimizer(torch.optim.AdamW, lr=1e-3, weight_decay={"*norm*": 0.0, "*": 0.1})
    state = adam.init(params)
    params, state = adam.update(params, grads, state)

The arithmetic is torch's own: `update` hands copies of the leaves, their gradients and their moments to a fresh object
of the class, calls its `step`, and takes the results out again. So nothing is remembered outside of `state`, which is a
pytree of tensors that can be kept, compared, and written to a file. With `donate=True` nothing is copied, and what was
passed in is overwritten.

An optimizer that treats every entry by itself does the same to a shard as to the whole leaf, so the moments lie like
the parameters. One that looks at a whole matrix (Muon, Adafactor) would do something else to a piece, and nothing would
say so. Such a class must be told the transformed function, and is refused where a leaf is divided between processes.

Left out: optimizers that call the loss themselves (LBFGS), and sparse gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fcp import pytree
from fcp._transformed import Transformed
from fcp.typing import Params

__all__ = ["Optimizer", "optimizer"]

ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
REFUSED = {"LBFGS": "it calls the loss itself, several times a step", "SparseAdam": "gradients here are dense"}


@dataclass(frozen=True)
class Optimizer:
    """A pure optimizer; `optimizer` makes it.

    Attributes:
        cls: the class of torch.optim.
        lr: the learning rate of each update, from the number of updates before it.
        weight_decay: pattern of paths to weight decay, the first that matches counts; None for the class's own default.
        options: what else the class is given.
        sharded: whose parameters it may update; None where it may update any, being elementwise.
    """

    cls: type[torch.optim.Optimizer]
    lr: Callable[[int], float]
    weight_decay: Mapping[str, float] | None
    options: Mapping[str, Any]
    sharded: Transformed | None = None

    def init(self, params: Params) -> dict[str, Any]:
        """The state before the first update. A leaf's moments are made by its first one, as torch does.

        Raises:
            ValueError: a pattern of `weight_decay` names no parameter, or a parameter has none.
        """
        self._decays(params)
        return {"step": torch.zeros((), dtype=torch.int64), "moments": {}}

    def update(
        self, params: Params, grads: Params, state: Mapping[str, Any], *, donate: bool = False
    ) -> tuple[Params, dict[str, Any]]:
        """The parameters and the state after one step.

        Args:
            params: the parameters, or this rank's shards of them.
            grads: like `params`; None for a leaf that has none, which stays as it is.
            state: what `init` or the last update gave.
            donate: overwrite `params` and the moments in `state`, which must not be used again.

        Raises:
            ValueError: the gradients are not the parameters', in paths or shapes.
        """
        names, (found, spec) = pytree.paths(params), pytree.flatten(params)
        by_path = dict(zip(pytree.paths(grads), pytree.leaves(grads), strict=True))
        floats = [path for path, x in zip(names, found, strict=True) if x.is_floating_point()]
        shapes = pytree.shapes(params)
        wrong = [f"{path} is unknown" for path in by_path if path not in shapes]
        wrong += [
            f"{path} has a gradient of shape {tuple(g.shape)} and is {shapes[path]}"
            for path, g in by_path.items()
            if path in shapes and tuple(g.shape) != shapes[path]
        ]
        if wrong:
            raise ValueError(f"update: {'; '.join(wrong[:8])}. Give the gradients of these parameters.")
        own = (lambda x: x.detach()) if donate else (lambda x: x.detach().clone())
        decays, step = self._decays(params), int(state["step"])
        leaves = dict(zip(names, found, strict=True))
        with torch.no_grad():
            moving = {path: torch.nn.Parameter(own(leaves[path])) for path in floats if path in by_path}
            moments = self._step(moving, by_path, state["moments"], decays, self.lr(step), own) if moving else {}
        after = {**leaves, **{path: x.detach() for path, x in moving.items()}}
        return pytree.unflatten(spec, [after[path] for path in names]), {
            "step": torch.tensor(step + 1),
            "moments": {**state["moments"], **moments},
        }

    def _step(
        self,
        moving: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        moments: Mapping[str, Any],
        decays: Mapping[str, float] | None,
        lr: float,
        own: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """Moves the leaves of `moving` in place, and gives their new moments."""
        groups: dict[Any, list[Tensor]] = {}
        for path, x in moving.items():
            x.grad = grads[path].detach().to(x.dtype).clone()  # some classes write into it
            groups.setdefault(None if decays is None else decays[path], []).append(x)
        listed = [
            {"params": xs} if decay is None else {"params": xs, "weight_decay": decay} for decay, xs in groups.items()
        ]
        cls: Any = self.cls
        made = cls(listed, lr=lr, **self.options)
        for path, x in moving.items():
            if path in moments:
                made.state[x] = {name: own(value) for name, value in moments[path].items()}
        made.step()
        after = {
            path: {name: value for name, value in made.state[x].items() if value is not None}
            for path, x in moving.items()
        }
        odd = sorted({name for each in after.values() for name, v in each.items() if not isinstance(v, Tensor)})
        if odd:
            raise ValueError(
                f"update: {self.cls.__name__} keeps {', '.join(odd)} in its state, and these are no tensors"
            )
        return after

    def _decays(self, params: Params) -> dict[str, float] | None:
        if self.weight_decay is None:
            return None
        patterns, paths = self.weight_decay, pytree.paths(params)
        unused = [pattern for pattern in patterns if not any(fnmatchcase(path, pattern) for path in paths)]
        found = {p: next((v for pattern, v in patterns.items() if fnmatchcase(p, pattern)), None) for p in paths}
        lacking = [path for path, value in found.items() if value is None]
        if unused or lacking:
            raise ValueError(
                f"optimizer: weight_decay: patterns without a parameter: {unused[:4]}; parameters without a pattern: "
                f"{lacking[:4]}. End it with '*' for the rest."
            )
        return {path: value for path, value in found.items() if value is not None}


def optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    lr: float | Callable[[int], float],
    weight_decay: float | Mapping[str, float] | None = None,
    sharded: Transformed | None = None,
    **options: Any,
) -> Optimizer:
    """A class of torch.optim as a pure pair, `init` and `update`.

    Args:
        cls: the class, `torch.optim.AdamW` say.
        lr: the learning rate, or a schedule: a function of the number of updates that went before.
        weight_decay: for every parameter, or pattern of paths to value (`{"*norm*": 0.0, "*": 0.1}`; the first match
            counts). None: the class's default.
        sharded: the transformed function whose shards it updates; asked for where the class is not elementwise.
        options: what else the class takes (`betas`, `momentum`, ...).

    Raises:
        ValueError: a class that is no optimizer or cannot be a pure step; options that it does not take; or one that
            is not elementwise, where a parameter is divided between processes.

    >>> import fcp, torch
    >>> sgd = fcp.optimizer(torch.optim.SGD, lr=0.5)
    >>> params = {"w": torch.ones(2)}
    >>> after, state = sgd.update(params, {"w": torch.ones(2)}, sgd.init(params))
    >>> after["w"], params["w"], int(state["step"])
    (tensor([0.5000, 0.5000]), tensor([1., 1.]), 1)
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"optimizer: {cls!r} is no class of torch.optim; give the class, as torch.optim.AdamW")
    if cls.__name__ in REFUSED:
        raise ValueError(f"optimizer: {cls.__name__} cannot be a pure step: {REFUSED[cls.__name__]}")
    if cls not in ELEMENTWISE:
        if sharded is None:
            raise ValueError(
                f"optimizer: {cls.__name__} looks at whole leaves, and would do something else to a piece of one. Say "
                f"whose parameters it is for: fcp.optimizer({cls.__name__}, sharded=..., ...)"
            )
        divided = sharded.divided()
        if divided:
            raise ValueError(
                f"optimizer: {cls.__name__} looks at whole leaves, and processes hold pieces of "
                f"{', '.join(divided[:4])}{', ...' if len(divided) > 4 else ''}. "
                f"Use an elementwise optimizer (AdamW, SGD, ...), or dp alone."
            )
    decay = weight_decay if weight_decay is None or isinstance(weight_decay, Mapping) else {"*": float(weight_decay)}
    schedule = lr if callable(lr) else lambda step, value=float(lr): value
    if options.get("differentiable") or "params" in options:
        raise ValueError("optimizer: `differentiable` and `params` are not for a pure step; leave them out")
    probe: Any = cls
    probed = {"params": [torch.nn.Parameter(torch.zeros(1, 1))], **({} if decay is None else {"weight_decay": 0.0})}
    try:
        probe([probed], lr=schedule(0), **options)
    except TypeError as error:
        raise ValueError(f"optimizer: {cls.__name__} does not take these options ({error})") from None
    return Optimizer(cls, schedule, decay, dict(options), None if cls in ELEMENTWISE else sharded)

"""Is tensor parallelism by a module's plan that module? And the rules that the plan leaves out.

A plan is a promise: with these parameters cut and these values summed, every rank ends with what the module computes,
and every gradient is whole. It also leaves things out: a weight that split work reads whole (a per-head norm, a
temperature a head) must have its gradients summed, and nothing says so.

Both are settled by running it. On the probe of a few tokens each unit runs twice, with random parameters and on the
same arguments: whole, and on simulated ranks that hold what the rules say, the derivative taken on each rank. The
outputs and the gradients of the arguments must be the same on every rank, and those of the whole; the gradients of a
cut parameter must be the slices of the whole one's. A parameter that the plan does not name is `Replicated` if its
gradient is the same on every rank, and `Shared` if the ranks' gradients differ and add up to the whole.

This runs when rules are first asked for, which is when somebody asks for tp. A unit at a time is in memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from re import sub
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from fcp import pytree
from fcp._simulate import map_ranks
from fcp.collectives import pvary
from fcp.huggingface._proof import Proof, close, drawn, words
from fcp.huggingface._skeleton import Skeleton, Unit
from fcp.huggingface._tp_plan import Plan
from fcp.ops import LOCAL
from fcp.sharded import slice_of
from fcp.transforms._shard_params import indivisible, tensor_parallel, vocabulary
from fcp.typing import Replicated, Rule, Shared, Split

__all__ = ["PlanRules"]

SIZES = (2, 3, 5, 7, 11, 13)
"""Numbers of ranks to try it on; the first that divides everything."""


class PlanRules(Mapping[str, Rule]):
    """The rules of a module's parameters by its plan, proven when they are first read.

    Raises:
        ValueError: when read, if a rank's work by this plan is not the module's.
    """

    def __init__(self, skeleton: Skeleton, plan: Plan, proof: Proof) -> None:
        self._skeleton, self._plan, self._proof = skeleton, plan, proof

    @cached_property
    def _rules(self) -> Mapping[str, Rule]:
        try:
            return by_pattern(self._prove())
        except ValueError as error:
            raise ValueError(
                f"shard_params: this transformers module cannot be split over tp by the plan that it carries: "
                f"{error}. Split the batch, the sequence or the storage instead (dp, cp, fsdp)."
            ) from None

    def __getitem__(self, pattern: str) -> Rule:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def _prove(self) -> dict[str, Rule]:
        """The rule of every leaf."""
        if self._plan.refusal is not None:
            raise ValueError(self._plan.refusal)
        known = self._known()
        sizes = [size for size in SIZES if not indivisible(known, "tp", size)]
        if not sizes:
            raise ValueError("; ".join(indivisible(known, "tp", 2)[:2]))
        found = dict(known)

        def layer(fn: Callable[..., Any], layer_params: Any, *args: Any) -> Any:
            params = pytree.map_with_path(drawn, layer_params)
            if not isinstance(fn, Unit):
                return followed(fn(params, *args))
            leaves = self._skeleton.units[fn.path]
            rules = {name: known.get(leaf) for name, leaf in leaves.items()}
            out, filled = _prove_unit(fn, sizes[0], rules, vocabulary(known), params, args)
            for name, rule in filled.items():
                leaf = leaves[name]
                if found.setdefault(leaf, rule) != rule:
                    raise ValueError(
                        f"{leaf} is used in two units, in one by split work and in the other by whole work"
                    )
            return followed(out)

        self._proof.run_layers(layer)
        unread = [leaf for leaf in self._skeleton.names if leaf not in found and leaf not in self._outside()]
        return {**found, **{leaf: Replicated() for leaf in {*unread, *self._outside()}}}

    def _outside(self) -> set[str]:
        return set(self._skeleton.outside.values())

    def _known(self) -> dict[str, Rule]:
        """What the plan says, by leaf; the two names of a tied leaf must say the same."""
        found: dict[str, Rule] = {}
        for path, names in self._skeleton.units.items():
            for name, leaf in names.items():
                rule = self._plan.rules.get(f"{path}.{name}")
                if rule is not None and leaf not in self._outside() and found.setdefault(leaf, rule) != rule:
                    raise ValueError(f"the plan cuts {leaf} and {path}.{name}, which are one parameter, differently")
        return found


def by_pattern(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The same rules, those of all layers as one where they agree."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path in rules:
        groups[sub(r"(?<=\.)\d+(?=\.)", "*", path)].append(path)
    found: dict[str, Rule] = {}
    for pattern, paths in groups.items():
        alone = len(paths) > 1 and sorted(p for p in rules if fnmatchcase(p, pattern)) == sorted(paths)
        if alone and len({rules[path] for path in paths}) == 1:
            found[pattern] = rules[paths[0]]
        else:
            found |= {path: rules[path] for path in paths}
    return found


def _prove_unit(
    unit: Unit, size: int, rules: Mapping[str, Rule | None], vocab: int | None, params: Any, args: tuple[Any, ...]
) -> tuple[Any, dict[str, Rule]]:
    """(The unit's output, the rules of the parameters without one), where `size` ranks compute what the unit does."""
    given, spec = pytree.flatten(args)
    moving = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]  # rotary tables do not learn
    given = [x.detach() if isinstance(x, Tensor) else x for x in given]
    held: list[Any] = []  # the output of the whole unit

    def run(ops: Any, params: Mapping[str, Tensor], *floats: Tensor) -> tuple[Tensor, ...]:
        filled = list(given)
        for i, x in zip(moving, floats, strict=True):
            filled[i] = x
        out = unit.with_ops(ops)(params, *pytree.unflatten(spec, filled))
        held.append(out)
        return tuple(x for x in pytree.leaves(out) if isinstance(x, Tensor) and x.is_floating_point())

    names, inputs = list(params), [given[i] for i in moving]
    outs, pull = _vjp(lambda p, *x: run(LOCAL, p, *x), params, *inputs)
    whole_out, cotangents = held.pop(), [drawn(f"cotangent{i}", x) for i, x in enumerate(outs)]
    whole_params, *whole_inputs = pull(tuple(cotangents))

    def rank() -> list[Any]:
        def cut(x: Tensor, rule: Rule | None) -> Tensor:
            if isinstance(rule, Split):
                return slice_of(x, "tp", rule)
            return pvary(x, "tp") if isinstance(rule, Shared) else x

        ops = tensor_parallel(LOCAL, "tp", vocab)
        # Marking lies inside of what is differentiated, cutting outside: a rank has the gradient of its slice.
        sliced = {n: cut(x, rules[n]) if isinstance(rules[n], Split) else x for n, x in params.items()}

        def of(p: Mapping[str, Tensor], *x: Tensor) -> tuple[Tensor, ...]:
            return run(ops, {n: p[n] if isinstance(rules[n], Split) else cut(p[n], rules[n]) for n in names}, *x)

        outs, pull = _vjp(of, sliced, *inputs)
        by_params, *by_inputs = pull(tuple(cotangents))
        expected = [cut(whole_params[n], rules[n]) if isinstance(rules[n], Split) else whole_params[n] for n in names]
        return [*outs, *by_inputs, *(by_params[n] for n in names), *expected]

    try:
        found, dims = map_ranks(rank, "tp", size, (), ())
    except Exception as error:  # of every kind: this is somebody's module
        raise ValueError(f"{unit.path} does not run on a rank's part ({words(error)})") from None
    results = iter(zip(found, dims, strict=True))
    for what, wanted in (("output", outs), ("gradient of the input", whole_inputs)):
        for expected in wanted:
            x, dim = next(results)
            if dim is not None:
                raise ValueError(f"at {unit.path} the {what} would differ between the ranks: a sum is missing")
            if not close(expected, x):
                raise ValueError(f"at {unit.path} the {what} would be another one")
    gradients = [next(results) for _ in names]
    expected = [next(results)[0] for _ in names]
    filled: dict[str, Rule] = {}
    for name, (x, dim), wanted in zip(names, gradients, expected, strict=True):
        rule = rules[name]
        if rule is None:
            filled[name] = Replicated() if dim is None else Shared()
            x = x if dim is None else x.sum(dim)
        elif dim is not None and not isinstance(rule, Split):
            raise ValueError(f"the gradient of {unit.path}.{name} would differ between the ranks: a sum is missing")
        if not close(wanted, x):
            raise ValueError(f"the gradient of {unit.path}.{name} would be another one")
    return _unwrapped(whole_out), filled


_vjp: Any = torch.func.vjp  # its type says that it may give three


def followed(out: Any) -> Any:
    """The same values; what is computed of them from here on is known to depend on parameters."""

    def follow(x: Any) -> Any:
        moves = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().requires_grad_().clone() if moves else x  # some modules write into what they are handed

    return pytree.map(follow, out)


def _unwrapped(out: Any) -> Any:
    """The same tree, its tensors out of the level that differentiated them."""
    found, spec = pytree.flatten(out)
    return pytree.unflatten(spec, [unwrap_dead_wrappers((x,))[0] if isinstance(x, Tensor) else x for x in found])

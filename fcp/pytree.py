"""Pytrees: the only file of fcp that imports optree.

A parameter pytree is nested dicts and lists of tensors, named as a checkpoint names them. Everything that walks one
goes through this file, so that every walk sees the same order: torch's own pytree keeps the insertion order of a
dict, optree sorts its keys, and two walks in two orders pair a gradient with another leaf's parameter and raise
nothing. `None` is a leaf's absence (an optional tensor), never a leaf.

A record becomes a node with `@node("static", ...)`: its tensors are children, the fields named are data that must be
equal for two trees to be alike. A leaf's *path* is its keys joined by dots, which for a model is the tensor's name in
a checkpoint: `model.layers.0.self_attn.q_proj.weight`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import optree
from optree import PyTreeSpec

__all__ = ["flatten", "leaves", "map", "map_with_path", "nest", "node", "paths", "shapes", "unflatten"]

_NAMESPACE = "fcp"
_Record = TypeVar("_Record")


def node(*static: str) -> Callable[[type[_Record]], type[_Record]]:
    """Class decorator: makes a frozen dataclass a pytree node whose fields named in `static` are not children."""

    def register(cls: type[_Record]) -> type[_Record]:
        record: Any = cls
        names = tuple(f.name for f in dataclasses.fields(record) if f.name not in static)

        def flatten_node(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
            return (
                tuple(getattr(value, n) for n in names),
                tuple(getattr(value, n) for n in static),
                names,
            )

        def unflatten_node(data: Any, children: Any) -> Any:
            return cls(**dict(zip(static, data, strict=True)), **dict(zip(names, children, strict=True)))

        optree.register_pytree_node(record, flatten_node, unflatten_node, namespace=_NAMESPACE)
        return cls

    return register


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeSpec]:
    """The leaves of `tree` in the one order, and what `unflatten` needs to put them back."""
    found, spec = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=_NAMESPACE)
    return found, spec


def unflatten(spec: PyTreeSpec, found: Any) -> Any:
    return optree.tree_unflatten(spec, found)


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=_NAMESPACE)


def paths(tree: Any) -> list[str]:
    """The dotted path of each leaf, in the order of `flatten`; the root leaf's path is ""."""
    return [
        ".".join(str(key.field if isinstance(key, optree.NamedTupleEntry) else key.entry) for key in path)
        for path in optree.tree_accessors(tree, namespace=_NAMESPACE)
    ]


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf, by path, in the order of `flatten`."""
    return {path: tuple(x.shape) for path, x in zip(paths(tree), leaves(tree), strict=True)}


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=_NAMESPACE)


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn(path, leaf, *rest leaves)` for every leaf."""
    found, spec = flatten(tree)
    others = [spec.flatten_up_to(other) for other in rest]
    return unflatten(spec, [fn(*args) for args in zip(paths(tree), found, *others, strict=True)])


def nest(named: dict[str, Any]) -> Any:
    """Turns {"a.0.b": x} into {"a": [{"b": x}]}: dotted names into nested dicts, runs of integers into lists.

    >>> nest({"model.layers.0.w": 1, "model.layers.1.w": 2, "head": 3})
    {'model': {'layers': [{'w': 1}, {'w': 2}]}, 'head': 3}
    """
    root: dict[str, Any] = {}
    for name, value in named.items():
        *parents, last = name.split(".")
        here = root
        for key in parents:
            here = here.setdefault(key, {})
        here[last] = value

    def listed(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        tree = {key: listed(value) for key, value in tree.items()}
        if tree and all(key.isdigit() for key in tree):
            if sorted(int(key) for key in tree) != list(range(len(tree))):
                raise ValueError(f"nest: list indices {sorted(tree, key=int)} are not 0..{len(tree) - 1}")
            return [tree[str(index)] for index in range(len(tree))]
        return tree

    return listed(root)

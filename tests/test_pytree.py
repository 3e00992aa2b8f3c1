"""Pytrees: one order for every walk, dotted paths, records as nodes, and nesting of checkpoint names."""

from dataclasses import dataclass

import pytest
import torch

import fcp
from fcp import pytree


@pytree.node("kind")
@dataclass(frozen=True)
class Record:
    first: object
    kind: str
    second: object


def test_order_is_by_key_and_not_by_insertion():
    """Catches two walks that pair a gradient with another leaf's parameter."""
    one, two = {"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1}
    assert pytree.leaves(one) == pytree.leaves(two) == [3, 2, 1]
    assert pytree.paths(one) == pytree.paths(two) == ["a.c", "a.d", "b"]
    assert pytree.map(lambda x, y: (x, y), one, two) == {"a": {"c": (3, 3), "d": (2, 2)}, "b": (1, 1)}
    assert pytree.map_with_path(lambda path, x, y: (path, x, y), one, two)["b"] == ("b", 1, 1)


def test_flatten_and_unflatten_are_inverse():
    """Catches a container that comes back as another one."""
    tree = {"list": [1, (2, 3)], "record": Record(4, "k", [5]), "out": fcp.Output(6, 7), "empty": {}}
    found, spec = pytree.flatten(tree)
    assert pytree.unflatten(spec, found) == tree
    assert pytree.unflatten(spec, [-x for x in found])["record"] == Record(-4, "k", [-5])


def test_none_is_no_leaf():
    """Catches an optional tensor that is handed to tensor code as None."""
    assert pytree.leaves({"a": None, "b": 1}) == [1]
    assert pytree.map(lambda x: x + 1, fcp.Output(None, 1)) == fcp.Output(None, 2)
    assert pytree.paths({"a": None, "b": 1}) == ["b"]


def test_paths_are_names_a_person_knows():
    """Catches a field of a record or an Output that an error calls by its number."""
    assert pytree.paths(torch.ones(2)) == [""]
    assert pytree.paths(fcp.Output(1, 2)) == ["loss", "logits"]
    assert pytree.paths({"layers": [{"w": 1}, Record(2, "k", (3, 4))]}) == [
        "layers.0.w",
        "layers.1.first",
        "layers.1.second.0",
        "layers.1.second.1",
    ]


def test_paths_and_leaves_are_in_one_order():
    """Catches a path list that walks another way than flatten."""
    tree = {"z": fcp.Output(0, 1), "a": [2, Record(3, "k", 4)], "m": {"10": 5, "9": 6}}
    by_path = dict(zip(pytree.paths(tree), pytree.leaves(tree), strict=True))
    assert by_path == {"z.loss": 0, "z.logits": 1, "a.0": 2, "a.1.first": 3, "a.1.second": 4, "m.10": 5, "m.9": 6}


def test_static_fields_make_trees_different():
    """Catches a map over two records whose static data differ."""
    assert pytree.leaves(Record(1, "k", 2)) == [1, 2]
    with pytest.raises(ValueError, match=r"[Mm]ismatch"):
        pytree.map(lambda x, y: x, Record(1, "k", 2), Record(1, "other", 2))


def test_map_stops_where_told():
    """Catches an `is_leaf` that is dropped on the way."""
    assert pytree.map(len, {"a": [1, 2]}, is_leaf=lambda x: isinstance(x, list)) == {"a": 2}


def test_nest_makes_lists_of_runs_of_integers():
    """Catches layers that stay a dict, and ten layers sorted as text."""
    named = {f"layers.{index}.w": index for index in reversed(range(12))} | {"head": -1}
    tree = pytree.nest(named)
    assert tree == {"layers": [{"w": index} for index in range(12)], "head": -1}
    assert dict(zip(pytree.paths(tree), pytree.leaves(tree), strict=True)) == named
    assert pytree.nest({}) == {}


def test_nest_refuses_a_gap():
    """Catches a missing layer that shifts all later ones."""
    with pytest.raises(ValueError, match=r"\['0', '2'\] are not 0\.\.1"):
        pytree.nest({"layers.0.w": 1, "layers.2.w": 2})


def test_records_of_fcp_are_nodes():
    """Catches Inputs or Mask that travel as one opaque leaf and so are never sharded."""
    ids = torch.arange(6).reshape(1, 6)
    inputs = fcp.prepare({"input_ids": ids, "labels": ids})
    assert {"tokens", "positions", "targets", "num_targets"} <= set(pytree.paths(inputs))
    assert all(isinstance(x, torch.Tensor) for x in pytree.leaves(inputs))

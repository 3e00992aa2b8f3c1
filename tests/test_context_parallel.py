"""Ways to attend across slices, by name: what each sends, what "auto" takes and says, and a user's own."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

import fcp
from fcp import _context_parallel
from fcp._context_parallel import choose, cp_impls, register_cp, volume
from tests.tolerances import FLOAT64
from tests.toys import batch_of, gradient, tokens, toy, worst_error


def sent(events: list[fcp.Event], size: int) -> float:
    """Bytes that one rank sends, from what it hands in: all but its own part of an exchange, a gather to all others."""
    share = {"all_to_all": (size - 1) / size, "psum_scatter": (size - 1) / size, "all_gather": size - 1, "ppermute": 1}
    return sum(event.bytes * share[event.name] for event in events if event.name in share)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 2)])
@pytest.mark.parametrize("impl", ["ulysses", "ring", "gather"])
def test_volume_is_what_is_sent(impl: str, heads: tuple[int, int], size: int) -> None:
    """A formula that forgets an exchange, the padded heads, or the way home."""
    model, params = toy(
        num_hidden_layers=1, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8, vocab_size=64
    )
    layout: Any = {} if impl == "ulysses" else {"layout": "zigzag"}  # where every rank sees some of every block
    sharded = fcp.transform(model, cp=size, cp_impl=impl, **layout)
    inputs = fcp.prepare(batch_of(tokens(1, 8 * size)))
    with fcp.record() as events:
        fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, inputs)
    assert sent(events, size) / 8 == pytest.approx(volume(impl, *heads, 8, size, itemsize=8), rel=1e-9)


@dataclass(frozen=True)
class Config:
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    hidden_size: int = 4096


def test_auto_says_why() -> None:
    """A choice that pads heads, or that nobody can follow."""
    whole = choose(Config(), 8, 1)
    assert whole.impl == "ulysses" and "32 query heads and 8 of keys and values on each of 8 ranks" in whole.why
    assert "bytes sent a token, layer and rank in bfloat16: ulysses " in whole.why
    odd = choose(Config(18, 6), 8, 1)
    assert odd.impl == "ring" and odd.layout == "zigzag" and "ulysses pads the query heads to 24" in odd.why
    nearly = choose(Config(30, 10), 8, 1)
    assert nearly.impl == "ulysses" and "ulysses pads the query heads to 32" in nearly.why
    few = choose(Config(32, 2), 2, 1)
    assert few.impl == "gather" and few.layout == "zigzag"
    shared = choose(Config(32, 8), 8, 4)  # 8 and 2 heads a tp rank
    assert "8 query heads and 2 of keys and values" in shared.why
    ordered = choose(Config(), 8, 1, "balanced")
    assert ordered.impl == "ring" and ordered.layout == "balanced" and "under ulysses none does" in ordered.why
    assert "names no number of attention heads" in choose(object(), 2, 1).why


def test_auto_is_what_it_says() -> None:
    """A choice that is told and not made."""
    model, params = toy(num_attention_heads=6, num_key_value_heads=3)
    batch = batch_of(tokens(1, 11))
    sharded = fcp.transform(model, cp=4, cp_impl="auto")
    assert "ring(cp)" in sharded.applied and "shard_seq(cp, zigzag)" in sharded.applied and sharded.why
    assert worst_error(gradient(model, params, batch), gradient(sharded, params, batch)) < FLOAT64
    assert "shard_seq(cp)" in fcp.transform(model, cp=4, cp_impl="auto", layout="contiguous").applied
    assert fcp.transform(model, cp=4).why == ""


def test_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered way that another one runs in the place of."""
    monkeypatch.setattr(_context_parallel, "_registry", dict(cp_impls))
    used: list[Any] = []

    def counted(model_fn: fcp.ModelFn, *, axis: Any) -> fcp.Sharded:
        used.append(axis)
        return fcp.gather(model_fn, axis=axis)

    register_cp("counted", counted)
    model, params = toy()
    batch = batch_of(tokens(1, 9))
    monkeypatch.setattr("fcp._validate.cp_impls", _context_parallel._registry)
    for cp, axis in ((2, "cp"), ((2, 2), "cp_ring")):
        sharded = fcp.transform(model, cp=cp, cp_impl="counted")
        assert used.pop() == axis and not used
        assert worst_error(gradient(model, params, batch), gradient(sharded, params, batch)) < FLOAT64
    for name, own, words in (
        ("ring", counted, "'ring' is taken"),
        ("auto", counted, "'auto' is taken"),
        ("mine", lambda model_fn: model_fn, "no transform"),
    ):
        with pytest.raises(ValueError, match=words):
            register_cp(name, own)


def test_two_axes_are_one_product() -> None:
    """A hybrid whose slices lie in another order than the ranks that exchange them."""
    model, _ = toy()
    sharded = fcp.transform(model, cp=(2, 4), tp=2)
    assert dict(sharded.axes) == {"cp_ring": 4, "cp_ulysses": 2, "tp": 2}
    assert math.prod(sharded.axes.values()) == 16
    assert dict(fcp.transform(model, cp=(1, 4)).axes) == {"cp_ring": 4}
    assert "ulysses(cp_ulysses)" in fcp.transform(model, cp=(2, 1)).applied

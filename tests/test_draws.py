"""Everything at once: draws over families, masks, sizes and settings that the grid crosses a few at a time.

A draw is decided by its seed alone, so a failure is found again by its number. Rows, head counts and expert groups are
drawn so that nothing is refused, but for what only `fcp.transform` can judge; then the seed draws again.
"""

import random
from dataclasses import dataclass
from functools import cache, reduce
from math import gcd, prod
from typing import Any

import pytest
import torch

import fcp
from fcp._compare import report
from tests.grid import FAMILIES, NO_WINDOWS, SEQ, VOCAB
from tests.tolerances import FLOAT64
from tests.toys import gradient, randomized

EXPERTS = ("gpt_oss", "llama4", "deepseek_v3")
HEADS = ((8, 4), (6, 2), (9, 3), (4, 1), (12, 4), (5, 5), (4, 2))
SAMPLE = range(30)


@dataclass(frozen=True)
class Draw:
    """One seed's model, batch, and what `fcp.transform` is asked for; `packed` where a row has documents by its ids."""

    seed: int
    model: fcp.Model
    batch: dict[str, Any]
    options: dict[str, Any]
    packed: bool
    words: str

    @property
    def sharded(self) -> fcp.Model:
        return fcp.transform(self.model, **self.options)


@cache
def drawn(seed: int) -> Draw:
    """The draw of a seed."""
    choose = random.Random(seed)
    while True:
        draw = _candidate(seed, choose)
        try:
            draw.sharded(randomized(draw.model), draw.batch)
        except ValueError:
            continue
        return draw


def _candidate(seed: int, choose: random.Random) -> Draw:
    family, heads = choose.choice(list(FAMILIES)), choose.choice(HEADS)
    options = _options(choose, family, heads)
    rows = options.get("dp", 1) * options.get("fsdp", 1) * choose.randint(1, 2)
    seq = choose.randint(1, SEQ if family == "gpt2" else 29)  # gpt2's table has no more positions
    windows: dict[str, Any] = {}
    if family not in NO_WINDOWS and choose.random() < 0.5:
        windows["sliding_window"] = choose.randint(1, 9)
        if choose.random() < 0.5:
            windows["layer_types"] = tuple(choose.sample(("full_attention", "sliding_attention"), 2))
    batch = _batch(choose, rows, seq)
    packed = "position_ids" in batch or "document_ids" in batch
    words = f"{family} {heads} {windows} {rows}x{seq} {sorted(batch)} {options}"
    return Draw(seed, FAMILIES[family](*heads, windows), batch, options, packed, words)


def _options(choose: random.Random, family: str, heads: tuple[int, int]) -> dict[str, Any]:
    def sometimes(chance: float, *values: Any) -> Any:
        return choose.choice(values) if values and choose.random() < chance else None

    cp = sometimes(0.8, 2, 3, 4, 5, 8, (2, 2), (2, 3), (3, 2))
    keeps_queries = False
    asked: dict[str, Any] = {"cp": cp}
    if cp is not None:
        asked["cp_impl"] = sometimes(0.6, "ring", "gather", *(() if isinstance(cp, tuple) else ("ulysses", "auto")))
        keeps_queries = isinstance(cp, tuple) or asked["cp_impl"] in ("ring", "gather")
    if keeps_queries:
        asked["layout"] = sometimes(0.6, "zigzag", "balanced")
    shared = reduce(gcd, heads)
    asked["tp"] = sometimes(0.4, *(n for n in (2, 3, 4) if shared % n == 0))
    asked["fsdp"] = sometimes(0.3, 2, 3)
    asked["dp"] = sometimes(0.25, 2, 3)
    if family in EXPERTS:
        asked["ep"] = sometimes(0.7, 2, 4)
        asked["ep_plan"] = sometimes(0.5, "all_reduce") if asked["ep"] and asked["ep"] == asked["tp"] else None
    asked["remat"] = sometimes(0.3, "layer", "attention")
    asked["logits"] = sometimes(0.3, False)
    asked["loss_tile"] = sometimes(0.7, *range(1, 10)) if asked["logits"] is False else None
    asked["mlp_tile"] = sometimes(0.25, *range(1, 10))
    return {name: value for name, value in asked.items() if value is not None}


def _batch(choose: random.Random, rows: int, seq: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    ids = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    kept = torch.rand(rows, seq, generator=generator) >= choose.choice((0, 0, 0.2, 0.5, 0.95))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.where(kept, -100)}

    def restarting() -> list[int]:
        row: list[int] = []
        while len(row) < seq:
            row += range(choose.randint(1, seq))
        return row[:seq]

    how = choose.random()
    if how < 0.35:
        batch["position_ids"] = torch.tensor([restarting() for _ in range(rows)])
    elif how < 0.5:
        batch["document_ids"] = torch.randint(0, 4, (rows, seq), generator=generator).sort(1).values
    if choose.random() < 0.4:
        lengths, row = torch.randint(0, seq + 1, (rows, 1), generator=generator), torch.arange(seq)
        anywhere = torch.rand(rows, seq, generator=generator) < 0.8
        real = choose.choice((row >= seq - lengths, row < lengths, anywhere))
        batch["attention_mask"] = real.long()
    if choose.random() < 0.15:
        batch["num_items_in_batch"] = choose.randint(1, 50)
    return batch


def error_of(draw: Draw, batch: dict[str, Any]) -> float:
    """The worst error of the draw's sharded function on `batch`, measured against the unsharded one on the draw's."""
    params, sharded = randomized(draw.model), draw.sharded
    expected, expected_grads = fcp.value_and_grad(draw.model)(params, draw.batch)
    found, grads = fcp.value_and_grad(sharded)(params, batch)
    errors = [report(expected, expected_grads, found, grads).worst]
    if draw.seed % 3 == 0:  # as any code of torch.func would differentiate it
        errors.append(report(expected, expected_grads, found, gradient(sharded, params, batch)).worst)
    return max(errors)


@pytest.mark.parametrize("seed", SAMPLE)
def test_sample(seed: int) -> None:
    """Two features that are each right and wrong together."""
    draw = drawn(seed)
    assert error_of(draw, draw.batch) < FLOAT64, draw.words


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(30, 1030, 50))
def test_all(start: int) -> None:
    """The same, fifty seeds at a time."""
    errors = {draw.words: error_of(draw, draw.batch) for draw in map(drawn, range(start, start + 50))}
    assert not {words: error for words, error in errors.items() if not error < FLOAT64}


def test_the_check_notices() -> None:
    """Mutant: a sharded function whose documents see each other, where a row has several."""
    errors = []
    for draw in map(drawn, SAMPLE):
        labels, documents = draw.batch["labels"], draw.batch.get("document_ids")
        if documents is not None and ((documents[:, :1] != documents) & (labels != -100)).any():
            joined = {name: value for name, value in draw.batch.items() if name != "document_ids"}
            errors.append(error_of(draw, joined))
    assert errors and min(errors) > 1e-6


def test_draws_are_wide() -> None:
    """Draws that are mostly refused, and so mostly plain: every setting is drawn, alone and with others."""
    draws = [drawn(seed) for seed in SAMPLE]
    seen = {name for draw in draws for name in draw.options}
    assert seen >= {"cp", "cp_impl", "layout", "tp", "fsdp", "dp", "ep", "remat", "logits", "loss_tile", "mlp_tile"}
    assert sum(draw.packed for draw in draws) > 10
    ranks = [prod(fcp.transform(draw.model, **draw.options).axes.values()) for draw in draws]
    assert max(ranks) >= 16 and ranks.count(1) < 10

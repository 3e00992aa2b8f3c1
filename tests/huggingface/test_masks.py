"""fcp's masks against those that transformers' own mask functions build unsharded, entry for entry."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fcp
from fcp.huggingface._window import words_of

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

SEQ = 13
KINDS = ("plain", "packed", "left", "right")

Row = tuple[list[int], int]
"""The lengths of a row's documents, and its padding."""


def theirs(words: dict[str, int], batch: dict[str, Tensor]) -> Tensor:
    """[batch, 1, seq, seq], by the function that builds the masks of such layers."""
    config: Any = transformers.LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    config.sliding_window, config.attention_chunk_size = words.get("window"), words.get("chunk")
    make = masking.create_causal_mask
    if "window" in words:
        make = masking.create_sliding_window_causal_mask
    if "chunk" in words:
        make = masking.create_chunked_causal_mask
    rows = next(iter(batch.values())).shape[0]
    given = {name: batch.get(name) for name in ("attention_mask", "position_ids")}
    return make(config, torch.zeros(rows, SEQ, 8), cache=None, **given, allow_is_causal_skip=False)


def ours(words: dict[str, int], batch: dict[str, Tensor]) -> Tensor:
    rows = next(iter(batch.values())).shape[0]
    inputs = fcp.prepare({"input_ids": torch.ones(rows, SEQ, dtype=torch.int64), **batch})
    found = fcp.masks.materialize(inputs.mask, **words)
    plain = torch.ones(SEQ, SEQ, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    return plain if found is None else found


def batch_of(kind: str, rows: list[Row]) -> dict[str, Tensor]:
    """What says that rows are packed or padded, in transformers' words."""
    if kind == "packed":
        positions = [torch.cat([torch.arange(n) for n in lengths])[:SEQ] for lengths, _ in rows]
        return {"position_ids": torch.stack(positions)}
    mask = torch.ones(len(rows), SEQ, dtype=torch.int64)
    for row, (_, padding) in zip(mask, rows, strict=True):
        if kind == "left":
            row[:padding] = 0
        if kind == "right":
            row[SEQ - padding :] = 0
    return {"attention_mask": mask}


documents = st.lists(st.integers(1, 6), min_size=SEQ, max_size=SEQ)
words = st.one_of(
    st.just({}),
    st.integers(1, SEQ + 3).map(lambda n: {"window": n}),
    st.integers(1, SEQ + 3).map(lambda n: {"chunk": n}),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), words, st.lists(st.tuples(documents, st.integers(0, SEQ - 1)), min_size=1, max_size=3))
def test_every_entry_is_the_same(kind: str, words: dict[str, int], rows: list[Row]) -> None:
    """A window off by one, a chunk that starts elsewhere, documents that see each other, padding that is seen."""
    batch = batch_of(kind, rows)
    assert torch.equal(ours(words, batch), theirs(words, batch).expand(len(rows), -1, -1, -1))


def test_the_comparison_sees_a_difference() -> None:
    """Its own mutant: a window of one key more or less, and packing that is not said."""
    batch = batch_of("packed", [([5, 8, *[1] * 11], 0)])
    assert not torch.equal(ours({"window": 3}, batch), theirs({"window": 4}, batch))
    assert not torch.equal(ours({}, batch), theirs({}, {"attention_mask": torch.ones(1, SEQ, dtype=torch.int64)}))


# --- the words of a mask function -------------------------------------------------------------------------------------


def chunks(n: int) -> Callable[..., Any]:
    return masking.chunked_causal_mask_function(n, torch.zeros(1, dtype=torch.int64))


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(1, 40), st.integers(41, 1 << 20)))
def test_a_mask_function_is_asked_for_its_words(n: int) -> None:
    assert words_of(masking.sliding_window_causal_mask_function(n)) == (n, None)
    assert words_of(chunks(n)) == ((None, n) if n > 1 else (1, None))


def test_plain_causal_says_nothing() -> None:
    assert words_of(masking.causal_mask_function) == (None, None)


@pytest.mark.parametrize(
    "function",
    [
        masking.bidirectional_mask_function,
        masking.sliding_window_bidirectional_mask_function(4),
        masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: k < 3),
        masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: k > 0),
        masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0),
        masking.and_masks(masking.sliding_window_causal_mask_function(3), chunks(5)),
        lambda b, h, q, k: k < q,
    ],
)
def test_what_is_not_causal_with_a_window_or_a_chunk_is_refused(function: Callable[..., Any]) -> None:
    """A prefix, a sink, a stride, both sides, a window within chunks, all but oneself: none is said in two numbers."""
    with pytest.raises(ValueError, match="is not causal with a window or a chunk"):
        words_of(function)

"""prepare: what a batch with Hugging Face's names means, settled once on the whole batch, and what is refused."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import _prepare
from fcp.masks import count_pairs, materialize
from fcp.typing import IGNORED
from tests.tolerances import FLOAT64
from tests.toys import PACK8, tokens, toy

NONE = IGNORED


def row(*values: int) -> Tensor:
    return torch.tensor([values])


def labelled(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, **more}


EIGHT = torch.arange(1, 9)[None]


# --- targets ----------------------------------------------------------------------------------------------------------


def test_labels_are_shifted_over_the_whole_row() -> None:
    """Catches a shift after sharding (C-01): the targets at shard edges would be lost, 6 or 4 of 7 left."""
    inputs = fcp.prepare(labelled(EIGHT))
    assert inputs.targets.tolist() == [[2, 3, 4, 5, 6, 7, 8, NONE]]
    assert int(inputs.num_targets) == 7
    for size, cut in ((2, [[2, 3, 4, 5], [6, 7, 8, NONE]]), (4, [[2, 3], [4, 5], [6, 7], [8, NONE]])):
        assert [x[0].tolist() for x in inputs.targets.chunk(size, 1)] == cut


@pytest.mark.parametrize("mask", [None, torch.ones(1, 8, dtype=torch.int64)], ids=["", "ones"])
def test_the_last_token_of_a_document_has_no_target(mask: Tensor | None) -> None:
    """Catches a shift over the row (C-02: 7 targets for 6), and documents that a mask of ones switches off (C-08)."""
    inputs = fcp.prepare(labelled(EIGHT, position_ids=torch.tensor([PACK8]), attention_mask=mask))
    assert inputs.targets.tolist() == [[2, 3, NONE, 5, 6, 7, 8, NONE]]
    assert int(inputs.num_targets) == 6
    assert inputs.mask.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert inputs.mask.valid is None
    assert count_pairs(inputs.mask) == 21


def test_a_packed_row_has_the_targets_of_its_documents_as_rows() -> None:
    """Catches a document edge that loses or gains a target beside the separate rows (C-02)."""
    first, second = torch.arange(1, 8)[None], torch.arange(20, 23)[None]
    packed = fcp.prepare(
        labelled(torch.cat([first, second], 1), position_ids=torch.cat([torch.arange(7), torch.arange(3)])[None])
    )
    alone = [fcp.prepare(labelled(x)) for x in (first, second)]
    assert torch.equal(packed.targets, torch.cat([x.targets for x in alone], 1))
    assert int(packed.num_targets) == sum(int(x.num_targets) for x in alone) == 8
    assert count_pairs(packed.mask) == 34


def test_explicit_documents_win_over_positions() -> None:
    """Catches document ids that are ignored where positions say otherwise, or where no positions are given."""
    ids = row(0, 0, 0, 4, 4, 4, 4, 4)
    given = fcp.prepare(labelled(EIGHT, document_ids=ids))
    assert given.targets.tolist() == [[2, 3, NONE, 5, 6, 7, 8, NONE]]
    assert given.positions.tolist() == [list(range(8))] and count_pairs(given.mask) == 21
    one = fcp.prepare(labelled(EIGHT, document_ids=torch.zeros_like(ids), position_ids=torch.tensor([PACK8])))
    assert one.targets.tolist() == [[2, 3, 4, 5, 6, 7, 8, NONE]]
    assert one.positions.tolist() == [PACK8] and count_pairs(one.mask) == 36


@pytest.mark.parametrize(
    ("attention_mask", "targets", "pairs"),
    [
        ([0, 0, 1, 1, 1, 1, 1, 1], [NONE, NONE, 4, 5, 6, 7, 8, NONE], 21),
        ([1, 1, 1, 1, 1, 0, 0, 0], [2, 3, 4, 5, NONE, NONE, NONE, NONE], 30),
        ([1, 1, 1, 0, 0, 1, 1, 1], [2, 3, NONE, NONE, NONE, 7, 8, NONE], 27),
        ([0, 0, 0, 0, 0, 0, 0, 1], [NONE] * 8, 1),
        ([0] * 8, [NONE] * 8, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_neither_is_a_target_nor_predicts_one(
    attention_mask: list[int], targets: list[int], pairs: int, dtype: torch.dtype
) -> None:
    """Catches the pad token taught as a target, and the first real token taught from padding (both sides of C-12)."""
    inputs = fcp.prepare(labelled(EIGHT, attention_mask=torch.tensor([attention_mask]).to(dtype)))
    assert inputs.targets.tolist() == [targets]
    assert int(inputs.num_targets) == sum(target != NONE for target in targets)
    assert inputs.mask.valid.tolist() == [[bool(x) for x in attention_mask]]
    assert count_pairs(inputs.mask) == pairs


def test_left_padding_leaves_ten_pairs_of_six_tokens() -> None:
    """Catches a left-padded mask replaced by plain causal (C-07 b: 21 pairs)."""
    assert count_pairs(fcp.prepare({"input_ids": EIGHT[:, :6], "attention_mask": row(0, 0, 1, 1, 1, 1)}).mask) == 10


def test_ignored_labels_are_no_targets() -> None:
    """Catches a count of tokens instead of targets, and a label at the first token that is taken for one."""
    labels = row(9, NONE, 9, 9, NONE, NONE, 9, NONE)
    inputs = fcp.prepare({"input_ids": EIGHT, "labels": labels})
    assert inputs.targets.tolist() == [[NONE, 9, 9, NONE, NONE, 9, NONE, NONE]]
    assert int(inputs.num_targets) == 3


def test_a_batch_without_labels_has_no_targets_and_no_loss() -> None:
    """Catches a loss of 0, or of the tokens themselves, where nothing was asked."""
    inputs = fcp.prepare({"input_ids": EIGHT, "labels": None})
    assert inputs.targets is None and int(inputs.num_targets) == 0
    from models import llama

    model = llama.tiny()
    out = model(model.init(seed=0), {"input_ids": EIGHT})
    assert out.loss is None and out.logits.shape == (1, 8, 64)


def test_no_target_at_all_counts_zero() -> None:
    """Catches a count that is 1 at the least here: the one clamp is the division's (C-05)."""
    inputs = fcp.prepare({"input_ids": EIGHT, "labels": torch.full_like(EIGHT, NONE)})
    assert int(inputs.num_targets) == 0 and bool((inputs.targets == NONE).all())


@pytest.mark.parametrize("count", [40, torch.tensor(40), torch.tensor([40]), torch.tensor(40, dtype=torch.int32)])
def test_a_given_count_wins(count: int | Tensor) -> None:
    """Catches micro-batches that divide by their own count (C-04: a mean of means)."""
    inputs = fcp.prepare(labelled(EIGHT, num_items_in_batch=count))
    assert int(inputs.num_targets) == 40
    assert inputs.num_targets.shape == () and inputs.num_targets.dtype == torch.int64


# --- positions --------------------------------------------------------------------------------------------------------


def test_positions_default_to_the_whole_row() -> None:
    """Catches positions of another length than the row's, and one row's for the batch (C-10)."""
    inputs = fcp.prepare({"input_ids": EIGHT.expand(3, 8)})
    assert inputs.positions.tolist() == [list(range(8))] * 3
    assert int(inputs.num_positions) == 8 and inputs.mask.plain


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8)])
def test_positions_may_be_one_row_for_all(shape: tuple[int, ...]) -> None:
    """Catches positions that stay one row where the batch has two, and ids of int32 that stay narrow."""
    positions = torch.tensor(PACK8, dtype=torch.int32).expand(shape)
    inputs = fcp.prepare(labelled(EIGHT.expand(2, 8), position_ids=positions))
    assert inputs.positions.tolist() == inputs.mask.positions.tolist() == [PACK8, PACK8]
    assert inputs.positions.dtype == torch.int64
    assert int(inputs.num_positions) == 5 and int(inputs.num_targets) == 12


def test_the_largest_position_is_that_of_the_whole_batch() -> None:
    """Catches rope scaling that reads the first row's length, or the number of tokens."""
    positions = torch.tensor([list(range(8)), list(range(90, 98))])
    assert int(fcp.prepare({"input_ids": EIGHT.expand(2, 8), "position_ids": positions}).num_positions) == 98


def test_chunks_count_from_the_first_real_token() -> None:
    """Catches chunk edges moved by left padding; positions, which rotary reads relatively, stay the row's."""
    inputs = fcp.prepare(
        {"input_ids": EIGHT.expand(2, 8), "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])}
    )
    assert inputs.positions.tolist() == [list(range(8))] * 2
    assert inputs.mask.positions.tolist() == [list(range(-3, 5)), list(range(8))]
    allowed = materialize(inputs.mask, chunk=4)
    assert allowed is not None
    assert allowed[0, 0].sum(-1).tolist() == [0, 0, 0, 1, 2, 3, 4, 1]
    assert allowed[1, 0].sum(-1).tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_given_positions_decide_chunks_whatever_the_padding() -> None:
    """Catches padding taken off ids that the caller gave: they already say where the row starts."""
    positions = row(0, 0, 0, 1, 2, 3, 4, 5)
    inputs = fcp.prepare({"input_ids": EIGHT, "position_ids": positions, "attention_mask": row(0, 0, 1, 1, 1, 1, 1, 1)})
    assert torch.equal(inputs.mask.positions, positions)


def test_a_hole_in_the_mask_is_no_leading_padding() -> None:
    """Catches a count of all padding where only what comes first moves the row."""
    inputs = fcp.prepare({"input_ids": EIGHT, "attention_mask": row(0, 1, 1, 0, 1, 1, 0, 0)})
    assert inputs.mask.positions.tolist() == [list(range(-1, 7))]


# --- what goes through ------------------------------------------------------------------------------------------------


def test_inputs_pass_through_unchanged() -> None:
    """Catches a second shift of targets that were shifted already."""
    inputs = fcp.prepare(labelled(EIGHT))
    assert fcp.prepare(inputs) is inputs


def test_embeddings_take_the_place_of_tokens() -> None:
    """Catches the hidden dim read as the sequence, and a gradient to the embeddings that is cut."""
    embeds = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    inputs = fcp.prepare({"inputs_embeds": embeds, "labels": EIGHT.expand(2, 8), "input_ids": None})
    assert inputs.tokens is None and inputs.embeds is embeds
    assert inputs.positions.shape == (2, 8) and int(inputs.num_targets) == 14


def test_narrow_integers_come_back_as_int64() -> None:
    """Catches ids that a later gather or embedding refuses, and -100 lost in a cast."""
    narrow = EIGHT.to(torch.int32).clone()
    labels = narrow.clone()
    labels[0, 3] = NONE
    inputs = fcp.prepare(
        {"input_ids": narrow, "labels": labels, "position_ids": torch.tensor([PACK8], dtype=torch.int32)}
        | {"document_ids": row(0, 0, 0, 1, 1, 1, 1, 1).to(torch.int16)}
    )
    assert {x.dtype for x in (inputs.tokens, inputs.targets, inputs.positions, inputs.mask.documents)} == {torch.int64}
    assert inputs.targets.tolist() == [[2, 3, NONE, 5, 6, 7, 8, NONE]]


def test_a_batch_is_any_mapping_and_is_left_as_it_was() -> None:
    """Catches a dict type demanded of a tokenizer's output, and labels shifted in place."""
    batch = labelled(EIGHT.clone(), attention_mask=torch.ones(1, 8))
    before = {name: x.clone() for name, x in batch.items()}
    assert torch.equal(fcp.prepare(UserDict(batch)).targets, fcp.prepare(batch).targets)
    assert all(torch.equal(batch[name], before[name]) for name in before)


# --- refusals ---------------------------------------------------------------------------------------------------------

DENSE = "a dense mask is refused.*position_ids or document_ids.*window or chunk"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (labelled(EIGHT, token_type_ids=EIGHT), "batch has 'token_type_ids'; known are input_ids"),
        (labelled(EIGHT, cu_seq_lens_q=row(0, 8), max_length_q=8), "'cu_seq_lens_q', 'max_length_q'"),
        ({"labels": EIGHT}, "exactly one of input_ids .* and inputs_embeds"),
        ({"input_ids": None}, "exactly one of"),
        ({"input_ids": EIGHT, "inputs_embeds": torch.zeros(1, 8, 2)}, "exactly one of"),
        (labelled(EIGHT, attention_mask=torch.zeros(1, 1, 8, 8)), rf"\(1, 1, 8, 8\): {DENSE}"),
        (labelled(EIGHT, attention_mask=torch.ones(1, 8, 8).tril()), DENSE),
        (labelled(EIGHT, attention_mask=torch.ones(8)), r"attention_mask of shape \(8,\)"),
        (labelled(EIGHT, attention_mask=torch.ones(1, 7)), r"attention_mask of shape \(1, 7\)"),
        (labelled(EIGHT, attention_mask=row(1, 1, 1, 2, 2, 2, 2, 2)), "other than 0 and 1.*document_ids"),
        (labelled(EIGHT, attention_mask=torch.full((1, 8), -1.0)), "other than 0 and 1"),
        (labelled(EIGHT, attention_mask=torch.full((1, 8), float("nan"))), "other than 0 and 1"),
        ({"input_ids": EIGHT, "labels": EIGHT[:, :7]}, r"labels of shape \(1, 7\).*\(1, 8\)"),
        ({"input_ids": EIGHT, "labels": EIGHT[0]}, r"labels of shape \(8,\)"),
        ({"input_ids": EIGHT.expand(2, 8), "labels": EIGHT}, r"labels of shape \(1, 8\)"),
        ({"input_ids": EIGHT, "labels": EIGHT.double()}, "labels of dtype torch.float64"),
        ({"input_ids": EIGHT, "labels": EIGHT > 0}, "labels of dtype torch.bool"),
        ({"input_ids": EIGHT, "labels": EIGHT - 3}, "labels below 0 other than -100"),
        (labelled(EIGHT, position_ids=EIGHT[:, :4]), r"position_ids of shape \(1, 4\)"),
        (labelled(EIGHT, position_ids=EIGHT.expand(2, 8)), r"position_ids of shape \(2, 8\)"),
        (labelled(EIGHT, position_ids=EIGHT.float()), "position_ids of dtype torch.float32"),
        (labelled(EIGHT, document_ids=EIGHT[0]), r"document_ids of shape \(8,\)"),
        (labelled(EIGHT, document_ids=EIGHT.float()), "document_ids of dtype"),
        ({"input_ids": EIGHT[0]}, r"input_ids of shape \(8,\) must be \[batch, seq\]"),
        ({"input_ids": EIGHT[None]}, r"input_ids of shape \(1, 1, 8\)"),
        ({"input_ids": EIGHT.float()}, "input_ids of dtype torch.float32"),
        ({"input_ids": EIGHT > 3}, "input_ids of dtype torch.bool"),
        ({"input_ids": torch.zeros(0, 8, dtype=torch.int64)}, "at least one row and token"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "at least one row and token"),
        ({"inputs_embeds": torch.zeros(1, 8)}, r"inputs_embeds of shape \(1, 8\) must be \[batch, seq, hidden\]"),
        ({"inputs_embeds": torch.zeros(1, 8, 2, dtype=torch.int64)}, "inputs_embeds of dtype torch.int64"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids is a list; give tensors"),
        (labelled(EIGHT, num_items_in_batch=1.5), "num_items_in_batch 1.5, which is no count"),
        (labelled(EIGHT, num_items_in_batch=True), "num_items_in_batch True"),
        (labelled(EIGHT, num_items_in_batch=-1), "num_items_in_batch -1"),
        (labelled(EIGHT, num_items_in_batch=torch.tensor([3, 4])), "num_items_in_batch tensor"),
        (labelled(EIGHT, num_items_in_batch=torch.tensor(3.0)), "num_items_in_batch tensor"),
    ],
)
def test_what_a_batch_cannot_say_is_refused(batch: dict[str, Any], message: str) -> None:
    """Catches a key, mask, shape or dtype that is ignored and trained on as something else (C-07, C-11)."""
    with pytest.raises(ValueError, match=f"prepare: .*{message}"):
        fcp.prepare(batch)


def test_everything_wrong_is_said_at_once() -> None:
    """Catches errors that come one a run."""
    with pytest.raises(ValueError, match=r"labels of shape \(1, 7\); position_ids of dtype torch.float32; num_items"):
        fcp.prepare(
            {"input_ids": EIGHT, "labels": EIGHT[:, :7], "position_ids": EIGHT.float(), "num_items_in_batch": -3}
        )


# --- mutants ----------------------------------------------------------------------------------------------------------


def _shift_each_half(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    return torch.cat([_WHOLE_SHIFT(x, None, None) for x in labels.chunk(2, 1)], 1)


def _shift_over_the_row(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    return _WHOLE_SHIFT(labels, None, valid)


def _padding_predicts(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    """Padding is hidden as a target only."""
    if valid is not None:
        labels = labels.masked_fill(~valid, NONE)
    return _WHOLE_SHIFT(labels, documents, None)


def _padding_is_a_target(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    targets = _WHOLE_SHIFT(labels, documents, None)
    return targets if valid is None else targets.masked_fill(~valid, NONE)


def _unshifted(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    return labels


_WHOLE_SHIFT = _prepare._shift
MUTANTS: dict[str, Callable[..., Tensor]] = {
    "shifted after the row was cut": _shift_each_half,
    "shifted over document edges": _shift_over_the_row,
    "padding predicts": _padding_predicts,
    "padding is a target": _padding_is_a_target,
    "not shifted": _unshifted,
}
TARGET_TESTS = {
    "C-01": (labelled(EIGHT), [2, 3, 4, 5, 6, 7, 8, NONE]),
    "C-02": (labelled(EIGHT, position_ids=torch.tensor([PACK8])), [2, 3, NONE, 5, 6, 7, 8, NONE]),
    "left": (labelled(EIGHT, attention_mask=row(0, 0, 1, 1, 1, 1, 1, 1)), [NONE, NONE, 4, 5, 6, 7, 8, NONE]),
    "right": (labelled(EIGHT, attention_mask=row(1, 1, 1, 1, 1, 0, 0, 0)), [2, 3, 4, 5, NONE, NONE, NONE, NONE]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_faulty_shift_is_told_apart(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The pinned targets would be no witness if a faulty shift gave them all."""
    wanted = [targets for _, targets in TARGET_TESTS.values()]

    def found() -> list[list[int]]:
        return [fcp.prepare(batch).targets[0].tolist() for batch, _ in TARGET_TESTS.values()]

    assert found() == wanted
    monkeypatch.setattr(_prepare, "_shift", MUTANTS[name])
    assert found() != wanted


def test_embeddings_of_padding_are_selected_away() -> None:
    """Unused memory that holds NaN: multiplied by a weight of zero in attention it would reach every real token."""
    model, params = toy()
    table = params["model"]["embed_tokens"]["weight"]
    ids = tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    dirty = torch.where(mask[..., None] == 1, table[ids], torch.nan)
    for fn in (model, fcp.transform(model, cp=4), fcp.transform(model, cp=2, tp=2)):
        clean = fn(params, {"input_ids": ids, "labels": ids, "attention_mask": mask})
        out = fn(params, {"inputs_embeds": dirty, "labels": ids, "attention_mask": mask})
        assert fcp.relative_error(clean.loss, out.loss) < FLOAT64
        assert fcp.relative_error(clean.logits[mask == 1], out.logits[mask == 1]) < FLOAT64
        grads = torch.func.grad(
            lambda p, fn=fn: fn(p, {"inputs_embeds": dirty, "labels": ids, "attention_mask": mask}).loss
        )(params)
        assert all(bool(x.isfinite().all()) for x in fcp.pytree.leaves(grads))

"""Data: what a row holds, in which order rows come, and where the position in it is taken up again."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fcp
from fcp import _cli_inputs, data
from fcp.data import _rows

DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23]]
TOKENS = sum(map(len, DOCUMENTS))


def packed(**settings: Any) -> data.Packed:
    return data.pack(data.of_tokens(DOCUMENTS), **{"seq": 5, "batch": 2, "seed": 3, **settings})


def taken(packed: data.Packed, batches: int) -> list[list[int]]:
    """The rows of the first batches, one after another."""
    rows = itertools.islice(packed, batches)
    return [row for batch in rows for row in batch["input_ids"].tolist()]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_fcp_check() -> None:
    """Two rules for one word: documents cut, or positions restarted, otherwise than where a model is checked."""
    expected = _cli_inputs.batch_of(DOCUMENTS, [5] * 4, seq=5, packed=True, pad=None, pad_token=0)
    actual = packed().rows(range(4), padded=False)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(x, actual[name]), name


def test_the_last_row_is_filled_up_with_padding() -> None:
    """The end of a text that is lost, or whose padding is a target."""
    last = packed().rows([4])
    assert last["input_ids"].tolist() == [[21, 22, 23, 0, 0]]
    assert last["position_ids"].tolist() == [[0, 1, 2, 0, 0]]
    assert last["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert int(fcp.prepare(last).num_targets) == 2
    past = packed().rows([4, 5])
    assert int(fcp.prepare(past).num_targets) == 2 and past["attention_mask"][1].sum() == 0


@pytest.mark.parametrize("seq", [2, 3, 4, 5, 8, 22, 23, 24, 40])
def test_overlapping_rows_predict_each_token_once(seq: int) -> None:
    """A token at the start of a row that is in no loss; one that is in two."""
    rows = packed(seq=seq, overlap=1)
    batch = rows.rows(range(rows.num_rows + 2))
    prepared: Any = fcp.prepare(batch)
    targets = prepared.targets[prepared.targets != fcp.IGNORED].tolist()
    assert sorted(targets) == sorted(token for document in DOCUMENTS for token in document[1:])


# --- order ------------------------------------------------------------------------------------------------------------


def test_each_pass_takes_every_row_once_in_an_order_of_its_own() -> None:
    """Rows drawn with replacement; one order for all passes; an order that the seed does not change."""
    rows = taken(packed(batch=5), 3)
    passes = [rows[i : i + 5] for i in (0, 5, 10)]
    whole = sorted(packed(shuffle=False, batch=5).rows(range(5))["input_ids"].tolist())
    assert all(sorted(each) == whole for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != taken(packed(batch=5, seed=4), 1)
    assert taken(packed(batch=5, shuffle=False), 1) == packed().rows(range(5))["input_ids"].tolist()


def test_the_order_depends_on_seed_and_step_alone() -> None:
    """An order that moves with the batch size, the number of ranks that read, or what was drawn before."""
    expected = taken(packed(), 6)
    torch.manual_seed(99)
    assert taken(packed(batch=4), 3) == expected == taken(packed(batch=1), 12)
    parts = [taken(packed(batch=4, part=(index, 2)), 3) for index in range(2)]
    joined = [row for step in range(3) for part in parts for row in part[2 * step : 2 * step + 2]]
    assert joined == expected


def test_an_order_of_the_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: each rank shuffles by itself, so that one row comes twice and another never."""
    expected = taken(packed(batch=4), 3)
    plain = _rows._order
    parts = []
    for index in range(2):
        monkeypatch.setattr(_rows, "_order", lambda seed, turn, rows, index=index: plain(seed + index, turn, rows))
        parts.append(taken(packed(batch=4, part=(index, 2)), 3))
    assert [row for step in range(3) for part in parts for row in part[2 * step : 2 * step + 2]] != expected


def test_every_part_has_the_same_names() -> None:
    """A rank with the padded row, whose batch alone has a mask: its function would be another."""
    for state_taken in range(0, 10, 2):
        state = dataclasses.replace(packed().init(), taken=state_taken)
        keys = {tuple(packed(part=(index, 2)).batch(state)[0]) for index in range(2)}
        assert len(keys) == 1


def test_the_position_is_a_small_json_record() -> None:
    """A position that does not come back, or lies in the object: a resumed run would read other rows."""
    rows = packed()
    stream = rows.batches()
    for _ in range(3):
        _, state = next(stream)
    again = data.DataState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert again == state and again.taken == 6
    for (expected, _), (actual, _) in zip(itertools.islice(stream, 4), packed().batches(again), strict=False):
        assert torch.equal(expected["input_ids"], actual["input_ids"])
    assert torch.equal(rows.batch(again)[0]["input_ids"], rows.batch(again)[0]["input_ids"])


@pytest.mark.parametrize("change", [{"seq": 6}, {"seed": 4}, {"overlap": 1}, {"shuffle": False}], ids=str)
def test_a_position_in_other_data_is_refused(change: dict[str, Any]) -> None:
    """A run that goes on in a text, or an order, that it has not read so far."""
    state = packed().init()
    with pytest.raises(ValueError, match="position in other data"):
        packed(**change).batch(state)
    other = data.pack(data.of_tokens([*DOCUMENTS, [1]]), seq=5, batch=2, seed=3)
    with pytest.raises(ValueError, match="position in other data"):
        other.batch(state)
    packed(batch=4, part=(1, 2)).batch(state)  # neither is of the data


def test_the_part_is_that_of_the_rows_own_axes() -> None:
    """Ranks of a cp group with different rows, or of dp and fsdp with the same ones."""
    names, sizes, places = ("dp", "fsdp", "cp"), (2, 3, 2), {"dp": 1, "fsdp": 2, "cp": 1}
    mesh = SimpleNamespace(mesh_dim_names=names, size=lambda dim: sizes[dim], get_local_rank=places.__getitem__)
    assert data.part_of(SimpleNamespace(mesh=mesh, own=("dp", "fsdp"))) == (5, 6)
    assert data.part_of(SimpleNamespace(mesh=mesh, own=())) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seq": 1}, "seq=1 must be a whole number, 2 or more"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 3, "part": (0, 2)}, "give a multiple of 2 rows"),
        ({"part": (2, 2)}, "part 2 of 2"),
        ({"overlap": 2}, "overlap=2 must be 0 or 1"),
    ],
)
def test_rows_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    """Rows without a target, or parts of uneven size."""
    plain: Any = getattr(data.pack, "__wrapped__", data.pack)  # the type checker's own refusal is not the caller's
    with pytest.raises(ValueError, match=said):
        plain(data.of_tokens(DOCUMENTS), **{"seq": 5, "batch": 2, **settings})


# --- documents --------------------------------------------------------------------------------------------------------


def test_a_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    """Documents joined; characters in the place of bytes."""
    file = tmp_path / "text.txt"
    file.write_text("é\n\n \nb c\nd\n\n\n")
    found = data.read(file)
    assert found.tokens.tolist() == [195, 169, *b"b c\nd"] and found.ends.tolist() == [2, 7]
    assert data.read(file, documents="whole").ends.numel() == 1
    assert str(found) == "Documents(2 documents, 7 tokens)" and found.largest == 195


@pytest.mark.parametrize("how", ["saved", "saved with splits", "parquet", "jsonl"])
def test_folders_of_datasets(how: str, tmp_path: Path) -> None:
    """A format whose rows come in another order, or that asks a hub."""
    datasets = pytest.importorskip("datasets")
    texts = ["ab", "", "cde", "f"]
    folder = tmp_path / "set"
    folder.mkdir()
    made = datasets.Dataset.from_dict({"text": texts, "ids": [[1], [2, 3], [], [4]]})
    if how == "saved":
        made.save_to_disk(str(folder))
    elif how == "saved with splits":
        datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(folder))
    elif how == "parquet":
        made.to_parquet(str(folder / "part-0.parquet"))
    else:
        lines = [json.dumps({"text": text, "ids": ids}) for text, ids in zip(texts, made["ids"], strict=True)]
        (folder / "part.jsonl").write_text("\n".join(lines))
    found = data.read(folder)
    assert found.tokens.tolist() == list(b"abcdef") and found.ends.tolist() == [2, 5, 6]
    assert data.read(folder, column="ids").tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="no column 'texts'; it has"):
        data.read(folder, column="texts")
    if how == "saved with splits":
        assert data.read(folder, split="test").tokens.tolist() == list(b"ab")
        with pytest.raises(ValueError, match="no split 'valid'; it has 'train', 'test'"):
            data.read(folder, split="valid")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.txt", "not readable as text"),
        ("empty.txt", "empty text"),
        ("set.jsonl", "read as part of its folder"),
        ("nothing", "no data set in this folder"),
    ],
)
def test_what_holds_no_documents_is_refused(name: str, said: str, tmp_path: Path) -> None:
    """A JSON file that is trained on as if it were prose."""
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "set.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=said):
        data.read(tmp_path / name)


def test_no_tokens_at_all_are_refused() -> None:
    """An endless stream of rows of padding."""
    with pytest.raises(ValueError, match="no token in it"):
        data.of_tokens([[], []])
    with pytest.raises(ValueError, match="a token id of -1"):
        data.of_tokens([[1, -1]])

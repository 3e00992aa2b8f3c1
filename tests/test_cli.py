"""The command line: what it asks of the library, what it prints, how it ends, and how it refuses."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fcp
from fcp import _cli_check, _cli_inputs, data, huggingface, pytree
from fcp.cli import main
from models import llama

MODULE = '''
import dataclasses
import torch
from models import llama

a_model = llama.tiny(vocab_size=256)
number = 3

def good():
    return llama.tiny()

def restarts():
    """Positions restart on each rank: they come from the local length."""
    model = llama.tiny()

    def apply(params, inputs, ops):
        local = torch.arange(inputs.positions.shape[1]).expand_as(inputs.positions)
        return model.apply(params, dataclasses.replace(inputs, positions=local), ops)

    return dataclasses.replace(model, apply=apply)

def needs(config):
    return llama.model(config)

def gives_a_number():
    return 4

def fails():
    raise KeyError("no\\nway")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with modules of the user's own, texts and a checkpoint."""
    path = tmp_path_factory.mktemp("cli")
    (path / "cli_targets.py").write_text(MODULE)
    (path / "cli_imports.py").write_text("import no_such_dependency\n")
    (path / "cli_broken.py").write_text("def f(:\n")
    (path / "empty.txt").write_text(" \n\n ")
    (path / "short.txt").write_text("one\n\ntwo three\n")
    (path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (path / "text.txt").write_text("\n\n".join("word " * n for n in (3, 11, 2, 7, 20)))
    model = llama.tiny()
    llama.save(path / "checkpoint", model.config, model.init(seed=0))
    (path / "damaged").mkdir()
    (path / "damaged" / "config.json").write_text("{")
    return path


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    return folder


def run(capsys, *words):
    """(exit status, standard output, the lines of standard error that are no progress)."""
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, [line for line in err.splitlines() if not line.startswith("fcp: [")]


def checked(capsys, *words):
    """(exit status, the JSON object) of a check."""
    status, out, errors = run(capsys, "check", *words, "--json")
    assert errors == []
    return status, json.loads(out)


SMALL = ("--seq", "8", "--batch", "2")


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_prints_a_table_and_ends_with_equal(here, capsys):
    """A check that says nothing, or whose exit status does not follow."""
    status, out, errors = run(capsys, "check", "models.llama:tiny", "--cp", "2", "--tp", "2", *SMALL)
    assert status == 0
    assert errors == []
    lines = out.splitlines()
    assert "models.llama:tiny" in lines[0]
    assert lines[1] == "cp=2, tp=2: shard_seq(cp) . ulysses(cp) . shard_params(tp)"
    assert any("│ logits " in line for line in lines)
    assert lines[-1].startswith("equal within 1e-10")


@pytest.mark.parametrize(
    ("words", "axes", "applied"),
    [
        (("--cp", "2", "--ep", "2"), {"cp": 2}, "experts(cp, dispatch)"),
        (("--mesh", "fsdp=4,ep=2"), {"fsdp": 2, "fsdp_ep": 2}, "experts(fsdp_ep, dispatch)"),
        (("--tp", "2", "--ep", "2", "--ep-plan", "all_reduce"), {"tp": 2}, "experts(tp, all_reduce)"),
    ],
)
def test_experts(words, axes, applied, here, capsys):
    """An expert group or a plan that is read and then left out; rows that are too few for a split fsdp."""
    status, found = checked(capsys, "models.mixtral:tiny", *words, "--seq", "8")
    assert status == 0 and found["ok"]
    assert found["meshes"][0]["mesh"] == axes and applied in found["meshes"][0]["applied"]


def test_a_difference_is_status_1(here, capsys):
    """A faulty model (its positions restart on each rank) that passes."""
    status, out, errors = run(capsys, "check", "cli_targets:restarts", "--cp", "2", *SMALL)
    assert (status, errors) == (1, [])
    assert out.splitlines()[-1].startswith("NOT EQUAL within 1e-10")
    status, found = checked(capsys, "cli_targets:restarts", "--mesh", "tp=2", "--mesh", "cp=2", *SMALL)
    assert status == 1
    assert found["ok"] is False
    assert [mesh["ok"] for mesh in found["meshes"]] == [True, False]
    assert found["meshes"][1]["worst_error"] > 1e-6


HYBRID = ["ulysses(cp_ulysses)", "ring(cp_ring)", "shard_seq(cp_ring x cp_ulysses)"]


@pytest.mark.parametrize(
    ("words", "mesh", "applied"),
    [
        ((), {"cp": 2}, ["ulysses(cp)", "shard_seq(cp)"]),
        (("--cp", "3"), {"cp": 3}, ["ulysses(cp)", "shard_seq(cp)"]),
        (("--cp", "2", "--cp-impl", "gather"), {"cp": 2}, ["gather(cp)", "shard_seq(cp)"]),
        (("--cp", "2", "--cp-impl=ring", "--layout=zigzag"), {"cp": 2}, ["ring(cp)", "shard_seq(cp, zigzag)"]),
        (("--cp", "1"), {}, []),
        (("--remat", "layer"), {}, ["remat"]),
        (("--remat", "attention"), {}, ["remat(attention)"]),
        (("--tp", "2", "--remat", "layer"), {"tp": 2}, ["shard_params(tp)", "remat"]),
        (("--cp=4", "--ulysses=2"), {"cp_ring": 2, "cp_ulysses": 2}, HYBRID),
        (("--dp", "2", "--tp", "2"), {"dp": 2, "tp": 2}, ["shard_params(tp)", "shard_batch(dp)"]),
        (("--fsdp", "2"), {"fsdp": 2}, ["shard_params(fsdp)", "shard_batch(fsdp)"]),
    ],
)
def test_the_mesh_is_the_one_asked_for(words, mesh, applied, here, capsys):
    """An axis or rematerialisation that is read and not passed on: the check then passes without checking."""
    status, found = checked(capsys, "models.llama:tiny", *SMALL, *words)
    assert (status, found["ok"]) == (0, True)
    assert [(entry["mesh"], entry["applied"]) for entry in found["meshes"]] == [(mesh, applied)]


def test_a_choice_is_explained(here, capsys):
    """A way to attend that is chosen and not told."""
    words = ("--cp", "2", "--cp-impl", "auto", *SMALL)
    _, out, _ = run(capsys, "check", "models.llama:tiny", *words)
    assert out.splitlines()[-1].startswith("cp_impl auto: 4 query heads and 2 of keys and values on each of 2 ranks;")
    status, found = checked(capsys, "models.llama:tiny", *words)
    assert status == 0 and "bytes sent a token" in found["meshes"][0]["why"]


@pytest.mark.parametrize(
    ("words", "num_targets"),
    [
        ((), 14),
        (("--pad", "left"), (8 - 2 - 1) + (8 - 3 - 1)),
        (("--pad", "right"), (8 - 2 - 1) + (8 - 3 - 1)),
        (("--seq", "5", "--batch", "3"), 12),
        (("--dtype", "float32", "--seed", "7"), 14),
    ],
)
def test_the_batch_is_the_one_asked_for(words, num_targets, here, capsys):
    """Padding or a length that is read and not passed on."""
    status, found = checked(capsys, "models.llama:tiny", *SMALL, *words, "--cp", "2")
    assert (status, found["num_targets"]) == (0, num_targets)
    assert found["dtype"] == ("float32" if "--dtype" in words else "float64")


@pytest.mark.parametrize("pad", [(), ("--pad", "left"), ("--pad", "right")])
def test_packed_rows_have_several_documents(pad, here, capsys):
    """--packed read and not passed on, alone or with padding: every document but the row's last costs a target."""
    words = ("models.llama:tiny", "--seq", "16", "--window", "3", *pad)
    targets = [checked(capsys, *words, *more)[1]["num_targets"] for more in ((), ("--packed",))]
    assert targets[1] < targets[0]
    assert checked(capsys, *words, "--packed", "--cp", "4")[0] == 0


def test_one_reference_for_all_meshes(here, capsys, monkeypatch):
    """The reference run again for each mesh, which doubles the time of a long check."""
    calls = []
    plain = _cli_check.value_and_grad

    def counted(fn):
        calls.append(fn)
        return plain(fn)

    monkeypatch.setattr(_cli_check, "value_and_grad", counted)
    status, found = checked(
        capsys, "models.llama:tiny", "--mesh", "cp=2,tp=2", "--mesh", "fsdp=2", "--mesh", "cp=3", *SMALL
    )
    assert status == 0
    assert [mesh["mesh"] for mesh in found["meshes"]] == [{"cp": 2, "tp": 2}, {"fsdp": 2}, {"cp": 3}]
    assert [type(fn).__name__ for fn in calls] == ["Model", "Transformed", "Transformed", "Transformed"]


def test_tolerance_decides(here, capsys):
    """--tolerance printed but not applied."""
    words = ("models.llama:tiny", "--cp", "2", "--tp", "2", *SMALL)
    assert checked(capsys, *words, "--tolerance", "0")[0] == 1
    status, found = checked(capsys, *words, "--dtype", "float32", "--tolerance", "0.5")
    assert (status, found["meshes"][0]["tolerance"]) == (0, 0.5)


def test_a_target_may_be_a_model(here, capsys):
    """A Model, which is callable, called as if it were the function that makes one."""
    assert checked(capsys, "cli_targets:a_model", "--cp", "2", *SMALL)[0] == 0


def test_the_working_folder_comes_first(here, capsys):
    """A module of the working folder that is not found, or found behind one that is installed."""
    sys.path.append(str(here))
    assert checked(capsys, "cli_targets:good", "--cp", "2", *SMALL)[0] == 0
    assert sys.path[0] == str(here)


def test_the_batch_grows_with_dp_and_fsdp(here, capsys):
    """A default batch that the mesh asked for does not divide."""
    status, found = checked(capsys, "models.llama:tiny", "--mesh", "dp=2,fsdp=2", "--mesh", "fsdp=3", "--seq", "4")
    assert (status, found["rows"]) == (0, 12)


def test_the_window_is_the_models(here, capsys, monkeypatch):
    """--window accepted and dropped."""
    seen = []
    plain = _cli_check.transform

    def watched(model, **options):
        seen.append(model.config)
        return plain(model, **options)

    monkeypatch.setattr(_cli_check, "transform", watched)
    run(capsys, "check", "models.llama:tiny", "--window", "3", *SMALL)
    run(capsys, "check", "models.llama:tiny", *SMALL)
    assert [config.sliding_window for config in seen] == [3, None]


def test_a_window_replaces_the_models_layer_types():
    """A window that reaches only the layers that slid before."""
    types = ("full_attention", "sliding_attention")
    model = _cli_inputs.with_window(llama, llama.tiny(sliding_window=9, layer_types=types), 3)
    assert [model.config.window(layer) for layer in (0, 1)] == [3, 3]


def test_every_leaf_is_shaken():
    """Biases left at zero and norms at one, behind which a missing or double sum cannot be seen."""
    model = llama.tiny(attention_bias=True, mlp_bias=True, model_type="qwen3")
    before, after = (
        model.init(seed=0, dtype=torch.float64),
        _cli_inputs.shake(model.init(seed=0, dtype=torch.float64), 0),
    )
    for path, x, y in zip(pytree.paths(after), pytree.leaves(before), pytree.leaves(after), strict=True):
        assert y.dtype == torch.float64
        assert bool(((x - y).abs() > 0).all()), path
        assert y.unique().numel() == y.numel(), path


def test_a_checkpoint_is_read_by_the_module(here, capsys, monkeypatch):
    """Parameters of the checkpoint shaken or made anew, or read as another dtype."""
    seen = []
    plain = _cli_check.value_and_grad

    def watched(fn):
        def wrapped(params, inputs):
            seen.append(params)
            return plain(fn)(params, inputs)

        return wrapped

    monkeypatch.setattr(_cli_check, "value_and_grad", watched)
    status, found = checked(capsys, "models.llama", "--checkpoint", "checkpoint", "--cp", "2", "--window", "4", *SMALL)
    assert (status, found["dtype"], found["checkpoint"]) == (0, "float32", "checkpoint")
    for expected, actual in zip(pytree.leaves(llama.tiny().init(seed=0)), pytree.leaves(seen[0]), strict=True):
        assert torch.equal(expected, actual)


def test_text_is_tokenised_by_the_checkpoint(here, capsys, monkeypatch):
    """Bytes in the place of the checkpoint's own tokens."""
    asked = []

    def tokenizer(path):
        asked.append(str(path))
        return lambda piece: {"input_ids": [len(word) for word in piece.split()]}

    monkeypatch.setattr(huggingface, "tokenizer", tokenizer, raising=False)
    words = ("models.llama", "--checkpoint", "checkpoint", "--text", "text.txt", "--packed", "--cp", "2", *SMALL)
    status, found = checked(capsys, *words)
    assert (status, asked) == (0, ["checkpoint"])
    # Documents of 3, 11, 2, ... words in two rows of 8: the first row cuts the second document.
    assert found["num_targets"] == (2 + 4) + (5 + 1)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_packed_rows_restart_at_documents_and_at_rows():
    """A document that the end of a row cut, and whose rest goes on at the old position: it would not be its start."""
    batch = _cli_inputs.batch_of(
        [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]], [5, 5], seq=5, packed=True, pad=None, pad_token=0
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert int(fcp.prepare(batch).num_targets) == 6


@pytest.mark.parametrize(
    ("side", "tokens", "mask"),
    [
        ("right", [[1, 2, 3, 9], [4, 5, 9, 9]], [[1, 1, 1, 0], [1, 1, 0, 0]]),
        ("left", [[9, 1, 2, 3], [9, 9, 4, 5]], [[0, 1, 1, 1], [0, 0, 1, 1]]),
    ],
)
def test_padding_lies_on_its_side(side, tokens, mask):
    """Padding that is not masked, on the wrong side, or that loses tokens of the text."""
    batch = _cli_inputs.batch_of([[1, 2, 3, 4, 5]], [3, 2], seq=4, packed=False, pad=side, pad_token=9)
    assert batch["input_ids"].tolist() == tokens
    assert batch["attention_mask"].tolist() == mask
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_padding_differs_between_rows():
    """Rows padded alike, behind which a row's padding read from another row cannot be seen."""
    lengths = _cli_inputs.row_lengths(4, 8, True)
    assert lengths == [6, 5, 4, 7]
    assert all(0 < length < seq for seq in range(2, 9) for length in _cli_inputs.row_lengths(5, seq, True))
    assert _cli_inputs.row_lengths(3, 8, False) == [8, 8, 8]


def test_random_documents_are_uneven_and_complete():
    """Documents of one length, or tokens lost between them."""
    documents = _cli_inputs.random_documents(64, 50, 8, 0)
    lengths = [len(document) for document in documents]
    assert sum(lengths) == 64
    assert len(set(lengths)) > 2
    assert max(lengths) <= 8
    assert documents == _cli_inputs.random_documents(64, 50, 8, 0)
    assert documents != _cli_inputs.random_documents(64, 50, 8, 1)


def test_text_without_a_tokenizer_is_its_bytes():
    """Characters in the place of bytes: an é outside of the vocabulary."""
    pieces = data.sections("é\n\n \n b c\nd \n\n\n")
    assert pieces == ["é", "b c\nd"]
    assert data.tokens(pieces) == [[195, 169], [98, 32, 99, 10, 100]]


# --- refusals ---------------------------------------------------------------------------------------------------------

TINY = ("check", "models.llama:tiny")

REFUSED = {
    "no module": (("check", "cli_nowhere:tiny"), "cli_nowhere: no such module"),
    "no submodule": (("check", "models.nope:tiny"), "models.nope: no such module"),
    "a module that imports what is missing": (("check", "cli_imports:f"), "it imports 'no_such_dependency'"),
    "a module with a syntax error": (("check", "cli_broken:f"), "importing it raised SyntaxError"),
    "no module name": (("check", "a b:c"), "is no module name"),
    "no attribute": (("check", "models.llama:tinny"), "has no 'tinny'; it has models.llama:tiny"),
    "no attribute named": (("check", "models.llama"), "name an attribute"),
    "a number": (("check", "cli_targets:number"), "give an fcp.Model"),
    "a class": (("check", "models.llama:Config"), "give an fcp.Model"),
    "required arguments": (("check", "cli_targets:needs"), "without required arguments"),
    "a function that gives no model": (("check", "cli_targets:gives_a_number"), "gave int, not an fcp.Model"),
    "a function that fails": (("check", "cli_targets:fails"), "cli_targets:fails() raised KeyError"),
    "a bare folder": (("check", "checkpoint"), "check models.llama --checkpoint checkpoint"),
    "a bare file": (("check", "some/model.gguf"), "check models.llama --checkpoint some/model.gguf"),
    "no checkpoint": (("check", "models.llama", "--checkpoint", "nowhere"), "nowhere: no checkpoint there"),
    "a damaged checkpoint": (("check", "models.llama", "--checkpoint", "damaged"), "not readable as JSON"),
    "a checkpoint for an attribute": ((*TINY, "--checkpoint", "checkpoint"), "give the module alone, as models.llama"),
    "no load": (("check", "cli_targets", "--checkpoint", "checkpoint"), "no load(path, dtype=)"),
    "cp above the tokens": ((*TINY, "--cp", "9", "--seq", "8"), "cp=9 is larger than the 8 tokens"),
    "cp above the tokens, in a mesh": ((*TINY, "--mesh", "cp=9", "--seq", "8"), "cp=9 is larger than the 8 tokens"),
    "tp that does not divide": ((*TINY, "--tp", "3"), "tp=3 does not divide 4 blocks"),
    "rows that do not divide": ((*TINY, "--dp", "2", "--batch", "3"), "give a multiple of 2 rows"),
    "no text file": ((*TINY, "--text", "nowhere.txt"), "nowhere.txt: not readable as text"),
    "a folder for text": ((*TINY, "--text", "checkpoint"), "not readable as text"),
    "bytes for text": ((*TINY, "--text", "binary.txt"), "not UTF-8"),
    "empty text": ((*TINY, "--text", "empty.txt"), "empty text"),
    "a token too large": ((*TINY, "--text", "short.txt", "--seq", "4"), "a token outside the vocabulary"),
    "too little text": (
        ("check", "cli_targets:a_model", "--text", "short.txt"),
        "it has 14 tokens, and the batch takes 128",
    ),
    "one token": ((*TINY, "--seq", "1"), "a row needs 2 tokens"),
    "nothing to predict": ((*TINY, "--seq", "2", "--pad", "left"), "no token of this batch has a next one"),
    "an axis of no ranks": ((*TINY, "--cp", "0"), "'0' must be a whole number, 1 or more"),
    "an axis below zero": (
        (
            *TINY,
            "--tp=-2",
        ),
        "'-2' must be a whole number, 1 or more",
    ),
    "a way to attend and no cp": ((*TINY, "--tp", "2", "--cp-impl", "ring"), "no mesh here has ranks of cp"),
    "Ulysses within a part that is none": ((*TINY, "--cp", "4", "--ulysses", "3"), "ulysses=3 does not divide cp=4"),
    "Ulysses within no cp": ((*TINY, "--tp", "2", "--ulysses", "2"), "no mesh here has ranks of cp"),
    "an unknown way to attend": ((*TINY, "--cp", "2", "--cp-impl", "rings"), "registered are auto, ulysses"),
    "an order under Ulysses": ((*TINY, "--cp", "2", "--layout", "zigzag"), "every rank has all of them"),
    "a mesh of no ranks": ((*TINY, "--mesh", "cp=2,tp=0"), "'0' must be a whole number, 1 or more"),
    "an unknown axis": ((*TINY, "--mesh", "pp=2"), "unknown mesh axis 'pp'; known are dp, fsdp, cp, tp, ep"),
    "an axis twice": ((*TINY, "--mesh", "cp=2,cp=3"), "names cp twice"),
    "a mesh without sizes": ((*TINY, "--mesh", "cp"), "must be axis=ranks"),
    "a mesh and an axis": ((*TINY, "--mesh", "cp=2", "--tp", "2"), "write the whole mesh"),
    "a window of nothing": ((*TINY, "--window", "0"), "'0' must be a whole number"),
    "a window that cannot be": (("check", "cli_targets:good", "--window", "3"), "cli_targets does not allow it"),
    "a tolerance that is none": ((*TINY, "--tolerance", "nan"), "must be a number, 0 or more"),
    "an unknown option": ((*TINY, "--cpp", "2"), "unrecognized arguments: --cpp"),
    "an abbreviation": ((*TINY, "--tol", "1"), "unrecognized arguments: --tol"),
    "no command": ((), "required: COMMAND"),
    "an unknown command": (("frobnicate",), "invalid choice: 'frobnicate'"),
    "positions that are no integers": (("mask", "--positions", "0,1.5"), "must be whole numbers joined by commas"),
    "a document of nothing": (("mask", "--documents", "3,0"), "'0' must be a whole number, 1 or more"),
    "two kinds of row": (("mask", "--seq", "3", "--documents", "3"), "not allowed with"),
    "a side that is none": (("mask", "--pad", "up:2"), "must be left:N or right:N"),
    "padding without a number": (("mask", "--pad", "left"), "must be a whole number"),
    "cp above the row": (("mask", "--seq", "4", "--cp", "5"), "cp=5 is larger than the 4 tokens"),
    "a row without end": (("mask", "--seq", "100000"), "no readable picture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name, here, capsys):
    """A traceback, several lines, a status that is not 2, or something on standard output that reads as a result."""
    words, said = REFUSED[name]
    status, out, errors = run(capsys, *words)
    assert status == 2
    assert len(errors) == 1
    assert errors[0].startswith("fcp: error: ")
    assert said in errors[0]
    assert out == ""


def test_a_terminal_that_is_too_narrow_is_said(here, capsys, monkeypatch):
    """A picture that wraps, from which nothing can be read."""
    monkeypatch.setenv("COLUMNS", "20")
    status, out, (error,) = run(capsys, "mask", "--seq", "30")
    assert (status, out) == (2, "")
    assert "needs 33 columns, and this terminal has 20" in error


def test_help_names_every_command(capsys):
    """A command that nobody finds."""
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "check" in out
    assert "mask" in out


# --- mask -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "36 of 64 pairs"),
        (("--seq", "6", "--window", "3"), "15 of 36 pairs; window 3"),
        (("--documents", "3,5"), "21 of 64 pairs; 2 documents"),
        (("--documents", "3,5", "--window", "3"), "18 of 64 pairs"),
        (("--positions", "0,1,2,0,1"), "9 of 25 pairs; 2 documents"),
        (("--positions", "5,6,7,0,1"), "9 of 25 pairs; 2 documents"),
        (("--seq", "6", "--chunk", "4", "--pad", "left:2"), "13 of 64 pairs; chunk 4; 2 of 8 tokens are padding (-)"),
        (("--documents", "7,3", "--pad", "right:2"), "34 of 144 pairs; 2 documents"),
        (("--documents", "3,5", "--cp", "2"), "cp=2: pairs by the rank of the query: 7 + 14"),
    ],
)
def test_mask_counts(words, said, capsys):
    """A mask that is not the one of `fcp check` and of the library: chunks moved by padding, documents joined."""
    status, out, errors = run(capsys, "mask", *words)
    assert (status, errors) == (0, [])
    assert said in out


def test_mask_is_plain_when_piped(capsys):
    """Escape sequences in a file."""
    _, out, _ = run(capsys, "mask", "--documents", "3,5")
    assert "\x1b" not in out
    assert out.splitlines()[2:4] == ["a0  █ · · · · · · ·", "a1  █ █ · · · · · ·"]


# --- as a program -----------------------------------------------------------------------------------------------------


def test_python_m_fcp(folder):
    """An entry point that loses the exit status, does not see the working folder, or prints beside the JSON."""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "fcp", "check", "cli_targets:restarts", "--cp", "2", "--seq", "8", "--json"]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert [line.split("] ")[0] for line in done.stderr.splitlines()] == ["fcp: [1/3", "fcp: [2/3", "fcp: [3/3"]


@pytest.mark.parametrize(
    "arguments",
    [["nowhere:tiny"], ["models.llama:tiny", "--tp", "3"], ["models.llama", "--checkpoint", "nothing_here"]],
    ids=lambda arguments: arguments[0] + arguments[-1],
)
def test_a_refusal_is_the_only_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a refusal that has to be found among lines about work that was never done."""
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fcp: error: ") and len(err.splitlines()) == 1

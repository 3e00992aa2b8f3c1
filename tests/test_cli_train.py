"""`fcp train`, `fcp eval` and `fcp plot`: the same run on every mesh, interrupted or not, and how it is refused."""

import importlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from fcp import _cli_eval, _run_log, _settings, _training, data, tables
from fcp.cli import main
from models import llama, mixtral
from tests.tolerances import FLOAT64
from tests.toys import randomized

ROOT = Path(__file__).resolve().parents[1]
TEXT = str(ROOT / "data" / "us-declaration.txt")
MODULE = """
from models import llama

def small():
    return llama.tiny(vocab_size=256)
"""
CONFIG = f"""
target = "train_targets:small"
text = "{TEXT}"
seq = 12
batch = 4
steps = 4
lr = 1e-2
schedule = "cosine"
warmup = 1
weight_decay = {{ "*norm*" = 0.0, "*" = 0.1 }}
clip = 1.0
dtype = "float64"
folder = "run"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model of 256 tokens, for bytes, and the settings of a run."""
    (tmp_path / "train_targets.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "train_targets", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def run(*words: Any) -> int:
    return main([str(word) for word in words])


def curve(folder: str = "run", key: str = "loss") -> list[float]:
    """One number a step; each step is there once, in order."""
    records = _run_log.read_log(folder)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record[key] for record in records]


def worst(expected: list[float], actual: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True))


# --- the same on every mesh -------------------------------------------------------------------------------------------

MESHES = ["cp=2", "tp=2", "fsdp=2", "dp=2", "cp=2,tp=2", "cp=2,fsdp=2"]


def test_curves_agree_on_every_mesh(here: Path) -> None:
    """A setting that a mesh does not get, rows in another order, a step that a mesh takes otherwise."""
    assert run("train", "run.toml") == 0
    for mesh in MESHES:
        assert run("train", "run.toml", "--mesh", mesh, "--folder", mesh) == 0
        for key in ("loss", "norm", "lr"):
            assert worst(curve(key=key), curve(mesh, key)) < 1e-9, (mesh, key)
    assert max(curve(key="norm")) > 1.0  # clipping took part
    assert run("train", "run.toml", "--accumulate", "2", "--remat", "layer", "--folder", "parts") == 0
    assert worst(curve(), curve("parts")) < 1e-9
    assert run("train", "run.toml", *WAYS, "--folder", "ways") == 0
    assert worst(curve(), curve("ways")) < 1e-9


WAYS = ("--mesh", "cp=4", "--ulysses", "2", "--remat", "attention", "--loss-tile", "5", "--mlp-tile", "3")


def test_what_a_run_is_told_reaches_the_transform(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is read and not passed on; most of them change no number."""
    told: dict[str, Any] = {}
    right = _training.transform
    monkeypatch.setattr(_training, "transform", lambda model, **how: told.update(how) or right(model, **how))
    assert run("train", "run.toml", *WAYS, "--layout", "zigzag", "--cp-impl", "gather", "--steps", "1") == 0
    assert {key: told[key] for key in ("cp", "remat", "loss_tile", "mlp_tile", "layout", "cp_impl")} == {
        "cp": (2, 2),
        "remat": "attention",
        "loss_tile": 5,
        "mlp_tile": 3,
        "layout": "zigzag",
        "cp_impl": "gather",
    }


def test_another_row_is_noticed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: an order that depends on the mesh."""
    assert run("train", "run.toml", "--steps", 2) == 0
    plain = data.Packed._row
    monkeypatch.setattr(data.Packed, "_row", lambda self, taken: plain(self, taken + 1))
    assert run("train", "run.toml", "--steps", 2, "--cp", 2, "--folder", "other") == 0
    assert worst(curve(), curve("other")) > 1e-6


def test_settings_reach_the_step(here: Path) -> None:
    """A setting that is read, checked, and not passed on."""
    assert run("train", "run.toml") == 0
    changes: list[tuple[Any, ...]] = [
        ("--lr", "2e-2"),
        ("--schedule", "constant"),
        ("--warmup", 2),
        ("--weight-decay", "0.5"),
        ("--weight-decay", '{ "*embed*" = 0.5, "*" = 0.1 }'),
        ("--clip", "0.1"),
        ("--seed", 5),
        ("--seq", 16),
        ("--batch", 2),
        ("--optimizer", "SGD"),
        ("--options", "{ betas = [0.5, 0.9] }"),
        ("--documents", "whole"),
        ("--compute-dtype", "bfloat16"),
        ("--dtype", "float32"),
    ]
    for index, words in enumerate(changes):
        assert run("train", "run.toml", *words, "--folder", index) == 0, words
        assert worst(curve(), curve(str(index))) > 1e-9, words


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moments, schedule or position in the data that begin anew; steps twice in the log; old checkpoints kept."""
    assert run("train", "run.toml", "--steps", 6, "--save-every", 2, "--folder", "whole") == 0
    words = ("--steps", 6, "--save-every", 2, "--keep", 2, "--resume", "auto", "--tensorboard")
    assert run("train", "run.toml", *words, "--folder", "run") == 0  # nothing is there yet
    saved = Path("run", "checkpoints")
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000004", "step-00000006"]
    (saved / "step-00000006").rename("aside")  # as if it had been killed in step 6: logged, and never saved
    with Path("run", "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert run("train", "run.toml", *words, "--mesh", "cp=2,tp=2") == 0
    assert worst(curve("whole"), curve()) < FLOAT64
    states = [json.loads((path / "state.json").read_text()) for path in (Path("aside"), saved / "step-00000006")]
    assert states[0]["extra"]["data"] == states[1]["extra"]["data"]
    assert len(list(Path("run").glob("events.out.tfevents.*"))) == 2
    capsys.readouterr()
    assert run("train", "run.toml", *words) == 0
    assert "nothing left to do: 6 of 6 steps are done" in capsys.readouterr().out


def test_a_run_branches_off_from_a_path(here: Path) -> None:
    """A checkpoint that is named, and another one that is loaded."""
    assert run("train", "run.toml", "--save-every", 2) == 0
    assert run("train", "run.toml", "--folder", "branch", "--resume", "run/checkpoints/step-00000002") == 0
    records = _run_log.read_log("branch")
    assert [record["step"] for record in records] == [3, 4]
    assert worst(curve()[2:], [record["loss"] for record in records]) < FLOAT64
    assert run("train", "run.toml", "--folder", "third", "--resume", "run", "--steps", 5) == 0
    assert [record["step"] for record in _run_log.read_log("third")] == [5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(
    number: signal.Signals, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies with what it has learned since the last checkpoint, or a signal that stays taken."""
    plain = tables._figures

    def told(record: Any) -> str:
        os.kill(os.getpid(), number)  # drawn after step 1: step 2 is the one that hears it
        return plain(record)

    monkeypatch.setattr(tables, "_figures", told)
    before = signal.getsignal(number)
    assert run("train", "run.toml", "--steps", 50) == 0
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    out = capsys.readouterr().out
    assert f"stopped by {number.name} after step 2 of 50, saved; to go on: fcp train run.toml --steps 50 " in out
    assert [path.name for path in Path("run", "checkpoints").iterdir()] == ["step-00000002"]
    again = out.split("to go on: fcp ")[1].split()
    assert run(*again, "--steps", 3) == 0 and len(curve()) == 3


def test_a_second_interrupt_ends_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that has to wait for a step of an hour."""

    def twice(record: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    monkeypatch.setattr(tables, "_figures", twice)
    with pytest.raises(KeyboardInterrupt):
        run("train", "run.toml")


LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fcp")


def _env(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))), "OMP_NUM_THREADS": "1"}


def _until(holds: Callable[[], bool], process: Any) -> None:
    for _ in range(1200):
        if holds():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("it never came to this")


def test_processes_train_stop_and_go_on_elsewhere(here: Path) -> None:
    """Ranks that stop at different steps and wait for each other; rows that two ranks of fsdp both take; a state that
    one process cannot go on with."""
    same = ("train", "run.toml", "--schedule", "constant")
    words = (*same, "--steps", "9999", "--fsdp", "2", "--accumulate", "2", "--distributed")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: Any = subprocess.Popen([*LAUNCHER, *words], env=_env(here), cwd=here, **pipes)
    log = here / "run" / "log.jsonl"
    _until(lambda: log.exists() and log.read_text().count("\n") >= 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert out.count("stopped by SIGTERM after step ") == 1, err
    done = len(curve())
    assert [path.name for path in (here / "run" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert "torchrun --nproc-per-node 2 -m fcp train run.toml" in out
    assert run(*same, "--steps", done + 2, "--resume", "auto") == 0
    assert run(*same, "--steps", done + 2, "--folder", "whole") == 0
    assert worst(curve("whole")[:20], curve()[:20]) < 1e-9  # what rounds otherwise drifts apart, step by step
    assert worst(curve("whole"), curve()) < 1e-6


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_has_what_a_reader_asks_for(here: Path) -> None:
    """A curve that cannot be drawn, or a line that is no JSON."""
    assert run("train", "run.toml") == 0
    for line in Path("run", "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert set(record) == {
            *("step", "loss", "norm", "lr", "skipped", "passes", "seconds", "tokens_per_second", "memory_mb")
        }
    assert record["tokens_per_second"] * record["seconds"] == pytest.approx(48)
    assert record["memory_mb"] > 50 and record["skipped"] is False


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """NaN, which no JSON reader takes."""
    with _run_log.open_log(tmp_path, 0, tensorboard=False) as write:
        write({"step": 1, "loss": math.nan, "norm": math.inf, "skipped": True})
    assert _run_log.read_log(tmp_path) == [{"step": 1, "loss": None, "norm": None, "skipped": True}]


def test_a_broken_log_is_refused(tmp_path: Path) -> None:
    """A line in the middle that is dropped, and with it a step."""
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is no record"):
        _run_log.read_log(tmp_path)


def test_curves_are_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that is not there; a skipped step that stops it."""
    assert run("train", "run.toml") == 0
    with _run_log.open_log(Path("other"), 0, tensorboard=False) as write:
        for step in (1, 2):
            write({"step": step, "loss": math.nan, "norm": 1.0, "tokens_per_second": 3.0})
    capsys.readouterr()
    assert run("plot", "run") == 0
    assert capsys.readouterr().out == "run/curves.png: run, 4 steps\n"
    assert run("plot", "run/log.jsonl", "other", "--out", "both.png") == 0
    for picture in (Path("run", "curves.png"), Path("both.png")):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


# --- perplexity -------------------------------------------------------------------------------------------------------


def evaluated(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert run("eval", "train_targets:small", "--seq", 13, "--dtype", "float64", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_perplexity_is_the_same_on_every_mesh(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of the means of batches; a padded row or token that counts; a last batch that is dropped."""
    text = "\n\n".join("all men are created equal"[:n] for n in (25, 1, 7, 19, 12, 3, 24))
    Path("text.txt").write_text(text)
    alone = evaluated(capsys, "--text", "text.txt")
    model = llama.tiny(vocab_size=256)
    params = model.init(seed=0, dtype=torch.float64)
    assert alone["num_targets"] == sum(len(each) - 1 for each in data.sections(text))
    rows = data.pack(data.read("text.txt"), seq=13, batch=1, shuffle=False, overlap=1)
    by_row = [model(params, rows.rows([row])).loss for row in range(rows.num_rows)]
    counts = [int(fcp.prepare(rows.rows([row])).num_targets) for row in range(rows.num_rows)]
    by_hand = sum(float(loss) * count for loss, count in zip(by_row, counts, strict=True)) / sum(counts)
    assert abs(alone["loss"] - by_hand) / by_hand < FLOAT64
    assert alone["perplexity"] == pytest.approx(math.exp(by_hand))
    assert abs(float(sum(by_row)) / len(by_row) - by_hand) / by_hand > 1e-4  # mutant: a mean of means
    ring = ("--cp", 2, "--cp-impl", "ring", "--layout", "zigzag")
    meshes = (("--mesh", "cp=2,tp=2"), ("--cp", 3), ("--fsdp", 2, "--batch", 2), ("--dp", 3), ("--batch", 1))
    for words in (*meshes, ring, ("--cp", 4, "--ulysses", 2)):
        found = evaluated(capsys, "--text", "text.txt", *words)
        assert abs(found["loss"] - alone["loss"]) / alone["loss"] < FLOAT64, words
        assert found["num_targets"] == alone["num_targets"]


def test_perplexity_on_processes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An axis that is simulated in each process, or whose ranks all speak; a last batch that they do not divide."""
    Path("text.txt").write_text(Path(TEXT).read_text()[:300])
    alone = evaluated(capsys, "--text", "text.txt")
    words = ("eval", "train_targets:small", "--text", "text.txt", "--seq", "13", "--dtype", "float64", "--json")
    command = (*LAUNCHER, *words, "--fsdp", "2", "--batch", "6", "--distributed")
    done = subprocess.run(command, env=_env(here), cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mesh"] == {"fsdp": 2} and found["num_targets"] == alone["num_targets"]
    assert abs(found["loss"] - alone["loss"]) / alone["loss"] < FLOAT64


def test_perplexity_of_trained_parameters(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trained accepted and the parameters before training evaluated."""
    assert run("train", "run.toml", "--steps", 8) == 0
    Path("text.txt").write_text(Path(TEXT).read_text()[:300])
    words = ("--text", "text.txt")
    losses = [evaluated(capsys, *words, *more)["loss"] for more in ((), ("--trained", "run", "--cp", 2))]
    assert losses[1] < losses[0] - 0.1


def test_a_routers_loss_is_no_tokens() -> None:
    """A perplexity that grows with the weight of the load balancing."""
    rows = data.pack(data.of_tokens([list(range(1, 30))]), seq=8, batch=2, shuffle=False, overlap=1)
    found = []
    for weight in (0.0, 0.5):
        model = mixtral.tiny(router_aux_loss_coef=weight, output_router_logits=True)
        sharded = fcp.transform(model, cp=2, logits=False)
        found.append(_cli_eval.token_loss(sharded, randomized(model), rows, 2)[0])
        assert "auxiliary_loss" in sharded(randomized(model), rows.rows([0, 1])).statistics
    assert abs(found[0] - found[1]) / found[0] < FLOAT64


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    """A first step without a rate; a fall that begins too early, or goes below zero."""
    settings = _settings.Settings("t", "f", lr=2.0, steps=6, warmup=2, schedule=schedule)
    assert [settings.learning_rate(update) / 2 for update in range(7)] == pytest.approx(expected, abs=1e-15)


def test_every_key_is_a_setting() -> None:
    """A key of the file that no flag has, or a setting that no file can say."""
    assert set(_settings.KEYS) == set(_settings.Settings.__dataclass_fields__)


def test_a_flag_wins(here: Path) -> None:
    """A flag that is overridden by the file; an axis that takes the others away."""
    config = Path("run.toml").read_text() + "mesh = { cp = 2, tp = 2 }\n"
    Path("mesh.toml").write_text(config)
    read: Any = _settings.settings
    assert read("mesh.toml", {"lr": "1", "remat": "layer"}, {"tp": 4}).mesh == {"cp": 2, "tp": 4}
    found = read("mesh.toml", {"lr": "1", "remat": "attention", "weight_decay": "0.5", "mesh": "dp=2"}, {})
    assert (found.lr, found.remat, found.weight_decay, found.mesh) == (1.0, "attention", 0.5, {"dp": 2})
    assert read("mesh.toml", {"seq": None}, {}).seq == 12


REFUSED = {
    "an unknown key": ('learning_rate = 1e-3\n"lr" = 1', (), "unknown key 'learning_rate'; the nearest is 'lr'"),
    "a key like nothing": ("zzz = 1", (), "unknown key 'zzz'; known are target, checkpoint"),
    "a key nearly right": ("sqe = 3", (), "unknown key 'sqe'; the nearest is 'seq'"),
    "several at once": ("sqe = 3\nbach = 4\nkeep = -1", (), "keep = -1 must be a whole number, 1 or more"),
    "a text for a number": ('keep = "3"', (), "keep = '3' must be a whole number, 1 or more"),
    "true for a number": ("keep = true", (), "keep = True must be a whole number"),
    "a decay by path below zero": ("options = 3", (), "options = 3 must be a table"),
    "an axis that is none": ("mesh = { pp = 2 }", (), "axes are dp, fsdp, cp, tp, ep"),
    "an axis of nothing": ("mesh = { cp = 0 }", (), "must be a table of axes and ranks"),
    "no TOML": ("steps =", (), "no TOML"),
    "a flag that is no number": ("", ("--lr", "fast"), "--lr fast must be a number, 0 or more"),
    "a flag of no choice": ("", ("--schedule", "step"), "--schedule step must be one of constant, linear, cosine"),
    "an optimizer that is none": ("", ("--optimizer", "Adamw"), "must name a class of torch.optim"),
    "an option that it does not take": ("", ("--options", "{ beta = 1 }"), "does not take these options"),
    "a decay of no parameter": ("", ("--weight-decay", "{ x = 1 }"), "patterns without a parameter: ['x']"),
    "a mesh of no axis": ("", ("--mesh", "pp=2"), "unknown mesh axis 'pp'"),
    "an unknown flag": ("", ("--sqe", "3"), "unrecognized arguments: --sqe 3"),
    "rows that do not divide": ("", ("--fsdp", "2", "--accumulate", "4"), "give a multiple of 8"),
    "a part that is none": ("", ("--cp", "4", "--ulysses", "3"), "ulysses=3 does not divide cp=4"),
    "a part of no cp": ("", ("--tp", "2", "--ulysses", "2"), "ulysses=2 does not divide cp=1"),
    "a way of no cp": ("", ("--cp-impl", "ring"), "no cp splits the sequence"),
    "cp above the row": ("", ("--cp", "13"), "cp=13 is larger than the 12 tokens"),
    "a warm-up without end": ("", ("--warmup", "5"), "warmup = 5 is longer than the 4 steps"),
    "tp that does not divide": ("", ("--tp", "3"), "tp=3 does not divide"),
    "a vocabulary too small": ("", ("--target", "models.llama:tiny"), "a token outside the vocabulary"),
    "no text": ("", ("--text", "nowhere.txt"), "nowhere.txt: not readable as text"),
    "nothing to resume": ("", ("--resume", "nowhere"), "nowhere: nothing is there"),
    "no launcher": ("", ("--dp", "2", "--distributed"), "torchrun --nproc-per-node N -m fcp train"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_line(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback; a file or a folder left behind by a run that never was."""
    more, words, said = REFUSED[name]
    before = Path("run.toml").read_text()
    Path("run.toml").write_text(more + "\n" + ("" if '"lr"' in more else before))
    assert run("train", "run.toml", *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("fcp: error: ") and said in err, err
    assert not Path("run").exists()


def test_all_wrong_keys_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistakes that are found one run at a time."""
    Path("bad.toml").write_text("sqe = 3\nbach = 4\nkeep = 0\n")
    assert run("train", "bad.toml") == 2
    err = capsys.readouterr().err
    assert "'seq'" in err and "'batch'" in err and "keep = 0" in err
    assert run("train", "--seq", "12") == 2
    assert "target and text must be given" in capsys.readouterr().err


def test_what_cannot_be_resumed_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that writes over another; one that goes on in other data, or behind later checkpoints."""
    assert run("train", "run.toml", "--save-every", 2) == 0
    state, extra = fcp.checkpoint.load("run/checkpoints", fcp.transform(llama.tiny(vocab_size=256)))
    fcp.checkpoint.save("foreign", fcp.transform(llama.tiny(vocab_size=256)), state)
    assert extra["settings"]["seq"] == 12
    capsys.readouterr()
    for words, said in (
        ((), "a run is in this folder; add --resume auto"),
        (("--resume", "auto", "--seq", "16"), "its run read other data"),
        (("--resume", "run/checkpoints/step-00000002"), "step-00000004 in the same folder is later"),
        (("--resume", "foreign", "--folder", "new"), "no checkpoint of fcp train"),
    ):
        assert run("train", "run.toml", *words) == 2
        assert said in capsys.readouterr().err
    assert len(curve()) == 4


def test_tensorboard_that_is_missing_is_said_first(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is refused after its first checkpoint."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    assert run("train", "run.toml", "--tensorboard") == 2
    assert "`pip install fcp[train]`" in capsys.readouterr().err and not Path("run").exists()


EVAL_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "rows that do not divide": (("--dp", 2, "--batch", 3), "give a multiple of 2 rows"),
    "a row of one token": (("--seq", 1), "a row needs 2 tokens"),
    "a mesh and an axis": (("--mesh", "cp=2", "--tp", 2), "write the whole mesh"),
    "a text of one token": (("--text", "one.txt"), "no token of it has one before it"),
    "nothing trained": (("--trained", "nowhere"), "nowhere: nothing is there"),
}


@pytest.mark.parametrize("name", EVAL_REFUSED)
def test_what_cannot_be_evaluated(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A perplexity of nothing."""
    Path("one.txt").write_text("a\n\nb")
    words, said = EVAL_REFUSED[name]
    assert run("eval", "train_targets:small", "--text", TEXT, *words) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty picture, or one that cannot be written."""
    Path("empty.jsonl").write_text("")
    Path("log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    refused = ((("nowhere",), "not readable as a log"), (("empty.jsonl",), "no step is logged there yet"))
    for words, said in (*refused, (("log.jsonl", "--out", "no/where.png"), "cannot be written")):
        assert run("plot", *words) == 2
        assert said in capsys.readouterr().err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that nobody finds; a key without a word of help."""
    for words in (["--help"], ["train", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "eval", "plot", "--weight-decay", "--resume"))
    assert all(what.help for what in itertools.chain(_settings.KEYS.values()))

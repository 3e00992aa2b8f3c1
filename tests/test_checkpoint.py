"""Checkpoints: everything comes back on any mesh, whole or not at all, and what is damaged is named."""

import json
import pickle
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fcp
from fcp import pytree
from fcp.checkpoint import _folder, _shards, _state
from models import llama, mixtral
from tests.toys import batch_of, randomized, tokens, toy

MESHES: list[dict[str, int]] = [{}, {"cp": 2}, {"tp": 2}, {"fsdp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "fsdp": 2}]


@cache
def trained(cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[fcp.Transformed, fcp.TrainStep, Any]:
    """A transformed function, its step, and a state after three of them."""
    model, params = toy()
    sharded = fcp.transform(model, cp=2, tp=2)
    step = fcp.train_step(sharded, fcp.optimizer(cls, lr=1e-3))
    state = step.init(sharded.shard(params))
    for seed in range(3):
        state, _ = step(state, batch_of(tokens(2, 12, seed=seed)))
    return sharded, step, state


def at(step: int) -> Any:
    """The trained state, said to be of another step."""
    _, _, state = trained()
    return fcp.TrainState(state.params, state.optimizer, torch.tensor(step), state.skipped)


def assert_same(expected: Any, actual: Any) -> None:
    assert pytree.paths(expected) == pytree.paths(actual)
    for path, a, b in zip(pytree.paths(expected), pytree.leaves(expected), pytree.leaves(actual), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_goes_on_alike(sizes: dict[str, int], tmp_path: Path) -> None:
    """A leaf or a moment that another mesh reads from another place; a step, a count or a position left behind."""
    sharded, step, state = trained()
    fcp.checkpoint.save(tmp_path, sharded, state, extra={"row": 12, "epochs": [0, 1.5, None]})
    settings: Any = sizes
    other = fcp.transform(toy()[0], **settings)
    found, extra = fcp.checkpoint.load(tmp_path, other)
    assert extra == {"row": 12, "epochs": [0, 1.5, None]}
    assert_same(state, found)
    _, expected = step(state, batch_of(tokens(2, 12, seed=9)))
    _, actual = fcp.train_step(other, step.optimizer)(found, batch_of(tokens(2, 12, seed=9)))
    assert fcp.relative_error(expected["loss"], actual["loss"]) < 1e-12


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.ASGD])
def test_what_an_optimizer_keeps(cls: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """Moments with other names, none at all, or scalars that lose bits in JSON (NAdam's product)."""
    sharded, _, state = trained(cls)
    path = fcp.checkpoint.save(tmp_path, sharded, state).path
    assert_same(state, fcp.checkpoint.load(path, sharded, state)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Values that go through another dtype; NaN and infinity that JSON or a comparison loses; an empty leaf."""

    def fn(params: Any, inputs: Any, ops: Any = fcp.LOCAL) -> fcp.Output:
        raise NotImplementedError

    values = torch.tensor([0.1, -0.0, float("inf"), float("nan"), 3e-5]).to(dtype)
    params = {"a": values, "b": [torch.tensor(1 / 3, dtype=dtype), torch.zeros(0, 3, dtype=dtype)], "c.d": values[::2]}
    sharded = fcp.transform(fn)
    state = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=1.0)).init(params)
    found, _ = fcp.checkpoint.load(fcp.checkpoint.save(tmp_path, sharded, state).path, sharded, state)
    for a, b in zip(pytree.leaves(state), pytree.leaves(found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)) if a.dim() else torch.equal(a, b)


def test_many_files(tmp_path: Path) -> None:
    """A leaf that falls between two files."""
    sharded, _, state = trained()
    with mock.patch.object(_shards, "FILE_BYTES", 20_000):
        path = fcp.checkpoint.save(tmp_path, sharded, state).path
    assert len(list(path.glob("*.safetensors"))) > 5
    fcp.checkpoint.verify(path)
    assert_same(state, fcp.checkpoint.load(tmp_path, sharded)[0])


def test_torch_reads_it(tmp_path: Path) -> None:
    """A format of fcp's own under a name of torch's."""
    import torch.distributed.checkpoint as dcp

    sharded, _, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state).path
    wanted = {
        f"params.{name}": torch.empty_like(x)
        for name, x in zip(pytree.paths(state.params), pytree.leaves(state.params), strict=True)
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert all(torch.equal(a, b) for a, b in zip(wanted.values(), pytree.leaves(state.params), strict=True))


def test_parameters_alone(tmp_path: Path) -> None:
    """Moments that are read to evaluate a model."""
    sharded, _, state = trained()
    fcp.checkpoint.save(tmp_path, sharded, state)
    seen: list[str] = []
    right = _shards.read_blocks
    with mock.patch.object(
        _shards, "read_blocks", lambda files, blocks: seen.extend(b.name for b in blocks) or right(files, blocks)
    ):
        assert_same(state.params, fcp.checkpoint.load_params(tmp_path, fcp.transform(toy()[0], tp=2)))
    assert seen and all(name.startswith("params.") for name in seen)


def test_experts(tmp_path: Path) -> None:
    """A stack of experts, cut along its first dim, in another order."""
    model = mixtral.tiny()
    params = randomized(model)
    sharded = fcp.transform(model, cp=2, tp=2, ep=4)
    state = fcp.train_step(sharded, fcp.optimizer(torch.optim.SGD, lr=0.1)).init(sharded.shard(params))
    fcp.checkpoint.save(tmp_path, sharded, state)
    assert_same(state, fcp.checkpoint.load(tmp_path, fcp.transform(model, fsdp=2, ep=2))[0])


def test_no_pickle(tmp_path: Path) -> None:
    """A file that runs what it likes when it is read."""
    sharded, _, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state, extra={"a": 1}).path
    for file in path.iterdir():
        assert not zipfile.is_zipfile(file)  # what torch.save writes
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
            pickle.loads(file.read_bytes())
    refuse = mock.Mock(side_effect=AssertionError("unpickled"))
    with (
        mock.patch.object(pickle, "load", refuse),
        mock.patch.object(pickle, "loads", refuse),
        mock.patch.object(pickle, "Unpickler", refuse),
        mock.patch.object(torch, "load", refuse),
    ):
        assert_same(state, fcp.checkpoint.load(tmp_path, sharded)[0])
        fcp.checkpoint.verify(path)
        assert fcp.checkpoint.newest(tmp_path) == path


# --- what is damaged is refused ---------------------------------------------------------------------------------------


def _flip(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)


def _edit(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = False) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    if seal:
        manifest.pop("checksum")
        manifest["checksum"] = _folder._checksum(manifest)
    path.write_text(json.dumps(manifest))


def _lie(leaf: str, about: dict[str, Any]) -> Callable[[Path], None]:
    """A manifest that is whole, and says something else of a leaf than its file."""
    return lambda path: _edit(path / "manifest.json", lambda m: m["leaves"][leaf].update(about), seal=True)


def _first(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


NORM = "params.model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a truncated shard": (lambda p: _first(p).write_bytes(_first(p).read_bytes()[:-1]), "{shard}: .* bytes, and"),
    "an empty shard": (lambda p: _first(p).write_bytes(b""), "{shard}: 0 bytes"),
    "an altered byte of a tensor": (lambda p: _flip(_first(p), 0.9), "{shard}: altered"),
    "an altered byte of a header": (lambda p: _flip(_first(p), 0.0), "{shard}: altered"),
    "a missing shard": (lambda p: _first(p).unlink(), "{shard}: missing"),
    "a missing state": (lambda p: (p / "state.json").unlink(), "state.json: missing"),
    "an altered state": (lambda p: _flip(p / "state.json"), "state.json: altered"),
    "a foreign shard": (
        lambda p: shutil.copy(_first(p), p / "shard-9.safetensors"),
        "shard-9.safetensors: not of this",
    ),
    "another foreign file": (lambda p: (p / "notes.txt").write_text("hello"), "notes.txt: not of this checkpoint"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: missing"),
    "a garbled manifest": (lambda p: (p / "manifest.json").write_text('{"a'), "manifest.json: not readable as JSON"),
    "a manifest that is no object": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json: no JSON object"),
    "somebody else's manifest": (lambda p: (p / "manifest.json").write_text("{}"), "manifest.json: no manifest of"),
    "a later version": (
        lambda p: _edit(p / "manifest.json", lambda m: m.update(version=3), seal=True),
        "manifest.json: version 3, and this fcp reads 2",
    ),
    "an altered manifest": (lambda p: _edit(p / "manifest.json", lambda m: m.update(step=1)), "manifest.json: altered"),
    "a renamed checkpoint": (lambda p: p.rename(p.with_name("step-00000008")), "manifest.json: it is of step 7"),
    "a save that was cut short": (lambda p: p.rename(p.with_name("step-00000007.partial")), "cut short"),
    "another shape": (_lie(NORM, {"shape": [31]}), "not of these files: params.model.norm.weight has 32"),
    "another dtype": (_lie(NORM, {"dtype": "float32"}), "not of these files: .* float64 in the files"),
    "a leaf of another name": (
        lambda p: _edit(p / "manifest.json", lambda m: m["leaves"].update(x=m["leaves"].pop(NORM)), seal=True),
        "not of these files: x is in no file",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """A training that goes on from a part of its state; an error that does not say which file, or what to do."""
    sharded, _, state = trained()
    good = fcp.checkpoint.save(tmp_path, sharded, state).path
    path = fcp.checkpoint.save(tmp_path, sharded, at(7)).path
    shard = _first(path).name
    damage, words = DAMAGES[what]
    damage(path)
    (path,) = (each for each in tmp_path.iterdir() if each != good)
    words = words.format(shard=shard)
    with pytest.raises(ValueError, match=words):
        fcp.checkpoint.verify(path)
    if "leaf" in what or what in ("another shape", "another dtype"):  # its checksums are right: somebody made it so
        with pytest.raises(ValueError, match=r"another model|not of these files"):
            fcp.checkpoint.load(path, sharded)
        return
    assert fcp.checkpoint.newest(tmp_path) == good
    with pytest.raises(ValueError, match=rf"(?s){words}.*The newest whole one is {good}\."):
        fcp.checkpoint.load(path, sharded)
    if what == "a save that was cut short":
        found, _ = fcp.checkpoint.load(tmp_path, sharded)
    else:
        with pytest.warns(UserWarning, match="an older checkpoint is tried"):
            found, _ = fcp.checkpoint.load(tmp_path, sharded)
    assert_same(state, found)


def test_any_altered_byte_is_noticed(tmp_path: Path) -> None:
    """A part of a file that no check reads."""
    sharded, _, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state, extra={"row": 1}).path
    generator = torch.Generator().manual_seed(0)
    for file in sorted(path.iterdir()):
        kept = file.read_bytes()
        for index in torch.randint(0, len(kept), (12,), generator=generator).tolist():
            _flip(file, (index + 0.5) / len(kept))
            with pytest.raises(ValueError, match=file.name):
                fcp.checkpoint.verify(path)
            file.write_bytes(kept)
    fcp.checkpoint.verify(path)


def test_a_check_that_compares_nothing_is_noticed(tmp_path: Path) -> None:
    """Mutant: checksums that are always found right. Then an altered byte comes back, and nothing else refuses it."""
    sharded, _, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state).path
    _flip(_first(path), 0.9)
    with mock.patch.object(_folder, "check_digests", return_value=None):
        fcp.checkpoint.verify(path)
        found, _ = fcp.checkpoint.load(path, sharded)
    with pytest.raises(AssertionError):
        assert_same(state, found)


@pytest.mark.parametrize(
    ("make", "like", "words"),
    [
        (lambda: llama.tiny(num_hidden_layers=1), False, r"model\.layers\.1\..* is not in the model"),
        (lambda: llama.tiny(num_hidden_layers=3), False, r"model\.layers\.2\..* is not in the checkpoint"),
        (lambda: llama.tiny(vocab_size=65), False, r"is \(64, 32\) in the checkpoint and \(65, 32\) in the model"),
        (lambda: llama.tiny(), True, "is float64 in the checkpoint and torch.float32 in the state"),
    ],
)
def test_another_model_is_refused(make: Any, like: bool, words: str, tmp_path: Path) -> None:
    """Leaves that are there, of the right size, and of another model."""
    sharded, step, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state).path
    other = fcp.transform(make())
    single = fcp.train_step(other, step.optimizer).init(make().init(seed=0)) if like else None
    with pytest.raises(ValueError, match=rf"(?s)checkpoint.load: {path}: of another model.*{words}"):
        fcp.checkpoint.load(tmp_path, other, single)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """Adam's moments, which SGD would carry along and not use."""
    sharded, _, state = trained()
    fcp.checkpoint.save(tmp_path, sharded, state)
    other = trained(torch.optim.Adagrad)[2]
    with pytest.raises(ValueError, match="of another optimizer: only one of the checkpoint and the state has moments"):
        fcp.checkpoint.load(tmp_path, sharded, other)


def test_nothing_there(tmp_path: Path) -> None:
    """An empty folder, or none, that trains from the start in silence."""
    sharded, _, _ = trained()
    assert fcp.checkpoint.newest(tmp_path) is None and fcp.checkpoint.newest(tmp_path / "none") is None
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="no whole checkpoint there"):
            fcp.checkpoint.load(path, sharded)
    with pytest.raises(ValueError, match=r"no checkpoint there.*There is no whole one in"):
        fcp.checkpoint.load(tmp_path / "step-00000001", sharded)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": (1, 2)}, "write tuples as lists"),
        ({"a": {1: 2}}, "keys of dicts as strings"),
        ({"a": float("nan")}, "is not for JSON"),
        ({"a": torch.zeros(1)}, "is not for JSON"),
    ],
)
def test_what_json_changes_is_refused(extra: Any, words: str, tmp_path: Path) -> None:
    """A random state whose tuples come back as lists, which nothing accepts."""
    sharded, _, state = trained()
    with pytest.raises(ValueError, match=words):
        fcp.checkpoint.save(tmp_path, sharded, state, extra=extra)
    assert names(tmp_path) == []


def test_another_state_is_refused(tmp_path: Path) -> None:
    """A state of another model, or none, under this one's name."""
    sharded, _, state = trained()
    one = llama.tiny(num_hidden_layers=1)
    mine: Any = fcp.TrainState(state.params, [torch.zeros(1)], state.step, state.skipped)
    with pytest.raises(ValueError, match=r"is not what fcp\.optimizer makes"):
        fcp.checkpoint.save(tmp_path, sharded, mine)
    mine = fcp.TrainState(pytree.map(lambda x: x.to(torch.complex64), one.init(seed=0)), *_rest(state))
    with pytest.raises(ValueError, match="complex64; stored are"):
        fcp.checkpoint.save(tmp_path, fcp.transform(one), mine)
    with pytest.raises(ValueError, match="keep=0"):
        fcp.checkpoint.save(tmp_path, sharded, state, keep=0)
    assert not any(tmp_path.iterdir())


def _rest(state: Any) -> tuple[Any, Any, Any]:
    return {"step": torch.tensor(0), "moments": {}}, state.step, state.skipped


# --- a save is whole or nothing ---------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """One removed too many; damaged ones counted, so that the last whole one is removed; strangers removed."""
    sharded, _, _ = trained()
    (tmp_path / "log.jsonl").write_text("{}")
    for step in (1, 2, 3, 4):
        fcp.checkpoint.save(tmp_path, sharded, at(step), keep=2)
    assert names(tmp_path) == ["log.jsonl", "step-00000003", "step-00000004"]
    _first(tmp_path / "step-00000004").unlink()
    fcp.checkpoint.save(tmp_path, sharded, at(5), keep=2)
    assert names(tmp_path) == ["log.jsonl", "step-00000003", "step-00000004", "step-00000005"]
    fcp.checkpoint.save(tmp_path, sharded, at(6), keep=2)
    assert names(tmp_path) == ["log.jsonl", "step-00000005", "step-00000006"]


def test_the_same_step_again(tmp_path: Path) -> None:
    """A checkpoint that is gone while another takes its name; leftovers of a kill between the two."""
    sharded, _, state = trained()
    path = fcp.checkpoint.save(tmp_path, sharded, state, extra={"n": 1}).path
    assert fcp.checkpoint.save(tmp_path, sharded, state, extra={"n": 2}).path == path
    assert names(tmp_path) == [path.name] and fcp.checkpoint.load(tmp_path, sharded)[1] == {"n": 2}
    replaced = path.rename(path.with_name(path.name + ".replaced"))
    (tmp_path / "step-00000099.partial").mkdir()
    (tmp_path / "step-00000001.removing").mkdir()
    assert fcp.checkpoint.newest(tmp_path) == replaced
    assert fcp.checkpoint.load(tmp_path, sharded)[1] == {"n": 2}
    fcp.checkpoint.save(tmp_path, sharded, at(9))
    assert names(tmp_path) == [replaced.name, "step-00000009"]
    fcp.checkpoint.save(tmp_path, sharded, state, extra={"n": 3})
    assert names(tmp_path) == [path.name, "step-00000009"]


class Killed(BaseException):
    """The process, at this line."""


def _counting(limit: int) -> tuple[list[int], Any]:
    """Patches of the operations on files that a save makes; the one after `limit` kills."""
    done = [0]

    def counted(right: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if done[0] == limit:
                raise Killed
            done[0] += 1
            return right(*args, **kwargs)

        return call

    targets = [(Path, name) for name in ("mkdir", "rename", "open")] + [(shutil, "rmtree"), (_folder.os, "fsync")]
    return done, [mock.patch.object(owner, name, counted(getattr(owner, name))) for owner, name in targets]


def _kill_after(limit: int, act: Callable[[], Any]) -> bool:
    """Runs `act`, killed at its operation `limit`, nothing being tidied up after that; whether it was."""
    done, patches = _counting(limit)
    for each in patches:
        each.start()
    try:
        act()
    except Killed:
        return True
    finally:
        for each in patches:
            each.stop()
    assert done[0] <= limit
    return False


def test_a_kill_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    """A moment, between any two operations on files, in which the old checkpoint is gone and the new one not there."""
    sharded, _, _ = trained()
    fcp.checkpoint.save(tmp_path, sharded, at(1), extra={"n": 0})
    fcp.checkpoint.save(tmp_path, sharded, at(2), extra={"n": 0})
    limit, killed = 0, True
    while killed:
        number = limit + 1
        killed = _kill_after(
            limit, lambda n=number: fcp.checkpoint.save(tmp_path, sharded, at(2), extra={"n": n}, keep=1)
        )
        state, extra = fcp.checkpoint.load(tmp_path, sharded)
        assert int(state.step) == 2 and extra["n"] in (0, *range(1, number + 1))
        limit += 1
    assert limit > 10 and names(tmp_path) == ["step-00000002"]


def test_a_rename_before_the_files_are_there_is_noticed(tmp_path: Path) -> None:
    """Mutant: a save that writes under the checkpoint's own name. Then a kill leaves a damaged newest checkpoint."""
    sharded, _, _ = trained()
    fcp.checkpoint.save(tmp_path, sharded, at(1))
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"manifest\.json: missing; an older checkpoint is tried"):
        state, _ = fcp.checkpoint.load(tmp_path, sharded)
    assert int(state.step) == 1


def test_a_full_disk(tmp_path: Path) -> None:
    """A save that fails, leaves half of itself, and takes an earlier checkpoint with it."""
    sharded, _, _ = trained()
    fcp.checkpoint.save(tmp_path, sharded, at(1), keep=1)
    with (
        mock.patch.object(_shards, "_entries", side_effect=OSError(28, "No space left on device")),
        pytest.raises(RuntimeError, match=r"checkpoint\.save: OSError: \[Errno 28\] No space left"),
    ):
        fcp.checkpoint.save(tmp_path, sharded, at(2), keep=1)
    assert names(tmp_path) == ["step-00000001"]
    fcp.checkpoint.verify(tmp_path / "step-00000001")


# --- asynchronous -----------------------------------------------------------------------------------------------------


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Saves do not write until the event is set."""
    go, right = threading.Event(), _shards.write_blocks

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return right(*args)

    with mock.patch.object(_shards, "write_blocks", write):
        yield go
        go.set()


def test_an_asynchronous_save_has_the_state_of_its_call(held: threading.Event, tmp_path: Path) -> None:
    """A checkpoint of parameters that the next step, whose buffers are donated, has moved meanwhile."""
    model, params = toy()
    sharded = fcp.transform(model)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-2), donate=True)
    state, _ = step(step.init(pytree.map(torch.clone, params)), batch_of(tokens(2, 12)))
    expected = pytree.map(torch.clone, state)
    saving = fcp.checkpoint.save(tmp_path, sharded, state, asynchronous=True)
    assert not saving.done() and fcp.checkpoint.newest(tmp_path) is None
    step(state, batch_of(tokens(2, 12, seed=1)))
    held.set()
    assert saving.wait() == saving.path == fcp.checkpoint.newest(tmp_path) and saving.done()
    assert_same(expected, fcp.checkpoint.load(tmp_path, sharded)[0])


def test_the_next_save_waits(held: threading.Event, tmp_path: Path) -> None:
    """Two saves in one folder, of which the second removes the first's files as leftovers."""
    sharded, _, _ = trained()
    first = fcp.checkpoint.save(tmp_path, sharded, at(1), asynchronous=True)
    threading.Timer(0.3, held.set).start()
    fcp.checkpoint.save(tmp_path, sharded, at(2), asynchronous=True).wait()
    assert first.wait() == tmp_path / "step-00000001"
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_fails_beside_the_training_is_raised(tmp_path: Path) -> None:
    """A training that runs for days and saves nothing."""
    sharded, _, _ = trained()
    full = mock.patch.object(_shards, "_entries", side_effect=OSError(28, "No space left on device"))
    with full:
        saving = fcp.checkpoint.save(tmp_path, sharded, at(1), asynchronous=True)
        with pytest.raises(RuntimeError, match="No space left"):
            saving.wait()
        fcp.checkpoint.save(tmp_path, sharded, at(2), asynchronous=True)
        with pytest.raises(RuntimeError, match="No space left"):
            fcp.checkpoint.save(tmp_path, sharded, at(3))
    fcp.checkpoint.save(tmp_path, sharded, at(3))
    assert names(tmp_path) == ["step-00000003"]


# --- what lies in pieces ----------------------------------------------------------------------------------------------


def test_pieces_of_a_leaf_are_blocks_of_it(tmp_path: Path) -> None:
    """A fused matrix whose slices overwrite each other in one file; padding that is written; a copy written twice.

    Three ranks' parts of a leaf of 16 rows, two fused halves of 8 over tp=2, stored over fsdp=3, are written one after
    the other and read whole.
    """
    from fcp._layout import part_of, take
    from fcp._shards import Held
    from fcp.sharded import Placement

    whole = torch.arange(16 * 3, dtype=torch.float64).view(16, 3)
    placement = Placement(slices=(("tp", fcp.Split(0, pieces=(8, 8))),), stored=("fsdp",))
    sizes, facts = {"fsdp": 3, "tp": 2}, {}
    for number in range(6):
        part = part_of((16, 3), placement, sizes, {"fsdp": number // 2, "tp": number % 2})
        blocks = _state._blocks("params.w", Held((16, 3), part), take(whole, part))
        facts |= _shards.write_blocks(tmp_path, number, 6, blocks)
    assert len(facts) > 6  # the rank whose rows are of both halves has two blocks
    files = _shards.stored(tmp_path)
    assert files.differs({"params.w": {"dtype": "float64", "shape": [16, 3]}}) == []
    found = torch.zeros(16, 3, dtype=torch.float64)
    _shards.read_blocks(files, [_state.Block("params.w", (16, 3), (0, 0), found)])
    assert torch.equal(found, whole)
    (tmp_path / sorted(facts)[0]).unlink()  # mutant: a rank that wrote nothing
    assert _shards.stored(tmp_path).differs({"params.w": {"dtype": "float64", "shape": [16, 3]}})

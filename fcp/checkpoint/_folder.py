"""The folder of a checkpoint: written beside its name, then renamed; whole, or refused by the file that is not.

    FOLDER/step-00000042/            a checkpoint
        shard-...safetensors         tensors
        state.json                   scalars, and what the caller added
        manifest.json                what there is: every file's size and checksum, every leaf's dtype and shape
    FOLDER/step-00000043.partial/    one that was being written when its process was killed

Problem. A process may be killed at any moment, a disk may fill up, a copy may be cut short; a file that is half there
is often readable, and wrong. And a training that goes on from it says nothing.

Idea. Everything is written into a folder of another name, each file and then the folder forced to the disk, and one
rename makes it a checkpoint. The manifest is written last, and has a checksum of its own. So nothing incomplete ever
has a checkpoint's name, and whatever happens to it later, some file differs from what is listed. To replace a
checkpoint of the same step takes two renames, and no system has one for both; between the two the old one is called
step-...replaced, which counts as that step's as long as nothing else does.

Checksums are xxh3's of 128 bits, as fast as memory is read. They tell what a disk or a copy did to a file. Against
somebody who means harm no checksum would do that lies beside what it is of, and nothing here is ever unpickled.

Left out: two trainings that write into one folder at once.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

__all__ = [
    "CHECKSUM",
    "MANIFEST",
    "STATE",
    "Checksum",
    "DamagedError",
    "begin",
    "check_digests",
    "check_files",
    "checkpoints",
    "commit",
    "discard",
    "is_checkpoint",
    "name_of",
    "newest_whole",
    "read_json",
    "write_json",
]

FORMAT, VERSION = "fcp checkpoint", 2
MANIFEST, STATE = "manifest.json", "state.json"
NAME = re.compile(r"step-(\d{8,})(\.\w+)?")
CHECKSUM, Checksum = "xxh3_128", xxhash.xxh3_128
HASHING = 2
"""Threads that compute checksums while a checkpoint is read."""


class DamagedError(ValueError):
    """A checkpoint that is not whole; the message begins with the file at fault."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


# --- writing ----------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; what killed processes left behind is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        gone = match and (match[2] in (".partial", ".removing") or (match[2] == ".replaced" and _final(path).exists()))
        if gone:
            shutil.rmtree(path)
    partial = folder / f"{name_of(step)}.partial"
    partial.mkdir()
    return partial


def commit(partial: Path, about: Mapping[str, Any], files: Mapping[str, Any], *, keep: int | None) -> Path:
    """Lists the files in the manifest, and makes `partial` the checkpoint; then removes those before the newest `keep`.

    Args:
        partial: what `begin` gave, all files in it.
        about: what else the manifest says.
        files: name to bytes and checksum.
        keep: how many whole checkpoints stay; None for all.
    """
    manifest = {"format": FORMAT, "version": VERSION, **about, "files": dict(sorted(files.items()))}
    write_json(partial / MANIFEST, {**manifest, "checksum": _checksum(manifest)})
    _sync(partial)
    final = _final(partial)
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    if replaced.exists():
        discard(replaced)
    if keep is not None:
        _prune(final.parent, keep)
    return final


def _prune(folder: Path, keep: int) -> None:
    """Removes what is older than the newest `keep` checkpoints whose files are all there."""
    whole = 0
    for path in checkpoints(folder):
        if whole >= keep:
            discard(path)
            continue
        with contextlib.suppress(DamagedError):
            check_files(path)
            whole += 1


def discard(path: Path) -> None:
    """Removes a checkpoint; one that is half removed has no checkpoint's name."""
    removing = path.with_name(path.name.partition(".")[0] + ".removing")
    shutil.rmtree(removing, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(removing)
        shutil.rmtree(removing)


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Writes the file and forces it to the disk; its bytes and checksum."""
    data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), CHECKSUM: Checksum(data).hexdigest()}


def _sync(folder: Path) -> None:
    """Forces the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return Checksum(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """What has a checkpoint's name in `folder`, the newest step first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # step-N comes before step-N.replaced
        match = NAME.fullmatch(path.name)
        if match and match[2] in (None, ".replaced"):
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found, reverse=True)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is meant as one checkpoint, whole or not, and not as a folder of several."""
    return NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def newest_whole(folder: Path) -> Path | None:
    for path in checkpoints(folder):
        with contextlib.suppress(DamagedError):
            check_digests(path, check_files(path)["files"])
            return path
    return None


def check_files(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there, of the right sizes, and no other.

    Raises:
        DamagedError: it is not so, or the manifest cannot be read; the file is named.
    """
    match = NAME.fullmatch(path.name)
    if match and match[2] not in (None, ".replaced"):
        raise DamagedError(f"{path}: a save that was cut short; it is no checkpoint")
    if not path.is_dir():
        raise DamagedError(f"{path}: no checkpoint there")
    manifest = _manifest(path / MANIFEST)
    if match and int(match[1]) != manifest["step"]:
        raise DamagedError(f"{path / MANIFEST}: it is of step {manifest['step']}, and the folder's name is of another")
    listed, there = manifest["files"], {each.name for each in path.iterdir()} - {MANIFEST}
    for name in sorted(listed.keys() - there):
        raise DamagedError(f"{path / name}: missing, and {MANIFEST} lists it")
    for name in sorted(there - listed.keys()):
        raise DamagedError(f"{path / name}: not of this checkpoint; {MANIFEST} does not list it")
    for name, about in listed.items():
        size = (path / name).stat().st_size
        if size != about["bytes"]:
            raise DamagedError(f"{path / name}: {size} bytes, and {MANIFEST} says {about['bytes']}")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise DamagedError(f"{path}: no manifest of a checkpoint of fcp")
    if found.get("version") != VERSION:
        raise DamagedError(f"{path}: version {found.get('version')!r}, and this fcp reads {VERSION}")
    if found.pop("checksum", None) != _checksum(found):
        raise DamagedError(f"{path}: altered; its checksum is another")
    return found


def check_digests(path: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None) -> None:
    """Raises DamagedError for the first file, of `names` (all), whose checksum is not what the manifest says."""
    chosen = sorted(files if names is None else names)
    with ThreadPoolExecutor(HASHING) as pool:
        for name, digest in zip(chosen, pool.map(_checksum_of, [path / name for name in chosen]), strict=True):
            if digest != files[name][CHECKSUM]:
                raise DamagedError(f"{path / name}: altered; its checksum is not what {MANIFEST} says")


def _checksum_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, Checksum).hexdigest()
    except OSError as error:
        raise DamagedError(f"{path}: not readable ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: no JSON object")
    return found


def _final(path: Path) -> Path:
    """The checkpoint's own name of step-N.partial, or of step-N.replaced."""
    return path.with_name(path.name.partition(".")[0])

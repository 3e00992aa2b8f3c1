"""load: this process's part of a checkpoint, read while its checksums are compared.

Every file is checked before anything is returned, by one rank each; hashing takes as long as reading or longer, so it
runs beside it. What fails is explained by a damaged file where there is one, else by the leaves that differ.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fcp._train_step import TrainState
from fcp._transformed import Transformed
from fcp.checkpoint import _folder
from fcp.checkpoint._folder import MANIFEST, STATE, DamagedError
from fcp.checkpoint._ranks import Ranks
from fcp.checkpoint._state import Wanted, params_of, state_of, wanted_of
from fcp.huggingface._checkpoint import extra as library
from fcp.typing import Params

__all__ = ["load", "load_params", "newest", "verify"]


def load(path: str | Path, sharded: Transformed, like: TrainState | None = None) -> tuple[TrainState, dict[str, Any]]:
    """The state of a checkpoint, laid out for `sharded`, whatever mesh it was saved on. Every rank calls it.

    Args:
        path: a checkpoint, or the folder of several: then the newest whole one of them is loaded, with a warning for
            each newer one that is damaged.
        sharded: the transformed function that the state is for.
        like: a state of `sharded` (its values do not matter): names, shapes, dtypes and the optimizer's moments must be
            its, and the tensors come to its devices. None: names and shapes must be the model's.

    Returns:
        (the state, what was saved as `extra`).

    Raises:
        ValueError: there is no checkpoint; it is damaged (the file at fault is named, and the newest whole checkpoint
            beside it); or it is of another model, dtype or optimizer, and all leaves that differ are named.
        ImportError: safetensors is not installed.
    """
    wanted, values = _load(Path(path), sharded, like, moments=True)
    return state_of(wanted, values), values["extra"]


def load_params(path: str | Path, sharded: Transformed) -> Params:
    """The parameters of a checkpoint alone, as shards of `sharded`: to evaluate them, or to write them elsewhere.

    Args:
        path: a checkpoint, or the folder of several, as for `load`.
        sharded: the transformed function that they are for.

    Raises:
        ValueError: as for `load`.
        ImportError: as for `load`.
    """
    return params_of(*_load(Path(path), sharded, None, moments=False))


def newest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, every checksum compared; None where there is none.

    A process asks for itself, and reads all of the checkpoint; `load(folder, ...)` finds the same one, and the ranks
    share that work.
    """
    return _folder.newest_whole(Path(folder).expanduser().absolute())


def verify(path: str | Path) -> None:
    """Whether a checkpoint is whole, every checksum compared.

    Raises:
        ValueError: it is not; the file at fault is named.
    """
    library("safetensors")
    from fcp.checkpoint._shards import stored

    path = Path(path).expanduser().absolute()
    manifest = _folder.check_files(path)
    _folder.check_digests(path, manifest["files"])
    _check_headers(path, manifest, stored(path))


def _load(path: Path, sharded: Transformed, like: TrainState | None, *, moments: bool) -> tuple[Wanted, dict[str, Any]]:
    library("safetensors")
    path, ranks = path.expanduser().absolute(), Ranks.of(sharded)
    one, found = ranks.together("checkpoint.load", lambda: _candidates(path) if ranks.number == 0 else None)[0]
    for each in found:
        try:
            return _load_one(Path(each), ranks, sharded, like, moments)
        except DamagedError as error:
            if one:
                raise ValueError(f"checkpoint.load: {error}. {_offer(path.parent, ranks)}") from None
            warnings.warn(f"checkpoint.load: {error}; an older checkpoint is tried", stacklevel=3)
    damaged = f"; damaged: {', '.join(Path(each).name for each in found)}" if found else ""
    raise ValueError(f"checkpoint.load: {path}: no whole checkpoint there{damaged}")


def _candidates(path: Path) -> tuple[bool, list[str]]:
    """Whether a path is one checkpoint, and what may be loaded, the best first."""
    if _folder.is_checkpoint(path):
        return True, [str(path)]
    return False, [str(each) for each in _folder.checkpoints(path)]


def _offer(folder: Path, ranks: "Ranks") -> str:
    def look() -> str | None:
        found = _folder.newest_whole(folder) if ranks.number == 0 else None
        return None if found is None else str(found)

    whole = ranks.together("checkpoint.load", look)[0]
    return f"There is no whole one in {folder}." if whole is None else f"The newest whole one is {whole}."


def _load_one(
    path: Path, ranks: "Ranks", sharded: Transformed, like: TrainState | None, moments: bool
) -> tuple[Wanted, dict[str, Any]]:
    """Reads this process's part while checksums are compared; nothing is returned on any rank unless all are right."""
    from fcp.checkpoint._shards import read_blocks, stored  # torch's checkpoints take a second to import

    read: list[tuple[Wanted, dict[str, Any]]] = []

    def here() -> None:
        manifest = _folder.check_files(path)
        share = sorted(manifest["files"])[ranks.number :: ranks.count]
        with ThreadPoolExecutor(1) as beside:
            digests = beside.submit(_folder.check_digests, path, manifest["files"], share)
            try:
                wanted = wanted_of(sharded, manifest["leaves"], like, moments=moments)
                files = stored(path)
                _check_headers(path, manifest, files)
                read_blocks(files, wanted.blocks)
                read.append((wanted, _folder.read_json(path / STATE)))
            except Exception:
                digests.result()  # a damaged file is the better explanation
                raise
            digests.result()

    try:
        ranks.together("checkpoint.load", here)
    except DamagedError:
        raise
    except ValueError as error:
        raise ValueError(f"checkpoint.load: {path}: {error}") from None
    return read[0]


def _check_headers(path: Path, manifest: Mapping[str, Any], files: Any) -> None:
    leaves = manifest["leaves"].items()
    wrong = files.differs({name: about for name, about in leaves if about["shape"] and 0 not in about["shape"]})
    if wrong:
        raise DamagedError(f"{path / MANIFEST}: it is not of these files: {'; '.join(wrong[:8])}")

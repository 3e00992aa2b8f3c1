"""`fcp train`: trains a model on a text, on one process or under torchrun.

    fcp train run.toml
    fcp train run.toml --lr 3e-4 --mesh cp=2,tp=2
    torchrun --nproc-per-node 4 -m fcp train run.toml --mesh cp=2,fsdp=2 --distributed
    fcp train run.toml --resume auto

The file and the flags say the same things (`_settings.py` has their rules), and a flag wins. With `--resume auto` a
job that is started again and again goes on where it stopped, on whatever mesh it is given. `_training.py` is the run.
"""

import argparse
import os
import shlex
from typing import Any

from fcp._cli_args import SIZES, add_axes
from fcp._cli_ranks import add_ranks, ranks
from fcp._settings import KEYS, settings
from fcp._training import prepare_run, train

__all__ = ["add_train"]


def add_train(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("train", help="train a model on a text", allow_abbrev=False)
    parser.set_defaults(run=_train)
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="the settings; each flag below but the last is a key of it")
    for key, what in KEYS.items():
        flag = f"--{key.replace('_', '-')}"
        if what.metavar is None:
            add(flag, action=argparse.BooleanOptionalAction, help=what.help)
        else:
            add(flag, metavar=what.metavar, help=what.help)
    add_axes(add)
    add_ranks(add)
    add("--resume", metavar="auto|PATH", help="go on from the newest checkpoint of the folder, or from this one")


def _train(args: argparse.Namespace) -> int:
    flags = {key: getattr(args, key) for key in KEYS}
    axes = {axis: getattr(args, axis) for axis in SIZES}
    found = settings(args.config, flags, axes)
    sizes = {axis: size for axis, size in found.mesh.items() if size > 1 or not args.distributed}
    with ranks("train", args.distributed, args.timeout, [sizes]) as (device_mesh,):
        train(prepare_run(found, device_mesh), resume=args.resume, how_to_resume=_again(args, flags, axes))
    return 0


def _again(args: argparse.Namespace, flags: dict[str, Any], axes: dict[str, Any]) -> str:
    """The command that goes on with this run."""
    launcher = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "N"), "-m"]
    words = [*(launcher if args.distributed else []), "fcp", "train", *([args.config] if args.config else [])]
    for key, word in {**flags, **axes}.items():
        flag = key.replace("_", "-")
        if isinstance(word, bool):
            words.append(f"--{flag}" if word else f"--no-{flag}")
        elif word is not None:
            words += [f"--{flag}", str(word)]
    return shlex.join([*words, *(["--distributed"] if args.distributed else []), "--resume", "auto"])

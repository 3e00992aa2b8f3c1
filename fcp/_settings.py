"""What `fcp train` is told: a TOML file, and flags that override it, as one frozen record.

Each key is stated once, in `KEYS`: its rule and what its help says. The flags are made from the same table, a flag's
word being read as the TOML value that it would be in the file; so a rule is checked in one place, and what is wrong is
said in one way: all offending keys at once, and for an unknown one the nearest that is known.

    target = "models.llama"                 # a module that reads `checkpoint`, or module:attribute
    checkpoint = "SmolLM2-135M.gguf"
    text = "data/us-constitution.txt"
    seq = 256
    steps = 100
    lr = 1e-4
    weight_decay = { "*norm*" = 0.0, "*" = 0.1 }
    mesh = { cp = 2, tp = 2 }

Paths and the target are looked for from the working folder, as those of a flag are, not from the file's.
"""

import argparse
import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fcp._cli_args import DTYPES, REMAT, SIZES, mesh
from fcp._order import LAYOUTS

__all__ = ["KEYS", "Key", "Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """What a training run does; `KEYS` says what each is."""

    target: str
    text: str
    checkpoint: str | None = None
    documents: str = "sections"
    column: str = "text"
    split: str = "train"
    seq: int = 512
    batch: int = 8
    accumulate: int = 1
    steps: int = 100
    optimizer: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-4
    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float | Mapping[str, float] | None = None
    clip: float | None = None
    dtype: str = "float32"
    compute_dtype: str | None = None
    remat: str = "nothing"
    loss_tile: int | None = None
    mlp_tile: int | None = None
    cp_impl: str | None = None
    ulysses: int | None = None
    layout: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    folder: str = "run"
    save_every: int | None = None
    keep: int | None = None
    tensorboard: bool = False

    def learning_rate(self, update: int) -> float:
        """The rate of the update that `update` others went before.

        It rises over `warmup` updates to `lr`, then stays ("constant") or falls to zero at `steps`, in a line or along
        half a cosine (Loshchilov and Hutter 2017, equation 5, without restarts).
        """
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        done = min((update - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
        return self.lr * falls[self.schedule]


@dataclass(frozen=True)
class Key:
    """A key of the settings.

    Attributes:
        rule: what a value must be, in words.
        fits: whether a value of TOML is that.
        help: what the key does.
        metavar: how a flag's value is shown; None for a switch.
    """

    rule: str
    fits: Callable[[Any], bool]
    help: str
    metavar: str | None


def _whole(help: str, least: int = 1) -> Key:
    rule = "must be a whole number" + ("" if least < 0 else f", {least} or more")
    return Key(rule, lambda x: type(x) is int and (least < 0 or x >= least), help, "N")


def _number(help: str, *, zero: bool = False) -> Key:
    rule = "must be a number, 0 or more" if zero else "must be a number, more than 0"
    return Key(rule, lambda x: _is_number(x) and (x > 0 or (zero and x == 0)), help, "X")


def _words(help: str, metavar: str) -> Key:
    return Key("must be a text in quotes, not empty", lambda x: isinstance(x, str) and x != "", help, metavar)


def _one_of(help: str, *choices: str) -> Key:
    return Key(f"must be one of {', '.join(choices)}", lambda x: x in choices, help, "|".join(choices))


def _switch(help: str) -> Key:
    return Key("must be true or false", lambda x: type(x) is bool, help, None)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


def _is_decay(x: Any) -> bool:
    values = list(x.values()) if isinstance(x, dict) else [x]
    return all(_is_number(value) and value >= 0 for value in values)


def _is_mesh(x: Any) -> bool:
    return isinstance(x, dict) and all(name in SIZES and type(size) is int and size > 0 for name, size in x.items())


def _is_optimizer(x: Any) -> bool:
    cls = getattr(torch.optim, x, None) if isinstance(x, str) else None
    return isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer


KEYS: dict[str, Key] = {
    "target": _words("module:attribute, or the module that reads the checkpoint with its load()", "TARGET"),
    "checkpoint": _words("a folder or .gguf file to begin from; without one, parameters are fresh", "PATH"),
    "text": _words("a text file, or a folder of Hugging Face's datasets", "PATH"),
    "documents": _one_of("what a document of a text file is (sections: between blank lines)", "sections", "whole"),
    "column": _words("the column of a data set that holds the documents (text)", "NAME"),
    "split": _words("the split of a data set (train)", "NAME"),
    "seq": _whole("tokens in a row (512)", 2),
    "batch": _whole("rows of a step, over all ranks (8)"),
    "accumulate": _whole("micro-batches that these rows are computed in, one after another (1)"),
    "steps": _whole("steps in all (100)"),
    "optimizer": Key("must name a class of torch.optim", _is_optimizer, "a class of torch.optim (AdamW)", "NAME"),
    "options": Key(
        "must be a table, as { betas = [0.9, 0.95] }", lambda x: isinstance(x, dict), "its other options", "TABLE"
    ),
    "lr": _number("the highest learning rate (1e-4)", zero=True),
    "schedule": _one_of("how it falls after the warm-up, to zero at the end", "constant", "linear", "cosine"),
    "warmup": _whole("steps over which it rises (0)", 0),
    "weight_decay": Key(
        'must be a number, 0 or more, or a table of them by path, as { "*norm*" = 0.0, "*" = 0.1 }',
        _is_decay,
        "of every parameter, or a table by path",
        "X|TABLE",
    ),
    "clip": _number("the largest norm of the gradients; larger ones are scaled down"),
    "dtype": _one_of("of the parameters, their gradients and moments", *DTYPES),
    "compute_dtype": _one_of("in which the model computes (that of the parameters)", *DTYPES),
    "cp_impl": _words("how attention crosses slices: ulysses, ring, gather or auto (ulysses)", "NAME"),
    "ulysses": _whole("of the ranks of cp, how many exchange heads, in a ring of the rest"),
    "layout": _one_of("in which order the ranks of cp hold the sequence (contiguous)", *LAYOUTS),
    "remat": _one_of("what of each layer backward computes again (nothing)", *REMAT),
    "loss_tile": _whole("tokens of a tile of the loss (as many as make 2^25 logits)"),
    "mlp_tile": _whole("tokens of a tile of the MLPs, which are computed again in backward (all)"),
    "mesh": Key(
        f"must be a table of axes and ranks, as {{ cp = 2, tp = 2 }}; axes are {', '.join(SIZES)}",
        _is_mesh,
        "the ranks of each axis",
        "cp=N,tp=N",
    ),
    "seed": _whole("of fresh parameters and of the order of the data (0)", -1),
    "folder": _words("where the log and the checkpoints are written (run)", "FOLDER"),
    "save_every": _whole("steps between two checkpoints (at the end, and when told to stop)"),
    "keep": _whole("how many checkpoints are kept (all)"),
    "tensorboard": _switch("write TensorBoard's event files, too"),
}

ELSEWHERE = {
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "max_steps": "steps",
    "max_grad_norm": "clip",
    "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "remat",
    "per_device_train_batch_size": "batch",
    "batch_size": "batch",
    "max_length": "seq",
    "seq_len": "seq",
    "optim": "optimizer",
    "output_dir": "folder",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "model": "target",
    "dataset": "text",
}
"""What transformers' trainer and others call a key."""


def settings(path: str | None, flags: Mapping[str, str | bool | None], axes: Mapping[str, int | None]) -> Settings:
    """The settings of a TOML file, overridden by flags.

    Args:
        path: the file; None where the flags say all.
        flags: key -> the word that was given, True or False of a switch, or None.
        axes: axis -> its number of ranks, in the place of the one in `mesh`, or None.

    Raises:
        ValueError: a file that cannot be read, an unknown key (with the nearest known one), a value that is not what
            the key takes, a key that is missing, or keys that do not go together.
    """
    given = _file(path)
    wrong = [_unknown(key) for key in given if key not in KEYS]
    wrong += [f"{key} = {x!r} {KEYS[key].rule}" for key, x in given.items() if key in KEYS and not KEYS[key].fits(x)]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    for key, word in flags.items():
        if word is None:
            continue
        value = _value(key, word)
        if not KEYS[key].fits(value):
            wrong.append(f"--{key.replace('_', '-')} {word} {KEYS[key].rule}")
        given[key] = value
    if wrong:
        raise ValueError("; ".join(wrong))
    sized = {axis: size for axis, size in axes.items() if size is not None}
    given["mesh"] = {**given.get("mesh", {}), **sized}
    missing = [key for key in ("target", "text") if key not in given]
    if missing:
        where = "the command line" if path is None else path
        raise ValueError(f"{where}: {' and '.join(missing)} must be given, as {missing[0]} = ... or --{missing[0]} ...")
    floats: dict[str, Any] = {key: float(given[key]) for key in ("lr", "clip") if key in given}
    decay = given.get("weight_decay")
    if decay is not None:
        floats["weight_decay"] = {k: float(x) for k, x in decay.items()} if isinstance(decay, dict) else float(decay)
    found = Settings(**{**given, **floats})
    _together(found)
    return found


def _together(found: Settings) -> None:
    parts = found.mesh.get("dp", 1) * found.mesh.get("fsdp", 1)
    least = parts * found.accumulate
    if found.batch % least:
        raise ValueError(
            f"batch = {found.batch}: accumulate = {found.accumulate} and dp x fsdp = {parts} split the rows; give a "
            f"multiple of {least}"
        )
    largest = found.mesh.get("cp", 1)
    if largest > found.seq:
        raise ValueError(f"cp={largest} is larger than the {found.seq} tokens of a row; give a larger seq or lower cp")
    if found.warmup > found.steps:
        raise ValueError(f"warmup = {found.warmup} is longer than the {found.steps} steps")


def _file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(Path(path).expanduser(), "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path}: not readable ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no TOML ({error})") from None


def _unknown(key: str) -> str:
    alike = difflib.get_close_matches(key, [*KEYS, *ELSEWHERE], n=1)
    if not alike:
        return f"unknown key {key!r}; known are {', '.join(KEYS)}"
    return f"unknown key {key!r}; the nearest is {ELSEWHERE.get(alike[0], alike[0])!r}"


def _value(key: str, word: str | bool) -> Any:
    """A flag's word as the value that TOML would give; a text needs no quotes there."""
    kind = {f.name: f.type for f in dataclasses.fields(Settings)}[key]
    if isinstance(word, bool) or kind in (str, str | None):
        return word
    if key == "mesh" and not word.lstrip().startswith("{"):
        try:
            return mesh(word)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--mesh: {error}") from None
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word

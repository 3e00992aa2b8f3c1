"""What the commands' words have in common: how a count, a mesh or a number is read, and the parser that refuses.

A parser of argparse ends the process where it refuses; this one raises ValueError, so that every command ends in the
same way, with one line on standard error and status 2. A word that is no count, mesh or number is refused with the rule
and an example, by the function that would have read it.
"""

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from fcp._order import LAYOUTS
from fcp.remat import POLICIES

__all__ = [
    "AXES",
    "DTYPES",
    "REMAT",
    "SIZES",
    "Parser",
    "add_axes",
    "add_ways",
    "count",
    "counts",
    "integers",
    "mesh",
    "padding",
    "seconds",
    "tolerance",
    "ways",
]

AXES = ("dp", "fsdp", "cp", "tp")
SIZES = (*AXES, "ep")
"""What a mesh may say; ep has no ranks of its own."""
REMAT = ("nothing", *POLICIES)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would end the process."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (see {self.prog} --help)")


def add_axes(add: Any) -> None:
    """Adds a flag for the size of each axis; `add` is a parser's `add_argument`."""
    for axis, what in zip(AXES, ("rows", "rows, parameters in pieces", "the sequence", "each matrix"), strict=True):
        add(f"--{axis}", type=count, metavar="N", help=f"ranks that split {what}")
    add("--ep", type=count, metavar="N", help="of these ranks, how many share the experts")


def add_ways(add: Any) -> None:
    """Adds the flags that say how the ranks of cp share a sequence."""
    add("--cp-impl", metavar="NAME", help="how attention crosses slices: ulysses, ring, gather or auto (ulysses)")
    add("--ulysses", type=count, metavar="N", help="of the ranks of cp, how many exchange heads, in a ring of the rest")
    add("--layout", choices=LAYOUTS, help="in which order the ranks of cp hold the sequence (contiguous)")


def ways(given: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a mesh as `fcp.transform` takes them, with what these flags (or settings) say of its cp.

    Raises:
        ValueError: Ulysses within a number of ranks that does not divide cp.
    """
    found: dict[str, Any] = dict(sizes)
    found |= {name: value for name in ("cp_impl", "layout") if (value := getattr(given, name)) is not None}
    if given.ulysses is not None:
        cp = sizes.get("cp", 1)
        if cp % given.ulysses:
            raise ValueError(f"ulysses={given.ulysses} does not divide cp={cp}: it is a part of the ranks of cp")
        found["cp"] = (given.ulysses, cp // given.ulysses)
    return found


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers joined by commas, as 0,1,2,0,1") from None


def counts(text: str) -> list[int]:
    return [count(part.strip()) for part in text.split(",")]


def tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more, as 1e-6")
    return value


def seconds(text: str) -> float:
    value = tolerance(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0")
    return value


def mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} must be axis=ranks joined by commas, as cp=2,tp=2")
        if axis not in SIZES:
            raise argparse.ArgumentTypeError(f"unknown mesh axis {axis!r}; known are {', '.join(SIZES)}")
        if axis in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} names {axis} twice")
        sizes[axis] = count(size)
    return sizes


def padding(text: str) -> tuple[str, int]:
    side, _, number = text.partition(":")
    if side not in ("left", "right"):
        raise argparse.ArgumentTypeError(f"{text!r} must be left:N or right:N")
    return side, count(number)

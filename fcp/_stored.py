"""A tensor that is still in its file: what it is, and any slice of it.

A rank that keeps a hundredth of a model should read a hundredth of its checkpoint. safetensors gives any slice of a
tensor by its place in the file, so a `Stored` stands where the tensor would, and whoever cuts it reads only the cut.
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stored", "stored_in"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: `stored[slices]` reads that part of it.

    Attributes:
        file: the safetensors file.
        name: the tensor's name in it.
        shape: of the whole tensor.
        dtype: of what is read; another than the file's is converted to.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> "Stored":
        """The same tensor, converted to `dtype` when it is read."""
        return replace(self, dtype=dtype)

    def __getitem__(self, slices: Any) -> Tensor:
        with importlib.import_module("safetensors").safe_open(self.file, framework="pt") as file:
            found = file.get_slice(self.name)[slices] if self.shape else file.get_tensor(self.name)
        return found.to(self.dtype)


def stored_in(file: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file, by name; nothing but the file's header is read."""
    with importlib.import_module("safetensors").safe_open(file, framework="pt") as opened:
        places = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        found = {name: (tuple(place.get_shape()), place.get_dtype()) for name, place in places.items()}
    unknown = [f"{name} has dtype {dtype}" for name, (_, dtype) in found.items() if dtype not in _DTYPES]
    if unknown:
        raise ValueError(f"{file}: {'; '.join(unknown)}; the weights of a model are floating")
    return {name: Stored(file, name, shape, _DTYPES[dtype]) for name, (shape, dtype) in found.items()}

"""Between a checkpoint folder and a family's parameters: what every `load` and `save` has in common.

Parameters are nested as the checkpoint names its tensors, so what is between the two is small: the config is read and
checked, names and shapes are checked against those of the config, all at once, and the tensors are nested. Two things
are a family's own: old names (`arrange`), and experts that a file holds one by one (`ExpertNames`), where a model has
those of a layer in one tensor.

With `lazy`, tensors stay in their files: a `Stored` stands for each, and a `Stack` of them for a layer's experts. A
slice of a stack reads the experts that it touches, and of them the rows and columns that it touches.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcp import huggingface, pytree
from fcp.typing import Params

__all__ = ["ExpertNames", "read_params", "write_params"]

Shapes = Callable[[Any], Mapping[str, tuple[int, ...]]]


def read_params(
    path: str | Path,
    dtype: torch.dtype | None,
    lazy: bool,
    config_from_json: Callable[[Mapping[str, Any]], Any],
    shapes: Shapes,
    arrange: Callable[[str | Path, Any, dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[Any, Params]:
    """(the config, the parameters) of a checkpoint.

    Args:
        path: a folder with config.json and safetensors, or what else `fcp.huggingface.read` takes.
        dtype: of the parameters; None keeps the checkpoint's.
        lazy: leave the parameters in their files, for `shard` to read a rank's own slices from.
        config_from_json, shapes: the family's.
        arrange: (path, config, tensors of the files by name) -> tensors by the names of `shapes`.

    Raises:
        ValueError: no readable checkpoint, another architecture, or tensors that are missing, unknown or of another
            shape, all named.
    """
    values, tensors = huggingface.read(path, lazy=lazy)
    try:
        config = config_from_json(values)
    except ValueError as error:
        raise ValueError(f"{path}: config: {error}") from None
    wanted = shapes(config)
    if arrange is not None:
        tensors = arrange(path, config, tensors)
    huggingface.check_tensors(path, wanted, tensors, tied={"lm_head.weight", "embed_out.weight"} - wanted.keys())
    return config, pytree.nest({n: tensors[n] if dtype is None else tensors[n].to(dtype) for n in wanted})


def write_params(
    folder: str | Path,
    config: Any,
    params: Params,
    config_to_json: Callable[[Any], dict[str, Any]],
    shapes: Shapes,
    arrange: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda config, tensors: tensors,
) -> None:
    """Writes config.json and model.safetensors, so that `read_params` and transformers read them back.

    Raises:
        ValueError: parameters that are not this config's, or a config that transformers has no class for.
    """
    tensors = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    huggingface.check_tensors(folder, shapes(config), tensors)
    huggingface.write(folder, config_to_json(config), arrange(config, tensors))


# --- experts, one tensor each in files --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertNames:
    """What files call a layer's sparse part (`mlp` in a model) and the matrices of one of its `num` experts.

    In a model `mlp.experts.gate_up_proj` is [experts, 2 * width, hidden], an expert's gate above its up matrix, and
    `mlp.experts.down_proj` is [experts, hidden, width].
    """

    num: int
    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From one tensor a layer to one an expert, under the names of files."""
        found: dict[str, Tensor] = {}
        sparse = {name.partition(".experts.")[0] + "." for name in tensors if ".experts." in name}
        for name, x in tensors.items():
            mlp = next((each for each in sparse if name.startswith(each)), None)
            renamed = name if mlp is None else mlp[: -len("mlp.")] + f"{self.part}.{name[len(mlp) :]}"
            stem, is_expert, kind = renamed.partition(".experts.")
            if not is_expert:
                found[renamed] = x
                continue
            for index, expert in enumerate(x):
                halves = [expert] if kind == "down_proj" else expert.chunk(2)
                names = [self.down] if kind == "down_proj" else [self.gate, self.up]
                found.update({f"{stem}.experts.{index}.{n}.weight": h for n, h in zip(names, halves, strict=True)})
        return found

    def stacked(self, path: str | Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `apart`; tensors that are stacked already stay.

        Raises:
            ValueError: an expert lacks a matrix, there are more experts than `num`, or two differ in shape.
        """
        own = re.compile(rf"(.*)\.{self.part}\.experts\.(\d+)\.({self.gate}|{self.up}|{self.down})\.weight")
        found: dict[str, Any] = {}
        experts: dict[str, dict[tuple[str, int], Any]] = {}
        for name, x in tensors.items():
            match = own.fullmatch(name)
            if match is None:
                found[name.replace(f".{self.part}.", ".mlp.")] = x
            else:
                experts.setdefault(f"{match[1]}.mlp.experts", {})[match[3], int(match[2])] = x
        every = range(self.num)
        for name, parts in experts.items():
            wanted = [(matrix, index) for matrix in (self.gate, self.up, self.down) for index in every]
            missing = [
                f"expert {index}'s {matrix} is missing" for matrix, index in wanted if (matrix, index) not in parts
            ]
            if missing or len(parts) > len(wanted):
                wrong = "; ".join(missing[:4]) or f"the files have expert {max(index for _, index in parts)}"
                raise ValueError(f"{path}: {name} of {self.num} experts: {wrong}")
            gate_up = Stack(tuple((parts[self.gate, i], parts[self.up, i]) for i in every))
            down = Stack(tuple((parts[self.down, i],) for i in every))
            if not (gate_up.even and down.even):
                raise ValueError(f"{path}: {name}: experts of different shapes or dtypes in the file")
            lazy = not isinstance(parts[self.down, 0], Tensor)
            found[f"{name}.gate_up_proj"] = gate_up if lazy else gate_up[:]
            found[f"{name}.down_proj"] = down if lazy else down[:]
        return found


@dataclass(frozen=True)
class Stack:
    """[experts, rows, columns] of matrices that may be in files: `parts[e]` are expert e's, one above the other."""

    parts: tuple[tuple[Any, ...], ...]

    @property
    def even(self) -> bool:
        """Whether every expert has the same shapes and dtype."""
        return len({tuple((tuple(x.shape), x.dtype) for x in each) for each in self.parts}) == 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), sum(x.shape[0] for x in self.parts[0]), self.parts[0][0].shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].dtype

    def to(self, dtype: torch.dtype) -> "Stack":
        return Stack(tuple(tuple(x.to(dtype) for x in each) for each in self.parts))

    def __getitem__(self, slices: Any) -> Tensor:
        given = slices if isinstance(slices, tuple) else (slices,)
        chosen, rows, columns = (*given, *(slice(None),) * (3 - len(given)))
        first, last, _ = rows.indices(self.shape[1])
        found = []
        for each in self.parts[chosen]:
            begin, blocks = 0, []
            for x in each:
                low, high = max(first - begin, 0), min(last - begin, x.shape[0])
                blocks += [x[low:high, columns]] if low < high else []
                begin += x.shape[0]
            found.append(torch.cat(blocks) if blocks else each[0][0:0, columns])
        if found:
            return torch.stack(found)
        none = self.parts[0][0][0:0, columns]
        return none.new_zeros(0, max(last - first, 0), none.shape[1])

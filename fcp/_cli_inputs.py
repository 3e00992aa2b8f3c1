"""What the words of a command line stand for: the model of an import string, its parameters, and a batch for it.

A target is `module:attribute` (a Model, or a function that makes one), or a module that can `load` a checkpoint. Its
own code may fail in any way; whatever it raises while it is imported or called becomes a ValueError that says where.

A batch is made to be hard: tokens that follow one another, cut into rows; packed, documents of uneven lengths, which
the ends of rows cut; padded, by another length in each row.
"""

import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fcp import pytree
from fcp.model import Model
from fcp.typing import Params

__all__ = [
    "batch_of",
    "import_module",
    "load_checkpoint",
    "load_target",
    "random_documents",
    "read_model",
    "row_lengths",
    "shake",
    "with_window",
]


# --- models -----------------------------------------------------------------------------------------------------------


def load_target(target: str) -> tuple[Any, Model]:
    """The module and the model of `module:attribute`."""
    name, colon, attribute = target.partition(":")
    if not colon and (Path(target).is_dir() or target.endswith(".gguf") or os.sep in target):
        raise ValueError(f"{target}: say which module reads it, as in: fcp check models.llama --checkpoint {target}")
    if not colon:
        raise ValueError(f"{target}: name an attribute of the module, as {target}:tiny, or add --checkpoint PATH")
    module = import_module(name)
    if not hasattr(module, attribute):
        known = [
            f"{name}:{key}"
            for key, value in vars(module).items()
            if _makes_model(value) and not key.startswith("_") and getattr(value, "__module__", name) == name
        ]
        raise ValueError(f"{target}: module {name} has no {attribute!r}; it has {', '.join(known) or 'no candidate'}")
    value = getattr(module, attribute)
    if isinstance(value, Model):
        return module, value
    if not _makes_model(value):
        raise ValueError(
            f"{target}: it is of type {type(value).__name__}; give an fcp.Model, or a function without required "
            f"arguments that returns one"
        )
    made = _called(f"{target}()", value)
    if not isinstance(made, Model):
        raise ValueError(f"{target}() gave {type(made).__name__}, not an fcp.Model")
    return module, made


def read_model(
    target: str, checkpoint: str | None, dtype: torch.dtype, seed: int, *, lazy: bool
) -> tuple[Model, Callable[[], Params]]:
    """The model, and what gives its parameters: a checkpoint's, or fresh ones of `seed`.

    Args:
        target: module:attribute, or with a checkpoint the module that loads it.
        checkpoint: a folder or a GGUF file.
        dtype: of the parameters.
        seed: of fresh ones.
        lazy: leave a folder's parameters in their files where the module can, for `shard` to read a rank's slices.
    """
    if checkpoint is None:
        _, model = load_target(target)
        return model, lambda: model.init(seed=seed, dtype=dtype)
    _, model, params = load_checkpoint(target, checkpoint, dtype, lazy=lazy)
    return model, lambda: params


def load_checkpoint(target: str, path: str, dtype: torch.dtype, *, lazy: bool = False) -> tuple[Any, Model, Params]:
    """The module `target`, and the model and parameters that its own `load` reads from `path`.

    `lazy` leaves the parameters in their files, where that is a folder and the module can.
    """
    name, colon, _ = target.partition(":")
    if colon:
        raise ValueError(
            f"{target}: with --checkpoint give the module alone, as {name}; its load() reads the checkpoint"
        )
    module = import_module(name)
    load = getattr(module, "load", None)
    if not callable(load):
        raise ValueError(f"{name}: this module has no load(path, dtype=), so it cannot read {path}")
    stays = lazy and Path(path).expanduser().is_dir() and "lazy" in inspect.signature(load).parameters
    more = {"lazy": True} if stays else {}
    model, params = _called(f"{name}.load({path!r})", load, path, dtype=dtype, **more)
    return module, model, params


def import_module(name: str) -> Any:
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise ValueError(f"{name!r} is no module name; give module:attribute, as models.llama:tiny")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise ValueError(f"{name}: no such module; it is looked for in {os.getcwd()} first") from None
        raise ValueError(f"{name}: it imports {error.name!r}, which is not installed") from None
    except Exception as error:
        raise ValueError(f"{name}: importing it raised {type(error).__name__}: {error}") from error


def _called(what: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error


def _makes_model(value: Any) -> bool:
    """Whether it is a Model, or may give one: a function that can be called without arguments."""
    if isinstance(value, Model):
        return True
    if not callable(value) or inspect.isclass(value):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)


def with_window(module: Any, model: Model, window: int | None) -> Model:
    """The same model with a sliding window of `window` keys on every layer, by the module's own `model(config)`."""
    if window is None:
        return model
    config: Any = model.config
    build = getattr(module, "model", None)
    fields = {f.name for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    if "sliding_window" not in fields or not callable(build):
        raise ValueError(
            f"--window: {module.__name__} does not allow it: that takes a function model(config), and a config with "
            f"sliding_window"
        )
    changes = {"sliding_window": window, **({"layer_types": None} if "layer_types" in fields else {})}
    return _called(f"{module.__name__}.model", build, cast(Any, dataclasses.replace)(config, **changes))


def shake(params: Params, seed: int) -> Params:
    """Adds noise to every leaf, of a size that keeps a matrix product's scale and makes every gradient count."""
    generator = torch.Generator().manual_seed(seed + 1)

    def add(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        scale = x.shape[-1] ** -0.5 if x.dim() > 1 else 0.2
        return x + (scale * torch.randn(x.shape, generator=generator)).to(x.dtype)

    return pytree.map(add, params)


# --- batches ----------------------------------------------------------------------------------------------------------


def row_lengths(rows: int, seq: int, padded: bool) -> list[int]:
    """The real tokens of each row: all of `seq`, or about three quarters, in each row another number."""
    if not padded:
        return [seq] * rows
    return [seq - 1 - (max(seq // 4, 1) - 1 + row) % (seq // 2) for row in range(rows)]


def batch_of(
    documents: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    seq: int,
    packed: bool,
    pad: str | None,
    pad_token: int,
) -> dict[str, Tensor]:
    """A batch with Hugging Face's names: the documents one after another, `lengths[r]` tokens in row r of `seq`.

    Packed, positions restart with each document, and with each row where its end cut one. Padding holds `pad_token`,
    position 0, and 0 in the attention mask.
    """
    stream = _tokens_and_starts(documents)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "attention_mask": []}
    for length in lengths:
        tokens: list[int] = []
        positions: list[int] = []
        for _ in range(length):
            token, first = next(stream)
            tokens.append(token)
            positions.append(0 if first or not positions else positions[-1] + 1)
        for name, real, filler in (
            ("input_ids", tokens, pad_token),
            ("position_ids", positions, 0),
            ("attention_mask", [1] * length, 0),
        ):
            padding = [filler] * (seq - length)
            columns[name].append(padding + real if pad == "left" else real + padding)
    wanted = {"input_ids": True, "position_ids": packed, "attention_mask": pad is not None}
    batch = {name: torch.tensor(columns[name]) for name, want in wanted.items() if want}
    return {**batch, "labels": batch["input_ids"]}


def _tokens_and_starts(documents: Sequence[Sequence[int]]) -> Iterator[tuple[int, bool]]:
    """Each token, and whether it is the first of its document."""
    for document in documents:
        for index, token in enumerate(document):
            yield token, index == 0


def random_documents(total: int, vocab: int, longest: int, seed: int) -> list[list[int]]:
    """`total` random tokens in documents of 1 to `longest`."""
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = torch.randint(0, vocab, (total,), generator=generator).tolist()
    documents = []
    while tokens:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        documents.append(tokens[:length])
        tokens = tokens[length:]
    return documents

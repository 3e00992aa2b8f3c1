"""Checkpoints in Hugging Face's formats: config.json with safetensors (one file or an index), and GGUF.

Read and written tensor for tensor, under the checkpoint's own names; a family's file decides what they mean. Nothing is
unpickled. safetensors, transformers and gguf are extras: imported where they are needed, and missed by name.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_tensors", "read", "write"]


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json values and the tensors by name, of a folder or a GGUF file.

    Raises:
        ValueError: the path is neither, or something in it is missing or cannot be read.
        ImportError: an extra is not installed (`pip install fcp[hf]`).
    """
    path = Path(path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _read_gguf(path)
    if not path.is_dir():
        raise ValueError(
            f"{path}: no checkpoint there; give a folder with config.json and *.safetensors, or a .gguf file"
        )
    config, index, single = (path / n for n in ("config.json", "model.safetensors.index.json", "model.safetensors"))
    if not config.is_file():
        raise ValueError(f"{path}: no config.json in this folder")
    values = _json(config)
    if index.is_file():
        by_name = _json(index).get("weight_map", {})
        files = sorted({path / name for name in by_name.values()})
    else:
        files = [single]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{path}: {', '.join(missing) or 'weights'} not found; weights are read from safetensors only")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_safetensors(file))
    return values, tensors


def write(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors into `folder`, which is made if it is not there."""
    from safetensors.torch import save_file

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    dense = {name: x.detach().contiguous() for name, x in tensors.items()}
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")


def check_tensors(
    path: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    tied: Iterable[str] = (),
) -> None:
    """Raises ValueError naming every tensor that is missing, unknown, or not of the shape the config says.

    `tied` names may be in the checkpoint without being in the model: a tied head, stored a second time. One that
    differs from the leaf it is tied to would be lost, so it must be equal.
    """
    wrong = [f"{name} is missing" for name in shapes if name not in tensors]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    wrong += [f"{name} is unknown" for name in tensors if name not in shapes and name not in tied]
    table = tensors.get("model.embed_tokens.weight")
    wrong += [
        f"{name} is tied by the config and differs from model.embed_tokens.weight"
        for name in tied
        if name in tensors and table is not None and not torch.equal(tensors[name], table)
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{path}: {'; '.join(wrong[:8])}{more}")


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not readable as safetensors ({error})") from None


def _read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    try:
        module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path}: not readable as GGUF ({error})") from None
    return module.config.to_dict(), {name: x.detach() for name, x in module.state_dict().items()}

"""`fcp export`: a training's checkpoint as a folder of Hugging Face's, which transformers loads.

    fcp export run OUT --checkpoint FOLDER                              # the newest whole checkpoint of the run
    fcp export run/checkpoints/step-00000042 OUT --checkpoint FOLDER --model models.llama --dtype bfloat16

A checkpoint has leaves with names; what model they are of, the folder says that the training began from: by its config.
Its tokenizer goes along. By default transformers' own class reads and writes the model; `--model` names a module with a
`load` and a `save`, whose names for the leaves may be its own.

OUT is written under another name and renamed, so that it is whole or not there.
"""

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fcp import checkpoint, huggingface, pytree
from fcp._cli_inputs import import_module
from fcp._training import checkpoint_at
from fcp._transformed import Transformed
from fcp.model import Model
from fcp.typing import Params

__all__ = ["add_export"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_export(commands: Any) -> None:
    """Adds the command to the parser's."""
    export = commands.add_parser("export", help="write a training's checkpoint for transformers", allow_abbrev=False)
    export.set_defaults(run=_export)
    add = export.add_argument
    add("saved", metavar="CHECKPOINT", help="a checkpoint; or a folder of several, or of a run: the newest whole one")
    add("out", metavar="OUT", help="the folder to write, which is not there yet")
    add("--checkpoint", required=True, metavar="PATH", help="a folder or .gguf file of the model that was trained")
    add("--model", metavar="MODULE", help="what reads and writes the model, as models.llama (transformers' own class)")
    add("--dtype", choices=DTYPES, help="of the parameters (as they are)")


def _export(args: argparse.Namespace) -> int:
    out, partial_out = Path(args.out), Path(args.out + ".partial")
    if out.exists():
        raise ValueError(f"{out}: it is there already; name a folder that is not")
    model, write = _model(args.model, Path(args.checkpoint))
    params = checkpoint.load_params(checkpoint_at(args.saved), Transformed(model, {}))
    if args.dtype is not None:
        params = pytree.map(lambda x: x.to(DTYPES[args.dtype]), params)
    shutil.rmtree(partial_out, ignore_errors=True)
    write(partial_out, params)
    try:
        huggingface.tokenizer(args.checkpoint).save_pretrained(str(partial_out))
        without = ""
    except ValueError as error:  # a model without a tokenizer is a model
        without = f"; without a tokenizer ({error})"
    partial_out.rename(out)
    leaves = pytree.leaves(params)
    dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in leaves}))
    print(f"{out}: {sum(x.numel() for x in leaves):,} parameters in {len(leaves)} leaves, {dtypes}{without}")
    return 0


def _model(module_name: str | None, path: Path) -> tuple[Model, Callable[[Path, Params], None]]:
    """The model of a folder or a GGUF file, and what writes parameters of it."""
    if module_name is None:
        model, _ = huggingface.functional(path)
        return model, lambda folder, params: huggingface.save(folder, model, params)
    module = import_module(module_name)
    lacking = [name for name in ("load", "save") if not callable(getattr(module, name, None))]
    if lacking:
        raise ValueError(f"{module_name}: this module has no {' and no '.join(lacking)}, so it cannot write the model")
    load = (
        module.load if path.suffix == ".gguf" else partial(module.load, lazy=True)
    )  # the config is all that is needed
    model, _ = load(path)
    return model, lambda folder, params: module.save(folder, model.config, params)

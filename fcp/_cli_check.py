"""`fcp check`: is a model, sharded, still the same function?

    fcp check models.llama:tiny --cp 2 --tp 2
    fcp check models.llama --checkpoint FOLDER --text FILE --packed --mesh cp=3,tp=3 --mesh cp=2
    torchrun --nproc-per-node 4 -m fcp check models.llama:tiny --cp 2 --tp 2 --distributed

It computes loss, logits and every gradient of a model function once alone and once for each mesh, and prints the
errors. Fresh parameters are shaken by noise, every leaf of them: a bias of zeros or a norm of ones hides what happens
to it. The exit status is 0 where all is equal and 1 where something differs.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fcp import data, pytree, tables
from fcp._cli_args import DTYPES, REMAT, SIZES, add_axes, add_ways, count, mesh, tolerance, ways
from fcp._cli_inputs import (
    batch_of,
    load_checkpoint,
    load_target,
    random_documents,
    row_lengths,
    shake,
    with_window,
)
from fcp._cli_ranks import add_ranks, ranks
from fcp._compare import report
from fcp._prepare import prepare
from fcp._transform import transform
from fcp._transformed import Transformed
from fcp._value_and_grad import value_and_grad
from fcp.model import Model
from fcp.typing import Inputs, Params

__all__ = ["add_check"]


def add_check(commands: Any) -> None:
    """Adds the command to the parser's."""
    check = commands.add_parser("check", help="compare a sharded model with itself unsharded", allow_abbrev=False)
    check.set_defaults(run=_check)
    add = check.add_argument
    add("target", metavar="TARGET", help="module:attribute, a Model or a function that makes one (models.llama:tiny)")
    add_axes(add)
    add_ways(add)
    add("--ep-plan", choices=("dispatch", "all_reduce"), default="dispatch", help="how tokens meet experts (dispatch)")
    add("--mesh", type=mesh, action="append", default=[], metavar="cp=N,tp=N", help="a whole mesh; may be repeated")
    add("--remat", choices=REMAT, default="nothing", help="what of each layer backward computes again (nothing)")
    add("--checkpoint", metavar="PATH", help="a folder or .gguf file that TARGET, a module, reads with its load()")
    add("--text", metavar="FILE", help="the tokens, instead of random ones: the checkpoint's, or bytes")
    add("--seq", type=count, default=64, metavar="N", help="tokens in a row (64)")
    add("--batch", type=count, metavar="N", help="rows (2, or as many as dp x fsdp needs)")
    add("--packed", action="store_true", help="several documents in a row")
    add("--pad", choices=("left", "right"), help="about a quarter of each row is padding, on this side")
    add("--window", type=count, metavar="N", help="sliding window of every layer, in keys")
    add("--dtype", choices=DTYPES, help="of the parameters (float64; float32 with --checkpoint)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters, tokens and documents (0)")
    add("--tolerance", type=tolerance, metavar="X", help="the largest relative error (by dtype)")
    add_ranks(add)
    add("--json", action="store_true", help="one JSON object in place of the tables")


def _check(args: argparse.Namespace) -> int:
    meshes = _meshes(args)
    dtype = DTYPES[args.dtype or ("float32" if args.checkpoint else "float64")]
    largest = max(mesh.get("cp", 1) for mesh in meshes)
    if args.seq < 2:
        raise ValueError(f"--seq {args.seq}: a row needs 2 tokens or more, since each predicts the next")
    if largest > args.seq:
        raise ValueError(
            f"cp={largest} is larger than the {args.seq} tokens of a row; give --seq {largest} or a lower cp"
        )
    text = None if args.text is None else data.read_text(args.text)
    with ranks("check", args.distributed, args.timeout, meshes) as found:
        return _check_on(found, args, meshes, dtype, text)


def _check_on(
    device_meshes: list[Any],
    args: argparse.Namespace,
    meshes: list[dict[str, int]],
    dtype: torch.dtype,
    text: str | None,
) -> int:
    with tables.steps(2 + len(meshes)) as step:
        with step(f"reading {_source(args)}"):
            model, make_params = _read(args, dtype)
            sharded = [
                transform(
                    model,
                    mesh=mesh,
                    ep_plan=args.ep_plan,
                    remat=args.remat,
                    **cast(Any, ways(args, sizes) if sizes.get("cp", 1) > 1 else sizes),
                )
                for mesh, sizes in zip(device_meshes, meshes, strict=True)
            ]
            inputs = prepare(_batch(args, _sizes(meshes, args.batch), model, text))
            params = make_params()
        if int(inputs.num_targets) == 0:
            raise ValueError("no token of this batch has a next one to predict; give a larger --seq")
        head = _head(args, params, inputs, dtype)
        if not args.json:
            tables.show(head)
        with step("the reference, unsharded"):
            started = time.perf_counter()
            expected, expected_grads = value_and_grad(model)(params, inputs)
            reference_seconds = time.perf_counter() - started
        found = []
        for fn in sharded:
            where = "" if fn.mesh is None else " on processes"
            title = f"{_axes(fn)}{where}: {' . '.join(reversed(fn.applied)) or 'as it is'}"
            with step(_axes(fn)):
                started = time.perf_counter()
                actual, grads = value_and_grad(fn)(params, inputs)
                seconds = time.perf_counter() - started
                result = report(expected, expected_grads, actual, grads, title=title)
            del actual, grads
            if args.tolerance is not None:
                result = dataclasses.replace(result, tolerance=args.tolerance)
            entry = {"mesh": dict(fn.axes), "applied": list(fn.applied), "seconds": seconds, **result.as_dict()}
            if fn.why:
                entry["why"] = fn.why
            found.append(entry)
            if not args.json:
                tables.show(tables.report_table(result))
                tables.show(tables.report_line(result, seconds=seconds, reference_seconds=reference_seconds))
                if fn.why:
                    tables.show(f"cp_impl auto: {fn.why}")
    equal = _on_every_rank(all(entry["ok"] for entry in found), args)
    if args.json:
        about = {"target": args.target, "checkpoint": args.checkpoint, "dtype": str(dtype).removeprefix("torch.")}
        batch = {"rows": inputs.positions.shape[0], "seq": args.seq, "num_targets": int(inputs.num_targets)}
        print(json.dumps({**about, **batch, "ok": equal, "reference_seconds": reference_seconds, "meshes": found}))
    return 0 if equal else 1


def _on_every_rank(equal: bool, args: argparse.Namespace) -> bool:
    """Whether all was equal on every rank; says which ranks found otherwise."""
    if not args.distributed:
        return equal
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, equal)
    differing = [rank for rank, fine in enumerate(found) if not fine]
    if differing:
        print(f"fcp: NOT EQUAL on the ranks {differing}", file=sys.stderr)
    return not differing


def _meshes(args: argparse.Namespace) -> list[dict[str, int]]:
    given = {axis: size for axis in SIZES if (size := getattr(args, axis)) is not None}
    if given and args.mesh:
        raise ValueError(f"--{next(iter(given))} and --mesh say the same; write the whole mesh as --mesh cp=2,tp=2")
    # Nothing said: the least that is a check.
    meshes = args.mesh or [given or ({"cp": 2} if args.remat == "nothing" else {})]
    asked = next((name for name in ("cp_impl", "ulysses", "layout") if getattr(args, name) is not None), None)
    if asked and all(sizes.get("cp", 1) == 1 for sizes in meshes):
        raise ValueError(f"--{asked.replace('_', '-')}: no mesh here has ranks of cp; give --cp 2, or leave it out")
    return meshes


def _sizes(meshes: list[dict[str, int]], batch: int | None) -> int:
    """The number of rows: what was asked for, else the least from 2 that every mesh divides."""
    needed = math.lcm(*(mesh.get("dp", 1) * mesh.get("fsdp", 1) for mesh in meshes))
    if batch is None:
        return needed if needed > 1 else 2
    if batch % needed:
        raise ValueError(
            f"--batch {batch}: dp x fsdp splits the rows; give a multiple of {needed} rows, or lower dp x fsdp"
        )
    return batch


def _source(args: argparse.Namespace) -> str:
    return Path(args.checkpoint).name or args.checkpoint if args.checkpoint else args.target


def _axes(fn: Transformed) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in fn.axes.items()) or "one rank"


def _head(args: argparse.Namespace, params: Params, inputs: Inputs, dtype: torch.dtype) -> str:
    leaves = pytree.leaves(params)
    count = sum(x.numel() for x in leaves)
    size = f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
    rows, seq = inputs.positions.shape
    said = [f"{rows} rows of {seq} {'tokens of ' + args.text if args.text else 'random tokens'}"]
    said += [f"{int(inputs.num_targets)} targets"]
    said += ["packed"] if args.packed else []
    said += [f"padded {args.pad}"] if args.pad else []
    said += [f"window {args.window}"] if args.window else []
    return (
        f"{_source(args)}: {size} parameters in {len(leaves)} leaves, "
        f"{str(dtype).removeprefix('torch.')}; {', '.join(said)}"
    )


def _read(args: argparse.Namespace, dtype: torch.dtype) -> tuple[Model, Callable[[], Params]]:
    """The model, and what gives its parameters: fresh ones are made only when all else was found to be right."""
    if args.checkpoint is not None:
        module, model, params = load_checkpoint(args.target, args.checkpoint, dtype)
        return with_window(module, model, args.window), lambda: params
    module, model = load_target(args.target)
    model = with_window(module, model, args.window)
    return model, lambda: shake(model.init(seed=args.seed, dtype=dtype), args.seed)


def _batch(args: argparse.Namespace, rows: int, model: Model, text: str | None) -> dict[str, Any]:
    vocab = getattr(model.config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise ValueError(f"{args.target}: its config has no vocab_size, so there is no telling which tokens it takes")
    lengths = row_lengths(rows, args.seq, args.pad is not None)
    if text is None:
        longest = max(args.seq // 2, 2) if args.packed else sum(lengths)
        documents = random_documents(sum(lengths), vocab, longest, args.seed)
    else:
        pieces = data.sections(text) if args.packed else [text.strip()]
        documents = data.tokens(pieces, args.checkpoint)
        largest, found = max(map(max, documents), default=0), sum(map(len, documents))
        if largest >= vocab:
            what = "a byte" if args.checkpoint is None else "an id"
            raise ValueError(
                f"--text {args.text}: a token outside the vocabulary: {what} of {largest}, and the model knows 0 to "
                f"{vocab - 1}; give another model, or leave --text out for random tokens"
            )
        if found < sum(lengths):
            raise ValueError(
                f"--text {args.text}: it has {found} tokens, and the batch takes {sum(lengths)}; lower --seq or --batch"
            )
    pad_token = getattr(model.config, "pad_token_id", None) or 0
    return batch_of(documents, lengths, seq=args.seq, packed=args.packed, pad=args.pad, pad_token=pad_token)

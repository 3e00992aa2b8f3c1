"""The command line: is a model, sharded, still the same function, and what does a mask look like?

    fcp check models.llama:tiny --cp 2 --tp 2
    fcp check models.llama --checkpoint FOLDER --text FILE --packed --mesh cp=3,tp=3 --mesh cp=2
    torchrun --nproc-per-node 4 -m fcp check models.llama:tiny --cp 2 --tp 2 --distributed
    fcp mask --documents 3,5 --window 3 --cp 2
    fcp models
    fcp export runs/a OUT --checkpoint FOLDER

`check` computes loss, logits and every gradient of a model function once alone and once for each mesh, and prints the
errors. The model is named by an import string, resolved from the working folder first; fcp ships no models. Fresh
parameters are shaken by noise, every leaf of them: a bias of zeros or a norm of ones hides what happens to it.

The exit status is 0 where all is equal, 1 where something differs, 2 where the question could not be asked; then one
line on standard error says why. Results go to standard output and nothing else does, so `--json` can be piped.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fcp import pytree, tables
from fcp._cli_export import add_export
from fcp._cli_inputs import (
    batch_of,
    load_checkpoint,
    load_target,
    paragraphs,
    random_documents,
    read_text,
    row_lengths,
    shake,
    text_documents,
    with_window,
)
from fcp._cli_models import add_models
from fcp._compare import report
from fcp._launch import process_group
from fcp._prepare import prepare
from fcp._transform import transform
from fcp._transformed import Transformed
from fcp._value_and_grad import value_and_grad
from fcp._watch import RankError
from fcp.model import Model
from fcp.typing import Inputs, Params

__all__ = ["main"]

AXES = ("dp", "fsdp", "cp", "tp")
SIZES = (*AXES, "ep")
"""What a mesh may say; ep has no ranks of its own."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST_PICTURE = 400


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    if sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except (ValueError, ImportError) as error:
        print(f"fcp: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"fcp: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # an interpreter that ends waits for what is stuck in the group


# --- arguments --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fcp", description=__doc__.split("\n")[0] if __doc__ else None, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="compare a sharded model with itself unsharded", allow_abbrev=False)
    check.set_defaults(run=_check)
    add = check.add_argument
    add("target", metavar="TARGET", help="module:attribute, a Model or a function that makes one (models.llama:tiny)")
    for axis, what in zip(AXES, ("rows", "rows, parameters in pieces", "the sequence", "each matrix"), strict=True):
        add(f"--{axis}", type=_count, metavar="N", help=f"ranks that split {what}")
    add("--ep", type=_count, metavar="N", help="of these ranks, how many share the experts")
    add("--ep-plan", choices=("dispatch", "all_reduce"), default="dispatch", help="how tokens meet experts (dispatch)")
    add("--mesh", type=_mesh, action="append", default=[], metavar="cp=N,tp=N", help="a whole mesh; may be repeated")
    add("--remat", action="store_true", help="recompute each layer in backward")
    add("--checkpoint", metavar="PATH", help="a folder or .gguf file that TARGET, a module, reads with its load()")
    add("--text", metavar="FILE", help="the tokens, instead of random ones: the checkpoint's, or bytes")
    add("--seq", type=_count, default=64, metavar="N", help="tokens in a row (64)")
    add("--batch", type=_count, metavar="N", help="rows (2, or as many as dp x fsdp needs)")
    add("--packed", action="store_true", help="several documents in a row")
    add("--pad", choices=("left", "right"), help="about a quarter of each row is padding, on this side")
    add("--window", type=_count, metavar="N", help="sliding window of every layer, in keys")
    add("--dtype", choices=DTYPES, help="of the parameters (float64; float32 with --checkpoint)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters, tokens and documents (0)")
    add("--tolerance", type=_tolerance, metavar="X", help="the largest relative error (by dtype)")
    add("--distributed", action="store_true", help="the ranks are the launcher's processes (torchrun), not simulated")
    add("--timeout", type=_seconds, default=600.0, metavar="S", help="seconds that a rank waits for another (600)")
    add("--json", action="store_true", help="one JSON object in place of the tables")

    mask = commands.add_parser("mask", help="draw who may attend to whom", allow_abbrev=False)
    mask.set_defaults(run=_mask)
    add = mask.add_argument
    rows = mask.add_mutually_exclusive_group()
    rows.add_argument("--seq", type=_count, metavar="N", help="one document of N tokens (8)")
    rows.add_argument("--positions", type=_integers, metavar="0,1,2,0,1", help="position ids; a restart is a document")
    rows.add_argument("--documents", type=_counts, metavar="3,5", help="the lengths of packed documents")
    add("--window", type=_count, metavar="N", help="sliding window, in keys")
    add("--chunk", type=_count, metavar="N", help="chunked attention, length of a chunk")
    add("--pad", type=_padding, metavar="left:N", help="add N padding tokens on the left or right")
    add("--cp", type=_count, default=1, metavar="N", help="mark the shard edges of N ranks")
    add_export(commands)
    add_models(commands)
    return parser


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers joined by commas, as 0,1,2,0,1") from None


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more, as 1e-6")
    return value


def _seconds(text: str) -> float:
    value = _tolerance(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0")
    return value


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} must be axis=ranks joined by commas, as cp=2,tp=2")
        if axis not in SIZES:
            raise argparse.ArgumentTypeError(f"unknown mesh axis {axis!r}; known are {', '.join(SIZES)}")
        if axis in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} names {axis} twice")
        sizes[axis] = _count(size)
    return sizes


def _padding(text: str) -> tuple[str, int]:
    side, _, count = text.partition(":")
    if side not in ("left", "right"):
        raise argparse.ArgumentTypeError(f"{text!r} must be left:N or right:N")
    return side, _count(count)


# --- fcp check --------------------------------------------------------------------------------------------------------


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
    text = None if args.text is None else read_text(args.text)
    with _ranks(args, meshes) as ranks:
        return _check_on(ranks, args, meshes, dtype, text)


def _check_on(
    ranks: list[Any], args: argparse.Namespace, meshes: list[dict[str, int]], dtype: torch.dtype, text: str | None
) -> int:
    with tables.steps(2 + len(meshes)) as step:
        with step(f"reading {_source(args)}"):
            model, make_params = _read(args, dtype)
            sharded = [
                transform(model, remat=args.remat, mesh=mesh, ep_plan=args.ep_plan, **cast(Any, sizes))
                for mesh, sizes in zip(ranks, meshes, strict=True)
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
            found.append(entry)
            if not args.json:
                tables.show(tables.report_table(result))
                tables.show(tables.report_line(result, seconds=seconds, reference_seconds=reference_seconds))
    equal = _on_every_rank(all(entry["ok"] for entry in found), args)
    if args.json:
        about = {"target": args.target, "checkpoint": args.checkpoint, "dtype": str(dtype).removeprefix("torch.")}
        batch = {"rows": inputs.positions.shape[0], "seq": args.seq, "num_targets": int(inputs.num_targets)}
        print(json.dumps({**about, **batch, "ok": equal, "reference_seconds": reference_seconds, "meshes": found}))
    return 0 if equal else 1


@contextlib.contextmanager
def _ranks(args: argparse.Namespace, meshes: list[dict[str, int]]) -> Iterator[list[Any]]:
    """A DeviceMesh for each mesh, on the processes of the launcher; None for each where ranks are simulated.

    One rank speaks; the others work in silence, but for what they refuse.
    """
    if not args.distributed:
        yield [None] * len(meshes)
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError("--distributed needs a launcher: torchrun --nproc-per-node N -m fcp check ... --distributed")
    world = int(os.environ["WORLD_SIZE"])
    wrong = [sizes for sizes in meshes if _ranks_of(sizes) != world or world == 1]
    with process_group(args.timeout, "gloo"):
        if wrong:
            dist.barrier()  # the launcher ends all ranks when the first has ended: let each be here to say why
            raise ValueError(
                f"--distributed: {wrong[0]} is a mesh of {_ranks_of(wrong[0])} ranks, and the launcher started "
                f"{world} processes; start as many as the mesh has ranks, 2 or more"
            )
        names = [tuple(axis for axis in AXES if axis in sizes) for sizes in meshes]
        shapes = [tuple(sizes[axis] for axis in order) for sizes, order in zip(meshes, names, strict=True)]
        made = [init_device_mesh("cpu", s, mesh_dim_names=n) for s, n in zip(shapes, names, strict=True)]
        with contextlib.ExitStack() as stack:
            if dist.get_rank():
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
                stack.enter_context(contextlib.redirect_stderr(silence))
            yield made


def _ranks_of(sizes: dict[str, int]) -> int:
    return math.prod(size for name, size in sizes.items() if name in AXES)


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
    return args.mesh or [given or ({} if args.remat else {"cp": 2})]


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
        documents = text_documents(paragraphs(text) if args.packed else [text.strip()], args.checkpoint)
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


# --- fcp mask ---------------------------------------------------------------------------------------------------------


def _mask(args: argparse.Namespace) -> int:
    batch: dict[str, Any] = {}
    if args.positions is not None:
        positions = args.positions
    elif args.documents is not None:
        positions = [position for length in args.documents for position in range(length)]
    else:
        positions = list(range(args.seq or 8))
    side, count = args.pad or ("right", 0)
    seq = len(positions) + count
    if args.cp > seq:
        raise ValueError(f"cp={args.cp} is larger than the {seq} tokens of the row; give a longer row or a lower cp")
    if seq > LARGEST_PICTURE:
        raise ValueError(f"a row of {seq} tokens makes no readable picture; give {LARGEST_PICTURE} or fewer")
    if args.positions is not None or args.documents is not None:
        padded = [0] * count + positions if side == "left" else positions + [0] * count
        batch["position_ids"] = torch.tensor([padded])
    if count:
        valid = [1] * len(positions)
        batch["attention_mask"] = torch.tensor([[0] * count + valid if side == "left" else valid + [0] * count])
    mask = prepare({"input_ids": torch.zeros(1, seq, dtype=torch.int64), **batch}).mask
    picture = tables.mask_picture(mask, window=args.window, chunk=args.chunk, ranks=args.cp)
    columns = tables.columns()
    if columns is not None and picture.width() > columns:
        raise ValueError(f"a row of {seq} tokens needs {picture.width()} columns, and this terminal has {columns}")
    tables.show(picture, width=None if columns else max(picture.width(2), 80))
    return 0

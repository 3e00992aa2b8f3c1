"""`fcp eval`: the perplexity of a text, the same on every mesh.

    fcp eval models.llama --checkpoint FOLDER --text FILE
    fcp eval models.llama --checkpoint FOLDER --text FILE --mesh cp=3,tp=3
    fcp eval models.llama --checkpoint FOLDER --text FILE --trained run

Perplexity is exp of the mean loss of a token: the losses of all tokens of the text are summed, and divided once by
their number. (A mean of the means of batches would depend on how the text was cut into batches.) Rows overlap by one
token, so each token but the first of a document is predicted once; what a row begins with is predicted from nothing
before the row. So the number depends on `--seq`, and on nothing else that is not the text's or the model's.

A router's auxiliary loss is no token's, and is left out.
"""

import argparse
import json
import math
import time
from typing import Any, cast

import torch

from fcp import checkpoint, data, tables
from fcp._cli_args import DTYPES, SIZES, add_axes, add_ways, count, mesh, ways
from fcp._cli_inputs import read_model
from fcp._cli_ranks import add_ranks, ranks
from fcp._prepare import prepare
from fcp._training import checkpoint_at
from fcp._transform import transform
from fcp._transformed import Transformed
from fcp.typing import Params

__all__ = ["add_eval", "token_loss"]


def add_eval(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("eval", help="the perplexity of a text", allow_abbrev=False)
    parser.set_defaults(run=_eval)
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:attribute, or the module that reads the checkpoint with its load()")
    add("--checkpoint", metavar="PATH", help="a folder or .gguf file; without one, parameters are fresh")
    add(
        "--trained",
        metavar="PATH",
        help="a checkpoint, or the folder of a run of fcp train: its parameters",
    )
    add("--text", required=True, metavar="PATH", help="a text file, or a folder of Hugging Face's datasets")
    add("--documents", choices=("sections", "whole"), default="sections", help="of a text file (sections)")
    add("--column", default="text", metavar="NAME", help="of a data set, the one with the documents (text)")
    add("--split", default="train", metavar="NAME", help="of a data set (train)")
    add("--seq", type=count, default=512, metavar="N", help="tokens in a row (512)")
    add("--batch", type=count, metavar="N", help="rows at a time (8, or as many as dp x fsdp needs)")
    add("--mesh", type=mesh, metavar="cp=N,tp=N", help="a whole mesh")
    add_axes(add)
    add_ways(add)
    add("--dtype", choices=DTYPES, default="float32", help="of the parameters (float32)")
    add("--seed", type=int, default=0, metavar="N", help="of fresh parameters (0)")
    add_ranks(add)
    add("--json", action="store_true", help="one JSON object in place of the line")


def token_loss(sharded: Transformed, shards: Params, packed: data.Packed, rows: int) -> tuple[float, int]:
    """The summed loss of all tokens of a text, and their number.

    Args:
        sharded: the transformed model.
        shards: what its `shard` gives.
        packed: the text's rows.
        rows: how many at a time, a multiple of the ranks that split rows.
    """
    total, number = 0.0, 0
    parts = math.prod(size for axis, size in sharded.axes.items() if axis.split("_")[0] in ("dp", "fsdp"))
    with torch.no_grad():
        for start in range(0, packed.num_rows, rows):
            left = min(rows, packed.num_rows - start)
            batch = packed.rows(range(start, start + -(-left // parts) * parts))  # filled up with rows of padding
            number += int(prepare(batch).num_targets)
            out = sharded.on_shards(shards, {**batch, "num_items_in_batch": 1})  # divided by 1: the sum
            loss = float(out.loss)
            if "auxiliary_loss" in (out.statistics or {}):  # sum / n + auxiliary: two n tell them apart
                loss = 2 * (loss - float(sharded.on_shards(shards, {**batch, "num_items_in_batch": 2}).loss))
            total += loss
    return total, number


def _eval(args: argparse.Namespace) -> int:
    given = {axis: size for axis in SIZES if (size := getattr(args, axis)) is not None}
    if given and args.mesh:
        raise ValueError(f"--{next(iter(given))} and --mesh say the same; write the whole mesh as --mesh cp=2,tp=2")
    sizes = args.mesh or given
    if args.seq < 2 or sizes.get("cp", 1) > args.seq:
        raise ValueError(f"--seq {args.seq}: a row needs 2 tokens or more, and as many as cp has ranks")
    parts = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    rows = args.batch or -(-8 // parts) * parts
    if rows % parts:
        raise ValueError(f"--batch {rows}: dp x fsdp splits the rows; give a multiple of {parts} rows")
    with ranks("eval", args.distributed, args.timeout, [sizes]) as (device_mesh,):
        _eval_on(device_mesh, args, sizes, rows)
    return 0


def _eval_on(device_mesh: Any, args: argparse.Namespace, sizes: dict[str, int], rows: int) -> None:
    documents = data.read(
        args.text, checkpoint=args.checkpoint, documents=args.documents, column=args.column, split=args.split
    )
    model, make_params = read_model(
        args.target, args.checkpoint, DTYPES[args.dtype], args.seed, lazy=device_mesh is not None
    )
    data.check_vocabulary(documents, model, args.text)
    sharded = transform(model, mesh=device_mesh, logits=False, **cast(Any, ways(args, sizes)))
    packed = data.pack(documents, seq=args.seq, batch=rows, shuffle=False, overlap=1)
    trained = None if args.trained is None else checkpoint_at(args.trained)
    shards = sharded.shard(make_params()) if trained is None else checkpoint.load_params(trained, sharded)
    del make_params  # it may hold the whole model
    started = time.perf_counter()
    total, number = token_loss(sharded, shards, packed, rows)
    seconds = time.perf_counter() - started
    if number == 0:
        raise ValueError(f"{args.text}: no token of it has one before it to be predicted from")
    loss = total / number
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if args.json:
        about = {"target": args.target, "checkpoint": args.checkpoint, "text": args.text, "dtype": args.dtype}
        found = {"mesh": dict(sharded.axes), "seq": args.seq, "rows": packed.num_rows, "num_targets": number}
        print(json.dumps({**about, **found, "loss": loss, "perplexity": perplexity, "seconds": seconds}))
        return
    where = ", ".join(f"{axis}={size}" for axis, size in sharded.axes.items()) or "one rank"
    tables.show(
        f"perplexity {perplexity:.4f} (loss {loss:.6f}) of {number:,} tokens in {packed.num_rows} rows of {args.seq}; "
        f"{where}, {args.dtype}, {seconds:.1f} s"
    )

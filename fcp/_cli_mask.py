"""`fcp mask`: draws who may attend to whom.

    fcp mask --documents 3,5 --window 3 --cp 2

The mask is the library's own: the words become a batch, `prepare` describes its mask, and the picture is drawn from
that description, with the shard edges of `cp` ranks. What would not be readable is refused: a row of more than 400
tokens, or one that is wider than the terminal.
"""

import argparse
from typing import Any

import torch

from fcp import tables
from fcp._cli_args import count, counts, integers, padding
from fcp._prepare import prepare

__all__ = ["add_mask"]

LARGEST_PICTURE = 400


def add_mask(commands: Any) -> None:
    """Adds the command to the parser's."""
    mask = commands.add_parser("mask", help="draw who may attend to whom", allow_abbrev=False)
    mask.set_defaults(run=_mask)
    add = mask.add_argument
    rows = mask.add_mutually_exclusive_group()
    rows.add_argument("--seq", type=count, metavar="N", help="one document of N tokens (8)")
    rows.add_argument("--positions", type=integers, metavar="0,1,2,0,1", help="position ids; a restart is a document")
    rows.add_argument("--documents", type=counts, metavar="3,5", help="the lengths of packed documents")
    add("--window", type=count, metavar="N", help="sliding window, in keys")
    add("--chunk", type=count, metavar="N", help="chunked attention, length of a chunk")
    add("--pad", type=padding, metavar="left:N", help="add N padding tokens on the left or right")
    add("--cp", type=count, default=1, metavar="N", help="mark the shard edges of N ranks")


def _mask(args: argparse.Namespace) -> int:
    batch: dict[str, Any] = {}
    if args.positions is not None:
        positions = args.positions
    elif args.documents is not None:
        positions = [position for length in args.documents for position in range(length)]
    else:
        positions = list(range(args.seq or 8))
    side, added = args.pad or ("right", 0)
    seq = len(positions) + added
    if args.cp > seq:
        raise ValueError(f"cp={args.cp} is larger than the {seq} tokens of the row; give a longer row or a lower cp")
    if seq > LARGEST_PICTURE:
        raise ValueError(f"a row of {seq} tokens makes no readable picture; give {LARGEST_PICTURE} or fewer")
    if args.positions is not None or args.documents is not None:
        padded = [0] * added + positions if side == "left" else positions + [0] * added
        batch["position_ids"] = torch.tensor([padded])
    if added:
        valid = [1] * len(positions)
        batch["attention_mask"] = torch.tensor([[0] * added + valid if side == "left" else valid + [0] * added])
    mask = prepare({"input_ids": torch.zeros(1, seq, dtype=torch.int64), **batch}).mask
    picture = tables.mask_picture(mask, window=args.window, chunk=args.chunk, ranks=args.cp)
    columns = tables.columns()
    if columns is not None and picture.width() > columns:
        raise ValueError(f"a row of {seq} tokens needs {picture.width()} columns, and this terminal has {columns}")
    tables.show(picture, width=None if columns else max(picture.width(2), 80))
    return 0

"""`fcp models`: which causal language models of transformers are proven, and why the others are refused.

    fcp models                     every model type
    fcp models llama mamba --json

It prints what the sweep over all model types found (`fcp/testing/_support.py`), with the version of transformers that
it ran with; nothing is computed here.
"""

import argparse
import json
from typing import Any

from fcp import tables
from fcp.testing._support import COLUMNS, counts, is_proven, plain, read

__all__ = ["add_models"]


def add_models(commands: Any) -> None:
    """Adds the command to the parser's."""
    models = commands.add_parser("models", help="which models of transformers are proven", allow_abbrev=False)
    models.set_defaults(run=_models)
    models.add_argument("types", nargs="*", metavar="TYPE", help="model types, as config.json names them (all)")
    models.add_argument("--json", action="store_true", help="one JSON object in place of the table")


def _models(args: argparse.Namespace) -> int:
    support = read()
    unknown = [name for name in args.types if name not in support["types"]]
    if unknown:
        raise ValueError(
            f"models: {', '.join(unknown)}: no causal language model type of transformers {support['transformers']}"
        )
    types = {name: cells for name, cells in support["types"].items() if not args.types or name in args.types}
    if args.json:
        print(json.dumps({**support, "types": types}))
        return 0
    rows = []
    for name, cells in types.items():
        marks = ["yes" if is_proven(said) else "" for said in cells.values()]
        why = next((plain(said) for said in (cells["cp"], cells["packed"]) if not is_proven(said)), "")
        rows.append([name, *marks, why])
    tables.show(tables.grid([*("model type", *COLUMNS), "refused, or not constructible"], rows))
    found = counts({**support, "types": types})
    print(", ".join(f"{name}: {number} of {len(types)}" for name, number in sorted(found.items())))
    print(f"transformers {support['transformers']}; `yes` is proven, in float64 at 1e-8: loss, logits, every gradient")
    return 0

"""The command line: `fcp check`, `fcp mask`, `fcp models`, `fcp train`, `fcp eval`, `fcp plot`, `fcp export`.

This file is the door: it reads the words, calls the command, and turns what is refused into a line and a status. Each
command is a file of its own (`_cli_check.py`, ...), which says what it does. A model is named by an import string,
resolved from the working folder first; fcp ships no models.

The exit status is 0 where a command has done its work, 1 where a check found that something differs, 2 where the
question could not be asked; then one line on standard error says why. Results go to standard output and nothing else
does, so `--json` can be piped.
"""

import os
import sys
from collections.abc import Sequence

from fcp._cli_args import Parser
from fcp._cli_check import add_check
from fcp._cli_eval import add_eval
from fcp._cli_export import add_export
from fcp._cli_mask import add_mask
from fcp._cli_models import add_models
from fcp._cli_plot import add_plot
from fcp._cli_train import add_train
from fcp._watch import RankError

__all__ = ["main"]


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


def _parser() -> Parser:
    parser = Parser(
        prog="fcp", description="Functional context parallelism: check, train and look.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_check, add_mask, add_models, add_train, add_eval, add_plot, add_export):
        add(commands)
    return parser

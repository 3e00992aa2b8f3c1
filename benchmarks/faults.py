"""What happens when a rank fails: seconds until the others had failed and all had ended, and what they said.

The claim: within 10 seconds of a raise or a death, and within the timeout of a stall, every other rank has failed, each
with an error that names the rank and the collective; and no process is left. (Collectives of the default group, a
checkpoint's and the agreement of all ranks, wait for all of the timeout.)

    python benchmarks/faults.py
"""

import sys
import tempfile
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fcp.tables import show
from tests.distributed.faults import FAULTS, PROCESSES, TIMEOUT, inject


def main() -> None:
    table = Table(title=f"A fault in one of {PROCESSES} ranks (timeout {TIMEOUT:.0f} s)")
    for name in ("fault", "in", "rank", "others failed", "all ended", "left", "what another rank said"):
        table.add_column(name)
    for kind, place, rank in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            seen = inject(kind, place, rank, Path(folder))
        said = next(iter(seen.said.values()))
        table.add_row(kind, place, str(rank), f"{seen.others:.1f}", f"{seen.seconds:.1f}", str(len(seen.left)), said)
    show(table)


if __name__ == "__main__":
    main()

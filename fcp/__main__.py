"""`python -m fcp`."""

import sys

from fcp.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m dtrcompile``."""

import sys

from dtrcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())

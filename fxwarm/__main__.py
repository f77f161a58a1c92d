"""``python -m fxwarm`` is the command line."""

import sys

from fxwarm.cli import main

if __name__ == "__main__":
    sys.exit(main())

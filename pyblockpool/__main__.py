"""``python -m pyblockpool``."""

import sys

from pyblockpool.cli import main

if __name__ == "__main__":
    sys.exit(main())

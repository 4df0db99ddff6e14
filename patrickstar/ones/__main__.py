"""``python -m patrickstar.ones``: the same as ``patrickstar ones``."""

import sys

from patrickstar.command.ones import main

if __name__ == "__main__":
    sys.exit(main())

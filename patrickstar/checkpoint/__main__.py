"""``python -m patrickstar.checkpoint``: the same as ``patrickstar checkpoint``."""

import sys

from patrickstar.command.checkpoints import main

if __name__ == "__main__":
    sys.exit(main())

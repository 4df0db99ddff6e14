"""``python -m patrickstar``: the command ``patrickstar``."""

import sys

from patrickstar.command.main import main

if __name__ == "__main__":
    sys.exit(main())

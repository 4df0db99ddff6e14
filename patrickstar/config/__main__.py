"""``python -m patrickstar.config``: the same as ``patrickstar config``."""

import sys

from patrickstar.command.config_file import main

if __name__ == "__main__":
    sys.exit(main())

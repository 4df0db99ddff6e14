"""Runs a user's script within this process, as ``python script.py`` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Runs the script as ``python script.py`` would; returns its exit status. Exceptions propagate."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    return 0

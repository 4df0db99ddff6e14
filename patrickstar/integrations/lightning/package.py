"""Selects Lightning's package: ``lightning.pytorch``, or ``pytorch_lightning`` if the script uses that one."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _find() -> ModuleType:
    in_use = [name for name in _NAMES if name in sys.modules]
    for name in in_use or _NAMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ImportError(
        "patrickstar.integrations.lightning needs Lightning, which is not installed; "
        "in a clone, pip install '.[lightning]'"
    )


pl = _find()
"""The package of Lightning that all of this integration uses."""

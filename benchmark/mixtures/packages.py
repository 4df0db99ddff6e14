"""Modules of packages whose own files need more than the module does."""

from __future__ import annotations

import importlib.util
import sys
import types


def pass_over(package: str) -> None:
    """Imports ``package`` and those above it without running their files.

    Raises:
        ModuleNotFoundError: the first of them is not installed.
    """
    top, *names = package.split(".")
    found = importlib.util.find_spec(top)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{top}'")
    folder, name = found.submodule_search_locations[0], top
    _register(name, folder)
    for following in names:
        folder, name = f"{folder}/{following}", f"{name}.{following}"
        _register(name, folder)


def _register(name: str, folder: str) -> None:
    sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [folder]

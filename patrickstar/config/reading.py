"""Reads a configuration's dict from a dict or a file."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_LEVELS = 32


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Mapping[Any, Any]:
    """The dict; None gives an empty one. A file contains JSON, or Hjson or JSON5 if a reader is installed.

    Raises:
        ValueError: it is no dict.
    """
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        config = _read_file(Path(config))
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config is a {type(config).__name__}; give a dict, the path of a JSON file, or None for the defaults"
        )
    _check_depth(config)
    return config


def _check_depth(config: Mapping[Any, Any]) -> None:
    """Limits nesting, so that later code may recurse."""
    # by identity, the depth already searched; an object is searched again only at a greater depth
    at_depth: dict[int, int] = {}
    rest: list[tuple[Any, int]] = [(config, 1)]
    while rest:
        value, depth = rest.pop()
        if depth > _MOST_LEVELS:
            raise ValueError(
                f"config contains itself, or is nested in more than {_MOST_LEVELS} levels; its sections are dicts of "
                "plain values, three deep at most"
            )
        if isinstance(value, (Mapping, list, tuple)) and at_depth.get(id(value), 0) < depth:
            at_depth[id(value)] = depth
            rest += [(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value)]


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"config is {str(path)!r}, which cannot be read: {error}") from error
    if not text.strip():  # Hjson would read it as the defaults
        raise ValueError(f"{path} is empty; give the keys of docs/config.md as JSON, or no file for the defaults")
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        return _read_lenient(path, text, error)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; give the keys of docs/config.md as JSON") from error


def _read_lenient(path: Path, text: str, error: json.JSONDecodeError) -> Any:
    """Reads comments and trailing commas, which DeepSpeed's reader allows."""
    for name in ("hjson", "json5"):
        try:
            package = importlib.import_module(name)
        except ImportError:
            continue
        try:
            return package.loads(text, object_pairs_hook=_no_key_twice)
        except Exception as other:  # each package has errors of its own
            raise ValueError(f"{path} is neither JSON ({error}) nor what {name} reads: {other}") from other
    raise ValueError(
        f"{path} is not JSON: {error}; take out comments and trailing commas, or pip install hjson, which reads them"
    ) from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice; give each key once")
    return dict(pairs)

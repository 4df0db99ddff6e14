"""``patrickstar config``: checks a configuration file, and prints the JSON Schema for editors."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from patrickstar.command.flags import CommandParser, run_reporting, words_after

_ENTRY_POINTS = {"initialize_engine": "PATRICKSTAR", "initialize": "DEEPSPEED"}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.config") -> int:
    """Returns the exit status: 0; 1 for a configuration with problems; 2 for a wrong argument."""
    parser = CommandParser(prog, "What a configuration file may have, and whether one is right.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,schema}")
    check = commands.add_parser("check", help="say what is wrong in a file, and which keys have no effect")
    check.add_argument("file", type=Path, help="a JSON file with keys of docs/config.md")
    check.add_argument(
        "--for", dest="entry", choices=_ENTRY_POINTS, default="initialize_engine", help="the call that it is given to"
    )
    check.add_argument("--json", action="store_true", help="print JSON: the keys that differ from the defaults")
    check.set_defaults(run=_check)
    commands.add_parser("schema", help="print the JSON Schema, for editors").set_defaults(run=_schema)
    words = words_after(arguments)
    options = parser.parse_args(["schema"] if words == ["--json-schema"] else words)  # an earlier spelling
    return run_reporting(prog, functools.partial(options.run, options))


def _schema(_options: argparse.Namespace) -> int:
    from patrickstar.config.editor_schema import make_json_schema

    print(json.dumps(make_json_schema(), indent=1))
    return 0


def _check(options: argparse.Namespace) -> int:
    from patrickstar.config import Dialect, parse_config
    from patrickstar.config.fates import Action
    from patrickstar.config.keys import set_keys

    if not options.file.is_file():
        raise ValueError(f"there is no file {options.file}; give the path of a JSON file")
    dialect = Dialect[_ENTRY_POINTS[options.entry]]
    try:
        config = parse_config(options.file, dialect)
    except ValueError as problems:
        if options.json:
            print(json.dumps({"right": False, "problems": str(problems)}))
        else:
            print(f"{options.file}: {problems}", file=sys.stderr)
        return 1
    idle = [key.path for key, _ in set_keys(config) if key.fate is not None and key.fate.action is Action.NO_EFFECT]
    values = dict(_differences(config, parse_config(None, dialect)))
    if options.json:
        print(json.dumps({"right": True, "keys": values, "without_effect": idle}, indent=1))
        return 0
    print(f"{options.file}: right; {len(values)} keys differ from the defaults")
    for path, value in values.items():
        print(f"  {path} = {json.dumps(value)}" + ("   has no effect" if path in idle else ""))
    return 0


def _differences(section: Any, default: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and JSON values of a parsed section that differ from ``default``. ``default`` is None if the
    section is absent by default.
    """
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(default, name, None)
        if hasattr(type(value), "model_fields"):
            yield from _differences(value, usual, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """Returns a configuration value in JSON types."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    value = getattr(value, "value", value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""Settings of a run in a YAML file, whose keys are the names of flags.

    model: models/llama
    data: chat.jsonl
    method: lora
    lr: 1e-4

A file becomes the flags that it stands for, before those of the command line. So both have the same types and errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from patrickstar.command.flags import UsageError
from patrickstar.finetune.flags import Parser


def read_settings(path: Path, parser: Parser) -> tuple[list[str], list[str]]:
    """Returns the words of a command line that says the same as a file, and the mistakes in the file.

    Raises:
        UsageError: the file cannot be read or is no YAML mapping, or PyYAML is missing.
    """
    words: list[str] = []
    mistakes: list[str] = []
    lines: dict[str, int] = {}
    for key, value, line in _entries(path):
        origin = f"{path}:{line}: "
        flag = f"--{str(key).replace('_', '-')}"
        action = parser.named(flag)
        if action is not None and action.dest in ("help", "config"):
            mistakes.append(f"{origin}{key} is for the command line alone")
            continue
        if action is None:
            mistakes.append(f"{origin}there is no key {key}{parser.meant(flag).replace('--', '', 1)}")
            continue
        if action.dest in lines:
            mistakes.append(f"{origin}{key} is in line {lines[action.dest]} too; give it once")
            continue
        lines[action.dest] = line
        try:
            said = _words(flag, action, value)
        except ValueError as error:
            mistakes.append(f"{origin}{error}")
            continue
        mistakes += [f"{origin}{mistake}" for mistake in parser.parse_with_mistakes(said)[1]]
        words += said
    return words, mistakes


def _entries(path: Path) -> list[tuple[Any, Any, int]]:
    """The keys of a file with their values and lines, from 1."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError("--config needs PyYAML: pip install pyyaml") from error
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"--config {path} has no keys; a line is, for example, lr: 1e-4")
        return [
            (loader.construct_object(key, True), loader.construct_object(value, True), key.start_mark.line + 1)
            for key, value in node.value
        ]
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read ({error.strerror}); give a YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is no UTF-8 (byte {error.start}); give a YAML file") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path} is no YAML: {error}") from error


def _words(flag: str, action: argparse.Action, value: Any) -> list[str]:
    """The words of a command line for one key; none for a key without value and for a switch that is off.

    Raises:
        ValueError: the flag takes no such value.
    """
    if value is None:
        return []
    name = flag.removeprefix("--")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {_shown(value)}; give true or false")
        off = f"--no-{name}"
        return [flag] if value else [off] if off in action.option_strings else []
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{name} is {_shown(value)}; give one value")
    return [f"{flag}={value}"]


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)

"""Normalises a user's dict before validation: one spelling for each key, and no ``"auto"``.

``"auto"`` marks a value that an integration fills in, such as Hugging Face's ``Trainer``. Remaining ones get the
default.
"""

from __future__ import annotations

import copy
import enum
import typing
from collections.abc import Mapping
from typing import Any

from patrickstar.config.keys import Key, keys_of, section_for
from patrickstar.config.root import Config
from patrickstar.config.shown import key_text
from patrickstar.config.values import Section

AUTO = "auto"
_COMMENTS = ("_", "//")


def auto_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted keys whose value is ``"auto"``."""
    return tuple(path for path, value in _leaves(config, "") if isinstance(value, str) and value == AUTO)


def fill_auto(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` in which keys with the value ``"auto"`` get their value from ``values``, which has dotted
    keys. Keys that ``values`` lacks, or has as None, stay ``"auto"``.
    """
    filled = copy.deepcopy(dict(config))
    for path in auto_keys(config):
        if values.get(path) is not None:
            *sections, name = path.split(".")
            place = filled
            for section in sections:
                place = place[section]
            place[name] = values[path]
    return filled


def one_spelling(
    values: Mapping[Any, Any], problems: list[str], model: type[Section] = Config, section: str = ""
) -> dict[str, Any]:
    """A copy with each key by its first name, without ``"auto"``, sections that are None, and comments (keys that begin
    with an underscore or ``//``). Conflicts are appended to ``problems``; unknown keys stay.
    """
    names = {name: name if isinstance(name, str) else key_text(name) for name in values}
    result = {names[name]: value for name, value in values.items() if not names[name].startswith(_COMMENTS)}
    for key in keys_of(model, section):
        given = [name for name in (key.name, *key.spellings) if name in result]
        if not given:
            continue
        if len(given) > 1:
            problems.append(f"{' and '.join(given)} of {section or 'the configuration'} are one key; give one of them")
        value = [result.pop(name) for name in given][0]
        inner = section_for(key, value)
        if inner is not None:
            result[key.name] = one_spelling(value, problems, inner, key.path)
        elif not _is_left_out(key, value):
            result[key.name] = value
    return result


def _is_left_out(key: Key, value: Any) -> bool:
    return (value is None and bool(key.sections)) or (isinstance(value, str) and value == AUTO and not _has_auto(key))


def _has_auto(key: Key) -> bool:
    """True if ``"auto"`` is one of the key's own values."""
    kinds = (key.field.annotation, *typing.get_args(key.field.annotation))
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    return any(member.value == AUTO for kind in enums for member in kind)


def _leaves(config: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in config.items():
        path = f"{section}{name}"
        leaves += _leaves(value, path + ".") if isinstance(value, Mapping) else [(path, value)]
    return leaves

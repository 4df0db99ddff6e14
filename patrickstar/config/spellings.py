"""A user's dict, before it is checked: one spelling for each key, and without ``"auto"``.

``"auto"`` stands for a value that whoever wrote the configuration leaves to an integration, as Hugging Face's
``Trainer`` does. What nobody filled in gets the default.
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
    """A copy of ``config`` in which keys whose value is ``"auto"`` have that of ``values``, which has dotted keys.

    A key that ``values`` has not, or has as None, stays ``"auto"``; one that is not ``"auto"`` stays as it is.
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
    """A copy with each key by its first name, without ``"auto"``, sections that are None, and comments: keys that begin
    with an underscore or ``//``.

    What cannot be is appended to ``problems``; what is no known key stays as it is.
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
    """Whether ``"auto"`` is a value of the key's own."""
    kinds = (key.field.annotation, *typing.get_args(key.field.annotation))
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    return any(member.value == AUTO for kind in enums for member in kind)


def _leaves(config: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in config.items():
        path = f"{section}{name}"
        leaves += _leaves(value, path + ".") if isinstance(value, Mapping) else [(path, value)]
    return leaves

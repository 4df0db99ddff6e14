"""The fate of each key, declared beside its type: ``Annotated[bool, HONOURED]`` in a model, words in other_keys.md.

The validation, the log line about keys without effect and the table in docs/config.md read it from there.

A DeepSpeed key that only affects speed or memory in DeepSpeed's design has no effect here: results are unchanged, and
the reason says what is done instead. A key whose user would miss something (other numbers, a memory tier, an output) is
refused, and the text says what to do instead.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from patrickstar.config.values import unexpected


class Action(enum.Enum):
    """Kinds of fates."""

    HONOURED = "honoured"
    """The key does what it says."""
    MAPPED = "mapped"
    """The key changes another key, which is then honoured."""
    NO_EFFECT = "no effect"
    """The key is accepted; a log line names it if it is not the default."""
    REFUSED = "refused"
    """Only values that request nothing are accepted; others are errors."""


class Reader(enum.Enum):
    """The only entry point that acts on a key or a section; without it, both do."""

    INITIALIZE = "patrickstar.initialize"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fate:
    """The fate of one key."""

    action: Action
    text: str = ""
    """MAPPED: how. NO_EFFECT: what is done instead. REFUSED: why, and what to do instead."""
    target: str = ""
    """MAPPED: the dotted key that changes."""
    only: tuple[Any, ...] | None = None
    """The accepted values; None: all of the type."""
    accepts: Callable[[Any], bool] | None = None
    """Replaces ``only`` if accepted values cannot be listed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Makes pydantic refuse unaccepted values with this key's text."""
        schema = handler(source)
        return (
            core_schema.no_info_after_validator_function(self._check, schema)
            if self.action is Action.REFUSED
            else schema
        )

    def _check(self, value: Any) -> Any:
        accepted = self.accepts(value) if self.accepts is not None else is_one_of(value, self.only or ())
        if not accepted:
            raise unexpected(self.text)
        return value


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Tests whether a user's value is one of ``choices``. Values of other types, such as arrays, are never compared."""
    return (value is None or isinstance(value, (bool, int, float, str, enum.Enum))) and value in choices


HONOURED = Fate(action=Action.HONOURED)


def mapped(target: str, how: str) -> Fate:
    """The key changes ``target``; ``how`` describes the change."""
    return Fate(action=Action.MAPPED, target=target, text=how)


def no_effect(why: str) -> Fate:
    """The key is accepted; ``why`` says what is done instead."""
    return Fate(action=Action.NO_EFFECT, text=why)


def refused(why: str, *, only: tuple[Any, ...] = (False,)) -> Fate:
    """The key is accepted only with the values ``only``, which request nothing; ``why`` says what to do instead."""
    return Fate(action=Action.REFUSED, text=why, only=only)


def refused_section(why: str) -> Fate:
    """:func:`refused` for a section without keys of its own here: nothing in it may be enabled."""
    return Fate(action=Action.REFUSED, text=why, accepts=_asks_for_nothing)


def _asks_for_nothing(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return is_one_of(value, (None, False))
    switches = list(_switches(value))
    return not value or (bool(switches) and not any(switches))


def _switches(value: Mapping[str, Any]) -> list[bool]:
    found = [not is_one_of(value["enabled"], (None, False, 0, ""))] if "enabled" in value else []
    for inner in value.values():
        if isinstance(inner, Mapping):
            found += _switches(inner)
    return found


@dataclasses.dataclass(frozen=True)
class OtherSpelling:
    """A further name of a key, used by existing configurations."""

    name: str

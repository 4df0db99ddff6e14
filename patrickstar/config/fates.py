"""What happens to a key, in a small vocabulary that stands beside its type: ``Annotated[bool, HONOURED]`` in a model,
words in the table of keys that have no effect or are refused (other_keys.md).

The check of a configuration, the line that names what was accepted without effect, and the table in docs/config.md all
read it from there.

A key that would only make things faster or smaller in the way another system is built has no effect here: numbers stay
the same, and the reason says what is done instead. A key whose user would miss something (other numbers, a tier of
memory, an output) is refused, with what to do instead.
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
    """What happens to a key."""

    HONOURED = "honoured"
    """It does what it says."""
    MAPPED = "mapped"
    """It changes another key, which is then honoured."""
    NO_EFFECT = "no effect"
    """It is accepted, and named in one line of the log when it is not the default."""
    REFUSED = "refused"
    """It is accepted with a value that asks for nothing; every other one is an error."""


class Reader(enum.Enum):
    """Which entry points act on a key or a section, where these are not both of them."""

    INITIALIZE = "patrickstar.initialize"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fate:
    """What happens to one key."""

    action: Action
    text: str = ""
    """MAPPED: how. NO_EFFECT: what is done instead. REFUSED: why, and what to do instead."""
    target: str = ""
    """MAPPED: the dotted key that changes."""
    only: tuple[Any, ...] | None = None
    """The values that are accepted; None: all of the type."""
    accepts: Callable[[Any], bool] | None = None
    """Instead of ``only``, where accepted values cannot be listed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lets pydantic refuse what is not accepted, in this key's own words."""
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
    """Whether a user's value is one of these plain ones. Anything may be given: arrays, which are not compared so."""
    return (value is None or isinstance(value, (bool, int, float, str, enum.Enum))) and value in choices


HONOURED = Fate(action=Action.HONOURED)


def mapped(target: str, how: str) -> Fate:
    """The key changes ``target``; ``how`` says what from what."""
    return Fate(action=Action.MAPPED, target=target, text=how)


def no_effect(why: str) -> Fate:
    """The key is accepted; ``why`` says what is done instead."""
    return Fate(action=Action.NO_EFFECT, text=why)


def refused(why: str, *, only: tuple[Any, ...] = (False,)) -> Fate:
    """The key is accepted with the values ``only``, which ask for nothing; ``why`` says what to do instead."""
    return Fate(action=Action.REFUSED, text=why, only=only)


def refused_section(why: str) -> Fate:
    """As :func:`refused`, for a section without keys of its own here: nothing in it may be switched on."""
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
    """A further name of a key, which configurations in the wild use."""

    name: str

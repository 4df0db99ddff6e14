"""Validates a user's dict or file into a :class:`Config`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from patrickstar.config.checks import find_conflicts
from patrickstar.config.dialects import Dialect, resolve, with_defaults
from patrickstar.config.fates import Action, is_one_of
from patrickstar.config.keys import Key, keys_of, set_keys
from patrickstar.config.messages import describe, join, unknown_at_top, wrong_entry_point
from patrickstar.config.reading import read_config
from patrickstar.config.root import Config
from patrickstar.config.spellings import auto_keys, one_spelling

logger = logging.getLogger("patrickstar")

_TOTAL_STEPS = "scheduler.params.total_num_steps"


def parse_config(
    config: Mapping[str, Any] | Config | str | os.PathLike[str] | None, dialect: Dialect = Dialect.PATRICKSTAR
) -> Config:
    """Validates a configuration.

    Args:
        config: a dict, the path of a JSON file, or None for the defaults. Values of ``"auto"`` count as missing. A
            :class:`Config` is returned unchanged.
        dialect: the entry point, which decides on some defaults, and whether an unknown key at top level is refused or
            only warned of.

    Raises:
        ValueError: unknown keys (with the most similar known ones), wrong types, or impossible values: all of them, one
            line each.
    """
    if isinstance(config, Config):
        return config
    given = read_config(config)
    problems: list[str] = []
    values = one_spelling(given, problems)
    if dialect is Dialect.PATRICKSTAR:
        problems += _for_the_other(values)
    elif dialect is Dialect.DEEPSPEED:
        values = _without_unknown(values)
    try:
        parsed = Config.model_validate(with_defaults(values, dialect))
    except ValidationError as error:
        problems += _lines_of(error)
        raise ValueError(join(problems)) from None
    parsed = resolve(parsed)
    problems += find_conflicts(parsed)
    if _lacks_total_steps(parsed) and _TOTAL_STEPS not in auto_keys(given):
        problems.append(f"{_TOTAL_STEPS} is missing; give the number of steps of the whole run")
    if problems:
        raise ValueError(join(problems))
    return parsed


def _without_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without unknown keys at top level, after a warning that names them."""
    unknown = [name for name in values if name not in Config.model_fields]
    if unknown:
        logger.warning("unknown keys without effect, as in DeepSpeed: %s", ", ".join(map(unknown_at_top, unknown)))
    return {name: value for name, value in values.items() if name in Config.model_fields}


def _lines_of(error: ValidationError) -> list[str]:
    """One line for each of pydantic's errors, without those about options of a refused optimizer."""
    errors = error.errors(include_url=False)
    if any(item["loc"] == ("optimizer", "type") for item in errors):
        errors = [item for item in errors if item["loc"][:2] != ("optimizer", "params")]
    return [describe(item) for item in errors]


def _for_the_other(values: Mapping[str, Any]) -> list[str]:
    """One line for each key that only the other entry point supports."""
    return [wrong_entry_point(key, values[key.name]) for key in keys_for_initialize(values)]


def keys_for_initialize(values: Mapping[str, Any]) -> list[Key]:
    """The keys that ask for something, and that only ``patrickstar.initialize`` acts on."""
    return [
        key
        for key in keys_of()
        if key.reader is not None and key.name in values and _asks_for_something(key, values[key.name])
    ]


def _asks_for_something(key: Key, value: Any) -> bool:
    if isinstance(value, Mapping):
        return not is_one_of(value.get("enabled", key.name == "scheduler"), (None, False, 0, ""))
    return not is_one_of(value, (None, math.inf, key.field.default))


def _lacks_total_steps(config: Config) -> bool:
    params = config.scheduler.params if config.scheduler is not None else None
    return getattr(params, "total_num_steps", 0) is None


def log_accepted_options(config: Config) -> None:
    """Logs, in one line, the options that are accepted without effect."""
    accepted = [key.path for key, _ in set_keys(config) if key.fate is not None and key.fate.action is Action.NO_EFFECT]
    if accepted:
        logger.info("accepted without effect (docs/config.md says why): %s", ", ".join(accepted))

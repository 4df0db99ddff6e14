"""Messages about a wrong configuration: one line for each problem, with the key, its value and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from patrickstar.config.fates import Action
from patrickstar.config.keys import Key, all_keys
from patrickstar.config.nearest import likeness, nearest, slip_of
from patrickstar.config.schedulers import SCHEDULERS, TorchSchedule
from patrickstar.config.shown import key_text, shown

_EXPECTED = {
    "bool_type": "it is a switch, give True or False",
    "float_type": "give a finite number",
    "int_type": "give an integer",
    "greater_than": "it must be more than {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than": "it must be less than {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "model_type": "it is a section, give a dict",
    "model_attributes_type": "it is a section, give a dict",
    "dict_type": "it is a section, give a dict",
}
_MODELS_OF_SCHEDULES = {*SCHEDULERS, TorchSchedule.__name__}
_FEW_KEYS = 12
_MOST_CHOICES = 3
_LEAST_LIKENESS = 0.55
_SLIP_LIKENESS = 0.84
_INNER_SECTIONS = ("optimizer.params", "scheduler.params", "zero_optimization")
"""Sections whose keys have names that mean the same at top level."""


def join(problems: Sequence[str]) -> str:
    """Joins the problems of one configuration into a message."""
    if len(problems) == 1:
        return problems[0]
    return f"the configuration has {len(problems)} problems:\n" + "\n".join(f"  {line}" for line in problems)


def describe(error: ErrorDetails) -> str:
    """The line for one of pydantic's errors."""
    path, kind, value = _path(error["loc"]), error["type"], shown(error["input"])
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return f"{path} is missing; it has no default, docs/config.md says what it means"
    if kind in ("enum", "literal_error"):
        return f"{path} is {value}; give " + re.sub("'([^']*)'", r'"\1"', str(context["expected"]))
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else " ".join(str(error["msg"]).splitlines())
    return f"{path} is {value}; {expected}"


def _path(loc: Sequence[int | str]) -> str:
    parts = list(loc)
    if len(parts) > 1 and parts[0] == "scheduler" and parts[1] in _MODELS_OF_SCHEDULES:
        del parts[1]  # pydantic names the model that "type" selected
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{key_text(part)}" for part in parts)
    return text.removeprefix(".")


def _unknown_key(path: str) -> str:
    section, _, name = path.rpartition(".")
    line = f"unknown key {path}: "
    if not section:
        meant = _meant_at_top(name)
        return f"{line}docs/config.md has them all" if meant is None else f"{line}did you mean {meant}?"
    keys = list(all_keys())
    here = list(dict.fromkeys(key.name for key in keys if key.section == section))
    near = nearest(name, here)
    elsewhere = _elsewhere(name, section, keys)
    if elsewhere and likeness(name, near) < 0.9:
        return f"{line}did you mean {_choice_of_paths(elsewhere)}?"
    if likeness(name, near) < _LEAST_LIKENESS:
        return f"{line}docs/config.md has them all"
    line += f"did you mean {section}.{near}?"
    if len(here) <= _FEW_KEYS:
        line += f" Keys of {section}: {', '.join(here)}"
    return line


def unknown_at_top(name: str) -> str:
    """An unknown key at top level, followed by the one that was meant if that is beyond doubt."""
    meant = _meant_at_top(name)
    return key_text(name) if meant is None else f"{key_text(name)} (did you mean {meant}?)"


def _meant_at_top(name: str) -> str | None:
    """A misspelt key, or one of a section that was given beside it. Names such as ``seed`` may mean anything."""
    keys = list(all_keys())
    inner = dict.fromkeys(
        key.path
        for key in keys
        if name in (key.name, *key.spellings)
        and (
            (key.section in _INNER_SECTIONS and (key.fate is None or key.fate.action is not Action.REFUSED))
            or ("_" in name and key.fate is not None and key.fate.action in (Action.HONOURED, Action.MAPPED))
        )
    )
    if 0 < len(inner) <= _MOST_CHOICES:
        return _choice_of_paths(list(inner))
    return slip_of(name, [key.name for key in keys if not key.section], _SLIP_LIKENESS)


def _elsewhere(name: str, section: str, keys: Sequence[Key]) -> list[str]:
    """Other sections with a key of that name, nearest to the top first; empty if there are more than three."""
    paths = dict.fromkeys(key.path for key in keys if key.section != section and name in (key.name, *key.spellings))
    found = sorted(paths, key=lambda path: path.count("."))
    return found if len(found) <= _MOST_CHOICES else []


def _choice_of_paths(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} or {paths[-1]}"


def wrong_entry_point(key: Key, value: Mapping[str, Any] | Any) -> str:
    """The line for a key that the entry point in use does not support."""
    instead = {
        "scheduler": "make a torch.optim.lr_scheduler of the optimizer",
        "train_batch_size": "divide batches in the script",
        "train_micro_batch_size_per_gpu": "divide batches in the script",
        "gradient_accumulation_steps": "call backward() several times before step()",
        "dataloader_drop_last": "make the loader in the script",
    }.get(key.path, "leave it out")
    given = "given" if isinstance(value, Mapping) else shown(value)
    return f"{key.path} is {given}, which patrickstar.initialize acts on; with initialize_engine, {instead}"

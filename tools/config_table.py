"""Writes docs/config.md from the models in patrickstar/config: key, type, default, treatment and meaning.

    python tools/config_table.py > docs/config.md

tests/config/test_table.py compares the page with the models and tries each row.
"""

from __future__ import annotations

import enum
import functools
import sys
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic_core import PydanticUndefined

from patrickstar.config import Config
from patrickstar.config.dialects import DEEPSPEED_DEFAULTS
from patrickstar.config.fates import Action, Reader
from patrickstar.config.keys import Key, keys_of
from patrickstar.config.schedulers import SCHEDULERS
from patrickstar.config.values import Section

HEADER = """# Configuration

`initialize_engine(model_func, local_rank, config)` and `patrickstar.initialize(config=...)` take a dict with the keys
below, the path of a JSON file with them, or None for the defaults. Unknown keys, wrong types and impossible values are
refused before the model is built: all of them at once, an unknown key with the nearest known one. With
`patrickstar.initialize` unknown top-level keys are only warned of.

The keys are PatrickStar's own and those of DeepSpeed. What happens to each:

* *honoured*: it does what it says. Some are acted on by `patrickstar.initialize` alone; `initialize_engine` refuses
  them when they ask for something.
* *mapped*: it changes another key.
* *no effect*: it is accepted. Those with another value than the default are named once, in one line of the log
  (`patrickstar`, INFO). Numbers are the same; the reason says what is done instead.
* *must be*: only this value is accepted. Every other one is an error that says what to do instead.

Some of DeepSpeed's defaults are not PatrickStar's: with `patrickstar.initialize` gradients are clipped at 1, Adam is
AdamW, and the sections `fp16` and `bf16` are off without `enabled`. A value `"auto"` counts as left out, but where it
is a value of the key's own. Keys that begin with `_` or `//` are comments.

`patrickstar config check FILE` says what is wrong in a file, `patrickstar config schema` writes a JSON Schema, with
which editors check and complete one. This page is made from the same models, by `tools/config_table.py`.
"""

_JSON_TYPES = {
    "boolean": "bool",
    "integer": "int",
    "number": "float",
    "string": "str",
    "array": "list",
    "null": "None",
    "object": "dict",
}


def render() -> str:
    """Returns the whole page."""
    return HEADER + "\n".join(_tables(Config, "", "## Top level")) + "\n"


def _tables(model: type[Section], section: str, title: str, reader: Reader | None = None) -> list[str]:
    """Returns the section's table, then the tables of its subsections."""
    lines = ["", title, "", "| key | type | default | what happens | meaning |", "|---|---|---|---|---|"]
    keys = keys_of(model, section, reader)
    lines += [_row(key, model) for key in keys]
    for key in keys:
        if len(key.sections) > 1:
            lines += _schedules(key)
        elif key.sections:
            lines += _tables(key.sections[0], key.path, f"## `{key.path}`", key.reader)
    return lines


def _schedules(key: Key) -> list[str]:
    """Returns the tables of the section whose ``type`` selects a model with its own parameters."""
    title = f"## `{key.path}`"
    types = ", ".join(f'"{name}"' for name in SCHEDULERS)
    end = 5 + len(keys_of(key.sections[-1]))
    lines = _tables(key.sections[-1], key.path, title, key.reader)[:end]
    lines = [
        line.replace("| str | required |", f"| {types}, or a class of `torch.optim.lr_scheduler` | required |")
        for line in lines
    ]
    for name, model in SCHEDULERS.items():
        (params,) = [inner for inner in keys_of(model, key.path) if inner.sections]
        lines += _tables(params.sections[0], params.path, f"## `{params.path}` of `{name}`", key.reader)
    return lines


def _row(key: Key, model: type[Section]) -> str:
    name = " or ".join(f"`{spelling}`" for spelling in (key.name, *key.spellings))
    meaning = " ".join((key.field.description or "").split())
    cells = (name, _type(key, model), _default(key), _what_happens(key), meaning)
    return f"| {' | '.join(cell.replace('``', '`').replace('|', 'or') for cell in cells)} |"


def _type(key: Key, model: type[Section]) -> str:
    if key.sections:
        return "section"
    schema = _json_schema(model)
    found = list(dict.fromkeys(_types(schema["properties"][key.name], schema.get("$defs", {}))))
    return ", ".join(found) if any('"' in kind for kind in found) else " or ".join(found) or "section or None"


_json_schema = functools.cache(lambda model: model.model_json_schema())


def _types(schema: dict[str, Any], models: dict[str, Any]) -> list[str]:
    if "$ref" in schema:
        return _types(models[schema["$ref"].rpartition("/")[2]], models)
    if "anyOf" in schema:
        return [kind for inner in schema["anyOf"] for kind in _types(inner, models)]
    if "allOf" in schema:
        return [kind for inner in schema["allOf"] for kind in _types(inner, models)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return [f'"{value}"' for value in values]
    return [_JSON_TYPES[schema["type"]]] if "type" in schema else []


def _default(key: Key) -> str:
    default = key.field.default
    if key.sections:
        optional = type(None) in typing.get_args(key.field.annotation)
        text = "required" if key.field.is_required() else "None" if optional else "its defaults"
    elif default is PydanticUndefined:
        text = "required"
    else:
        text = _literal(default)
    other = DEEPSPEED_DEFAULTS.get(key.path)
    return text if other is None else f"{text}; `patrickstar.initialize`: {_literal(other)}"


def _literal(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return repr(value)


def _what_happens(key: Key) -> str:
    by = "" if key.reader is None else f" by `{key.reader.value}`"
    fate = key.fate
    if fate is None:
        return f"below; all of it{by}" if by else "below"
    if fate.action is Action.HONOURED:
        return f"honoured{by}"
    if fate.action is Action.MAPPED:
        return f"mapped to `{fate.target}`: {fate.text}"
    if fate.action is Action.NO_EFFECT:
        return f"no effect: {fate.text}"
    if fate.only is None:
        return f"refused where it switches something on: {fate.text}"
    return f"must be {', '.join(_literal(value) for value in fate.only)}: {fate.text}"


if __name__ == "__main__":
    print(render(), end="")

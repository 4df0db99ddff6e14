"""The JSON Schema of a configuration file, for editors: :mod:`pydantic`'s, plus each key's further spellings and
``"auto"``.
"""

from __future__ import annotations

from typing import Any

from patrickstar.config.keys import all_keys, keys_of
from patrickstar.config.root import Config
from patrickstar.config.values import Section

_AUTO = {"const": "auto", "description": "Left to Hugging Face's Trainer; else the default."}


def make_json_schema() -> dict[str, Any]:
    """The schema, as a dict that ``json`` can write."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Configuration of PatrickStar"
    models: dict[str, type[Section]] = {"": Config}
    for key in all_keys():
        models |= {model.__name__: model for model in key.sections}
    for name, model in models.items():
        place = schema if not name else schema["$defs"][name]
        _extend(place["properties"], model)
    return schema


def _extend(properties: dict[str, Any], model: type[Section]) -> None:
    for key in keys_of(model):
        value = properties[key.name]
        if not key.sections:
            about = {name: value.pop(name) for name in ("title", "description", "default") if name in value}
            value = properties[key.name] = {**about, "anyOf": [value, _AUTO]}
        for spelling in key.spellings:
            properties[spelling] = {**value, "deprecated": True}

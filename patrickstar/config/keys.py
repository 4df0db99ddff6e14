"""All keys of the configuration, read from its models: used by the validation, the log, the table and the
JSON Schema.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from patrickstar.config.fates import Fate, OtherSpelling, Reader
from patrickstar.config.root import Config
from patrickstar.config.values import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key or subsection of a section."""

    section: str
    """The dotted name of its section; empty at top level."""
    name: str
    field: FieldInfo
    sections: tuple[type[Section], ...]
    """A section's models, several if its ``type`` selects one; empty for a key with a value."""
    fate: Fate | None
    """None for a section whose keys have fates of their own."""
    reader: Reader | None
    """The only entry point that acts on it; None: both."""

    @property
    def path(self) -> str:
        """The dotted name, including its sections."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its further names, in the same section."""
        return tuple(item.name for item in self.field.metadata if isinstance(item, OtherSpelling))


@functools.cache
def keys_of(model: type[Section] = Config, section: str = "", reader: Reader | None = None) -> tuple[Key, ...]:
    """The keys of one section, without those of its subsections."""
    keys = []
    for name, field in model.model_fields.items():
        fates = [item for item in field.metadata if isinstance(item, Fate)]
        readers = [item for item in field.metadata if isinstance(item, Reader)]
        keys.append(
            Key(
                section=section,
                name=name,
                field=field,
                sections=tuple(_sections(field.annotation)),
                fate=fates[0] if fates else None,
                reader=readers[0] if readers else reader,
            )
        )
    return tuple(keys)


def all_keys(model: type[Section] = Config, section: str = "", reader: Reader | None = None) -> Iterator[Key]:
    """The keys of a section, each subsection followed by its own keys."""
    for key in keys_of(model, section, reader):
        yield key
        for inner in key.sections:
            yield from all_keys(inner, key.path, key.reader)


def section_for(key: Key, value: Any) -> type[Section] | None:
    """The model that validates a section's dict; None if the key is no section, or ``value`` is no dict."""
    if not isinstance(value, Mapping) or not key.sections:
        return None
    return next((model for model in key.sections if model.__name__ == value.get("type")), key.sections[-1])


def set_keys(config: Section, section: str = "") -> Iterator[tuple[Key, Any]]:
    """The keys of a parsed section, subsections included, whose values differ from the default."""
    for key in keys_of(type(config), section):
        value = getattr(config, key.name)
        if isinstance(value, Section):
            yield from set_keys(value, key.path)
        elif value != key.field.get_default():
            yield key, value


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)

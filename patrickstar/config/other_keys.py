"""Keys without effect and refused keys: the rows of other_keys.md, made fields of the models."""

from __future__ import annotations

import ast
from importlib import resources
from typing import Annotated, Any

from pydantic import Field, create_model

from patrickstar.config import values
from patrickstar.config.fates import Fate, OtherSpelling, no_effect, refused, refused_section
from patrickstar.config.values import DataType, Section

_LINES = resources.files("patrickstar.config").joinpath("other_keys.md").read_text(encoding="utf-8").splitlines()
_ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _LINES if line.startswith("| ")][1:]
"""Cells of each row: key, type, default, what happens, meaning."""
_FATES = {"no effect": no_effect, "must": refused, "refused where it switches something on": refused_section}


def with_other_keys(section: str) -> type[Section]:
    """A base class with the table's keys of that section (``""`` is the top level), for a class that declares the
    others. Fields have the table's order. :class:`Section` must come after it among the bases, so that docstrings of
    fields are used.
    """
    return _make_model("OtherKeys", section)


def _make_model(name: str, section: str, about: str | None = None) -> type[Section]:
    fields: dict[str, Any] = {}
    for path, kind, default, what_happens, meaning in _ROWS:
        place, _, names = path.rpartition(".")
        if place != section:
            continue
        key, *spellings = names.split(" or ")
        if not kind:
            fields[key] = (Any, None)  # declared by the class; keeps its position
        elif not default:
            model = _make_model(kind, path, f"The section ``{path}``: {what_happens}.")
            globals()[kind] = model  # for pickle
            fields[key] = (model, Field(default_factory=model, description=meaning))
        else:
            annotation = Annotated[(_type(kind), *map(OtherSpelling, spellings), _fate(what_happens))]
            fields[key] = (annotation, Field(_default(default, kind), description=meaning))
    no_source = {"use_attribute_docstrings": False}  # otherwise pydantic searches for docstrings, frame by frame
    return create_model(name, __base__=Section, __module__=__name__, __doc__=about, __cls_kwargs__=no_source, **fields)


def _type(text: str) -> Any:
    name, *none = text.split(" or ")
    return getattr(values, name) | None if none else getattr(values, name)


def _default(text: str, kind: str) -> Any:
    value = ast.literal_eval(text)
    return DataType(value) if kind == "FloatType" else value


def _fate(text: str) -> Fate:
    what, _, why = text.partition(": ")
    action, _, accepted = what.partition(" be ")
    details = {"only": ast.literal_eval(f"({accepted},)")} if accepted else {}
    return _FATES[action](why, **details)

"""Short one-line texts for values in errors."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST_CHARACTERS = 80
_MOST_BITS = 512


class _Shown(reprlib.Repr):
    """An abbreviated ``repr`` of large or deep values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = _MOST_CHARACTERS

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() < _MOST_BITS else f"an integer of {value.bit_length()} bits"


def shown(value: Any) -> str:
    """The value's text, cut to 80 characters."""
    text = " ".join(_Shown().repr(value).splitlines())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def key_text(name: Any) -> str:
    """A key's text: a short printable name is unchanged, anything else becomes its ``repr``."""
    return name if isinstance(name, str) and name.isprintable() and len(name) <= _MOST_CHARACTERS else shown(name)

"""Parses and formats amounts: memory (``24GiB``, ``24 GB``, ``128G``; 948 GiB, 1.5 MiB), counts (3.2k), seconds (5.3
ms).

``GB`` counts in powers of 1000, ``GiB`` and the short ``G`` in powers of 1024. Every formatted amount of memory can be
parsed. Standard library only, since commands that run without PyTorch print sizes too.
"""

from __future__ import annotations

import math
import re

_PREFIXES = ("k", "m", "g", "t")
_UNITS = {"": 1, "b": 1, "bytes": 1}
_UNITS |= {f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate(_PREFIXES, 1)}
_UNITS |= {f"{prefix}{rest}": 2 ** (10 * power) for power, prefix in enumerate(_PREFIXES, 1) for rest in ("", "ib")}
_SHOWN = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_LEAST_TIB = 10 * 2**40  # below it, GiB are easier to compare
_SURELY_BYTES = 2**20


def parse_size(text: str) -> int | None:
    """Bytes of a text such as ``"24GiB"``, ``"1.5 GB"``, ``"128G"`` or ``"4096"``; None for any other text."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or match.group(2).lower() not in _UNITS:
        return None
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def parse_size_with_unit(text: str) -> int:
    """Bytes of a size on a command line, which must have a unit: a bare ``24`` is not meant as bytes.

    Raises:
        ValueError: it has no unit, or is no positive amount of memory.
    """
    number = text.strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", number, re.ASCII):
        likely = f"{number}B" if float(number) >= _SURELY_BYTES else f"{number}GiB or {number}GB"
        raise ValueError(f"{number} what? {likely}")
    num_bytes = parse_size(text)
    if not num_bytes:
        raise ValueError(f"{text!r} is no amount of memory; give one such as 24GiB, 24GB or 500MiB")
    return num_bytes


def show_size(num_bytes: float) -> str:
    """Formats with a unit and about three digits: ``948 GiB``, ``23.1 GiB``, ``1.52 MiB``, ``12 bytes``."""
    unit, scale = _unit_for(num_bytes)
    value = num_bytes / scale
    return f"{_number(value, _decimals(value))} {unit}"


def show_count(count: float) -> str:
    """Formats in thousands, millions or billions, with three digits: ``3.2k``, ``1.24B``, ``12``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{_number(count / unit, _decimals(count / unit))}{name}"
    return f"{count:.3g}"


def show_seconds(seconds: float) -> str:
    """Formats with a unit and about three digits: ``1.24 s``, ``5.3 ms``, ``80 us``."""
    unit, scale = next(((name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    value = seconds / scale
    return f"{_number(value, _decimals(value))} {unit}"


def show_exactly(num_bytes: int) -> str:
    """Formats with a unit, and the bytes in brackets where they differ: ``1.5 GiB (1610612737 bytes)``."""
    shown = show_size(num_bytes)
    return shown if parse_size(shown) == num_bytes else f"{shown} ({num_bytes} bytes)"


def enough_size(num_bytes: int) -> str:
    """Formats for a setting or flag, rounded up: ``23.16GiB``."""
    unit, scale = _unit_for(num_bytes)
    if scale == 1:
        return f"{num_bytes}B"
    return f"{_number(math.ceil(num_bytes / scale * 100) / 100, 2)}{unit}"


def size_in_words(num_bytes: int) -> int:
    """The bytes in :func:`enough_size`'s text; at least ``num_bytes``."""
    return parse_size(enough_size(num_bytes)) or num_bytes


def show_shortage(needed_bytes: int, there_bytes: int) -> str:
    """Needed, available and missing bytes in one unit: ``needs 948 GiB, has 582, short by 366``."""
    unit, scale = _unit_for(needed_bytes)
    missing = max(needed_bytes - there_bytes, 0)
    if missing < scale / 100:  # it would round to nothing
        return f"needs {show_exactly(needed_bytes)}, has {there_bytes} bytes, short by {missing} bytes"
    decimals = max(_decimals(missing / scale), 0)
    grain = 10**decimals
    needs = math.ceil(needed_bytes / scale * grain) / grain
    has = math.floor(there_bytes / scale * grain) / grain
    shown = [_number(value, decimals) for value in (needs, has, needs - has)]
    return f"needs {shown[0]} {unit}, has {shown[1]}, short by {shown[2]}"


def _unit_for(num_bytes: float) -> tuple[str, int]:
    units = _SHOWN if num_bytes >= _LEAST_TIB else _SHOWN[1:]
    return next((found for found in units if num_bytes >= found[1]), _SHOWN[-1])


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _number(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

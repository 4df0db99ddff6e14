"""Validation of messages that Python reads from other ranks. Malformed messages (of another version, or for another
call) are refused with a StateError that names them. Messages for the core: csrc/collective/message.h.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from patrickstar import _C

_WRONG = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    struct.error,
)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Context that reads a message; ``what`` names it.

    Raises:
        StateError: replaces parsing errors inside.
    """
    try:
        yield
    except _WRONG as error:
        raise _C.StateError(
            f"another rank's message of {what} is not what it should be ({type(error).__name__}: {error}); run the "
            "same version of PatrickStar on all ranks, and report this"
        ) from error


def read_list(message: bytes, what: str, is_item: Callable[[Any], bool], length: int | None = None) -> list[Any]:
    """A JSON list of ``length`` items (None: any number), each accepted by ``is_item``.

    Raises:
        StateError: the message is something else.
    """
    with reading(what):
        items = json.loads(message)
        if not isinstance(items, list) or length not in (None, len(items)) or not all(map(is_item, items)):
            raise ValueError(f"{message[:100]!r}")
    return items

"""File system calls that fail, one after the other: the functions of proofs/faulty_calls.c."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from proofs.preloaded import process

SOURCE = "proofs/faulty_calls.c"


class Calls(enum.IntFlag):
    """Kinds of calls, as in the C file."""

    OPEN = 1
    WRITE = 2
    READ = 4
    SYNC = 8
    SIZE = 16
    RENAME = 32
    REMOVE = 64
    FOLDER = 128
    CLOSE = 256
    LOCK = 512
    URING = 1024


EVERY = Calls(1023)  # all of the C library's


class How(enum.IntEnum):
    """Effect of the fault."""

    ERROR = 0
    SHORT = 1
    KILL = 2
    LOSE = 3


@dataclass(frozen=True)
class Fault:
    """A way in which calls fail."""

    name: str
    calls: Calls
    how: How = How.ERROR
    error: int = 0
    and_on: bool = False
    """All later calls fail too."""

    @property
    def message(self) -> str:
        """The system's words for the error."""
        return os.strerror(self.error)


@dataclass
class Failed:
    """Calls that were counted, and what failed."""

    num_calls: int = 0
    num_hits: int = 0
    call: str = ""
    """Name of the first that failed."""


@contextmanager
def failing(fault: Fault, folder: Path, first: int) -> Iterator[Failed]:
    """The ``first``-th call on files below ``folder`` fails, counted from 1. What happened is known after the block."""
    library = process()
    library.faulty_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_int] * 3, ctypes.c_long, ctypes.c_int]
    library.faulty_disarm.restype = library.faulty_hits.restype = ctypes.c_long
    library.faulty_last.restype = ctypes.c_char_p
    failed = Failed()
    library.faulty_arm(os.fsencode(folder), int(fault.calls), int(fault.how), fault.error, first, int(fault.and_on))
    try:
        yield failed
    finally:
        failed.num_calls = library.faulty_disarm()
        failed.num_hits = library.faulty_hits()
        failed.call = library.faulty_last().decode()

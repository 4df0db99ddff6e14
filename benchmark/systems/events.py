"""What a worker tells its parent: one JSON object per line through a pipe, so that what a worker measured before it was
killed is not lost, and what the systems print does not get into it.

In this order: ``provenance`` (rank 0 alone), ``initialised``, ``step`` (each), ``measured``, ``profiled`` or
``not_profiled`` (rank 0 alone); or ``failed`` at any point.
"""

from __future__ import annotations

import enum
import json
import resource
from pathlib import Path
from typing import Any, TextIO


class Outcome(enum.Enum):
    """How it went."""

    TRAINED = "trained"
    NOT_INSTALLED = "not installed"
    NOT_SUPPORTED = "not supported"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"
    TIMED_OUT = "timed out"
    FAILED = "failed"


class EventWriter:
    """The worker's end."""

    def __init__(self, pipe: TextIO):
        self._pipe = pipe

    def send(self, event: str, **values: Any) -> None:
        self._pipe.write(json.dumps({"event": event, **values}) + "\n")
        self._pipe.flush()


def peak_resident_bytes(process: int | str = "self") -> int:
    """Highest resident memory of a process so far, pinned memory included; where the kernel does not keep it, that of
    now or of this process.
    """
    fields = _memory_fields(f"/proc/{process}/status")
    for name in ("VmHWM", "VmRSS") if process != "self" else ("VmHWM",):
        if name in fields:
            return fields[name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if process == "self" else 0


def others_resident_bytes() -> int:
    """How much of this process's resident memory is to be counted with the other processes that share it: each page is
    divided evenly by those who have it (0 where the kernel does not tell). Takes seconds for a hundred GiB.
    """
    fields = _memory_fields("/proc/self/smaps_rollup")
    return fields["Rss"] - fields["Pss"] if "Rss" in fields and "Pss" in fields else 0


def _memory_fields(path: str) -> dict[str, int]:
    """Bytes by name, of the lines ``name: 123 kB``; none of a file that cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line and line.endswith(" kB")]
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}

"""What a worker tells its parent: one JSON object per line through a pipe, so that what a worker measured before it was
killed is not lost, and what the systems print does not get into it.

In this order: ``provenance``, ``initialised``, ``step`` (each), ``measured``, ``profiled`` or ``not_profiled``; or
``failed`` at any point.
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
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    for name in ("VmHWM", "VmRSS") if process != "self" else ("VmHWM",):
        if name in fields:
            return int(fields[name].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if process == "self" else 0

"""Resident memory of processes, from /proc."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_resident_bytes(process: int | str = "self") -> int:
    """Highest resident memory of a process so far, pinned memory included.

    Where the kernel does not record the peak: another process's present resident memory, or this one's ``ru_maxrss``.
    """
    fields = _memory_fields(f"/proc/{process}/status")
    for name in ("VmHWM", "VmRSS") if process != "self" else ("VmHWM",):
        if name in fields:
            return fields[name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if process == "self" else 0


def others_resident_bytes() -> int:
    """Part of this process's resident memory that counts for the other processes sharing it: RSS less PSS.

    0 where the kernel does not report it. Takes seconds for a hundred GiB.
    """
    fields = _memory_fields("/proc/self/smaps_rollup")
    return fields["Rss"] - fields["Pss"] if "Rss" in fields and "Pss" in fields else 0


def _memory_fields(path: str) -> dict[str, int]:
    """Bytes by name, from lines ``name: 123 kB``; empty for a file that cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line and line.endswith(" kB")]
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}

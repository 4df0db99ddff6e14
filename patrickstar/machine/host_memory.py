"""How much memory the host has and how much of it this process may use.

Standard library only: ``python -m patrickstar.env`` reports it also where PyTorch or the extension is missing.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path


def total_bytes() -> int:
    """Physical memory of the machine as the kernel counts it now (MemTotal), in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes() -> int | None:
    """The lowest memory limit of this process's control groups, in bytes; None without one."""
    limits = []
    try:
        entries = [line.rstrip("\n").split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in entries:
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        # A limit of any ancestor binds as well; inside a container the path may not exist, then the root counts.
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            if root not in [folder, *folder.parents]:
                break
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text != "max" and int(text) < 2**60:
                limits.append(int(text))
    return min(limits, default=None)


def usable_bytes() -> int:
    """Bytes of host memory this process may use.

    The control group's limit if there is one, else the machine's memory; at most ``RLIMIT_AS``. On a virtual machine
    whose memory grows as it is touched the machine's memory starts far below what may be used: set ``host_memory`` in
    the configuration there if no group limits it.
    """
    limit = cgroup_limit_bytes()
    usable = total_bytes() if limit is None else limit
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return usable if soft == resource.RLIM_INFINITY else min(usable, soft)

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
    return min((limit for limit, _ in _limited_groups()), default=None)


def _limited_groups() -> list[tuple[int, Path]]:
    """Limit in bytes and folder of each of this process's control groups that limits memory."""
    limited = []
    try:
        entries = [line.rstrip("\n").split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
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
                limited.append((int(text), folder))
    return limited


def _taken_bytes(group: Path) -> int:
    """What the processes of a control group have of its memory, without files that the kernel only keeps cached."""
    for usage, files in (
        ("memory.current", ("active_file", "inactive_file")),
        ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        try:
            taken = int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        statistics = dict(line.split() for line in lines)
        return max(taken - sum(int(statistics.get(name, 0)) for name in files), 0)
    return 0


def available_bytes() -> int:
    """Bytes of :func:`usable_bytes` that nobody has taken: neither this process nor another one.

    Under a control group's limit what the group has left; else, and as well where the machine has less than that limit,
    what the kernel calls available (MemAvailable). A virtual machine whose memory grows as it is touched starts with
    less than its group's limit and is believed to reach it.
    """
    groups = _limited_groups()
    available = min((limit - _taken_bytes(group) for limit, group in groups), default=None)
    if available is None or total_bytes() >= min(limit for limit, _ in groups):
        left = mem_available_bytes()
        available = left if available is None else min(available, left)
    return max(min(available, usable_bytes()), 0)


def mem_available_bytes() -> int:
    """What the kernel calls available of the machine's memory (MemAvailable); all of it where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total_bytes()
    kibibytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return next(kibibytes, total_bytes() // 1024) * 1024


def default_budget_bytes(held_bytes: int = 0) -> int:
    """What an engine takes of the host when nobody says: what is available, less a reserve of 5 % of what may be used,
    at least 1 GiB, for the data loader, libraries and the kernel's file cache; at least a tenth of what is available.
    ``held_bytes`` that are taken count as available: whoever asks has them.
    """
    return budget_within(min(available_bytes() + held_bytes, usable_bytes()), reserve_bytes())


def reserve_bytes() -> int:
    """What :func:`default_budget_bytes` leaves of the host."""
    return max(usable_bytes() // 20, 2**30)


def budget_within(available: int, reserve: int) -> int:
    """The default budget where so much is available, of which so much is left."""
    return max(available - reserve, available // 10)


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

"""Measures the host's memory and the part that this process may use.

Standard library only, so that ``python -m patrickstar.env`` works without PyTorch or the extension.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path


def total_bytes() -> int:
    """Physical memory of the machine (the kernel's present MemTotal), in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes() -> int | None:
    """The lowest memory limit of this process's control groups, in bytes; None without one."""
    return min((limit for limit, _ in _limited_groups()), default=None)


def _limited_groups() -> list[tuple[int, Path]]:
    """Limit in bytes and folder of each control group of this process that limits memory."""
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
        # Limits of ancestors apply too. Inside a container the path may not exist; then the root counts.
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
    """Memory in use by a control group's processes, without the kernel's file cache."""
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
    """Unused bytes of :func:`usable_bytes`.

    The rest of the control group's limit and the kernel's MemAvailable, whichever is less. On a virtual machine whose
    present memory is below the limit (it grows when touched), only the limit counts.
    """
    groups = _limited_groups()
    available = min((limit - _taken_bytes(group) for limit, group in groups), default=None)
    if available is None or total_bytes() >= min(limit for limit, _ in groups):
        left = mem_available_bytes()
        available = left if available is None else min(available, left)
    return max(min(available, usable_bytes()), 0)


def mem_available_bytes() -> int:
    """The kernel's MemAvailable; the machine's memory if it is not reported."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total_bytes()
    kibibytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return next(kibibytes, total_bytes() // 1024) * 1024


def default_budget_bytes(held_bytes: int = 0, num_ranks: int = 1) -> int:
    """The default host budget of one of ``num_ranks`` ranks on this machine, see :func:`budget_within`.

    ``held_bytes`` that the ranks hold together count as available.
    """
    return budget_within(min(available_bytes() + held_bytes, usable_bytes()), reserve_bytes(), num_ranks)


def reserve_bytes() -> int:
    """Bytes left to the data loader, libraries and the file cache: 5 % of :func:`usable_bytes`, at least 1 GiB."""
    return max(usable_bytes() // 20, 2**30)


def budget_within(available: int, reserve: int, num_ranks: int = 1) -> int:
    """The default budget of one of ``num_ranks`` ranks that share ``available`` bytes.

    ``reserve`` is left for one process, and up to 4 GiB for each further one: its libraries, CUDA's and NCCL's memory.
    Two ranks on two H200s took 15.6 of 252 GiB besides their budgets (benchmark/results/h200-qwen3-30b-a3b.txt). At
    least a tenth of ``available`` is shared.
    """
    further = (num_ranks - 1) * min(available // 50, 4 * 2**30)
    return max(available - reserve - further, available // 10) // num_ranks


def usable_bytes() -> int:
    """Bytes of host memory this process may use.

    The control group's limit, else the machine's memory; at most ``RLIMIT_AS``. A virtual machine with growing memory
    reports far less than it may use: set ``host_memory`` there unless a control group limits it.
    """
    limit = cgroup_limit_bytes()
    usable = total_bytes() if limit is None else limit
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return usable if soft == resource.RLIM_INFINITY else min(usable, soft)

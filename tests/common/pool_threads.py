import re
from pathlib import Path

from patrickstar import _C


def worker_masks() -> dict[str, list[int]]:
    """{name of a pool's worker: the CPUs it may run on}, of all live pools; names must differ."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        name = re.search(r"^Name:\t(.*)$", status, re.MULTILINE).group(1)
        if name.startswith("ps-worker-"):
            assert name not in masks, "two pools are alive"
            masks[name] = _C.parse_cpu_list(re.search(r"^Cpus_allowed_list:\t(.*)$", status, re.MULTILINE).group(1))
    return masks

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from patrickstar import _C


def policy_of(address: int) -> str:
    line = re.search(rf"^0*{address:x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert line is not None, f"no mapping begins at {address:x}"
    return line.group(1)


def test_the_kernel_knows_the_policy():
    node = _C.read_cpu_topology(_C.allowed_cpus()).cpus[0][2]
    num_bytes = 4 * 2**20
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # In the middle, so that it is a mapping of its own. One node is enough for the kernel, and there may be but one.
    agreed = _C.interleave_pages(address + 2**20, 2 * 2**20, [node])
    policy = policy_of(address + 2**20) if agreed else "refused"
    print(f"policy: {policy}")
    assert policy in (f"interleave:{node}", "refused")
    memory[2**20 : 3 * 2**20] = b"\1" * 2**21  # and the memory is usable
    assert memory[2**21] == 1


def test_a_node_that_does_not_exist_is_refused():
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not _C.interleave_pages(address, mmap.PAGESIZE, [1000])
    assert not _C.interleave_pages(address, mmap.PAGESIZE, [])
    assert _C.nodes_to_interleave([1000, 1001]) == []


def test_one_node_needs_no_choice():
    assert _C.nodes_to_interleave([0]) == []
    assert _C.nodes_to_interleave([]) == []


@pytest.mark.parametrize("prepares", [False, True])
def test_regions_of_the_arena_are_placed_before_they_are_touched(prepares):
    node = _C.read_cpu_topology(_C.allowed_cpus()).cpus[0][2]
    arenas = {kind: _C.HostArena(2**30, prepares, nodes) for kind, nodes in {"spread": [node], "plain": []}.items()}
    num_bytes = 6 * 2**20
    policies = {}
    for kind, arena in arenas.items():
        arena.reserve([num_bytes])
        arena.prepare_ahead()
        policies[kind] = policy_of(arena.allocate(num_bytes))
    print(f"policies: {policies}")
    assert policies["spread"] in (f"interleave:{node}", "default")
    assert policies["plain"] == "default"

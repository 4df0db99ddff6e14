import ctypes
import mmap
import re
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C, MemoryBudgetError


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100_000), max_size=30), st.randoms(use_true_random=False))
def test_blocks_are_disjoint_and_reused(sizes, random):
    arena = _C.HostArena(64 * 2**20)
    arena.reserve(sizes)
    mapped = arena.mapped_bytes
    live = []
    for _ in range(3):
        random.shuffle(sizes)
        for size in sizes:
            address = arena.allocate(size)
            assert address % 256 == 0
            assert all(address + size <= other or other + length <= address for other, length in live)
            live.append((address, size))
        random.shuffle(live)
        for address, _ in live:
            arena.free(address)
        live.clear()
        assert arena.used_bytes == 0
    arena.trim()
    assert arena.mapped_bytes == 0
    assert arena.peak_mapped_bytes >= mapped


def test_limit():
    arena = _C.HostArena(2**20)
    arena.allocate(2**19)
    with pytest.raises(MemoryBudgetError, match="raise host_memory"):
        arena.allocate(2**20)
    with pytest.raises(MemoryBudgetError, match="raise host_memory"):
        arena.reserve([2**20])
    arena.allocate(2**19 - 8192)


@pytest.mark.parametrize("prepares", [False, True])
def test_regions_ahead(prepares):
    size = 2**20
    arena = _C.HostArena(20 * size, prepares)
    arena.reserve([size] * 8)
    assert arena.unreserved_bytes == 12 * size
    assert arena.mapped_bytes == 0
    if prepares:
        assert arena.allocate_prepared(size) == 0  # nothing was started
    arena.prepare_ahead()
    blocks = [arena.allocate(size) for _ in range(8)]  # waits for what is under way
    assert len(set(blocks)) == 8
    assert arena.mapped_bytes == 8 * size
    assert arena.allocate_prepared(size) == 0 or not prepares
    arena.reserve([size] * 4)
    arena.prepare_ahead()
    arena.release_reserved()
    assert arena.unreserved_bytes == 20 * size - arena.mapped_bytes
    with pytest.raises(MemoryBudgetError, match="raise host_memory"):
        arena.allocate(16 * size)


def test_huge_blocks_start_on_huge_pages():
    arena = _C.HostArena(64 * 2**20)
    arena.reserve([8 * 2**20])
    assert arena.allocate(8 * 2**20) % (2 * 2**20) == 0


def mapped_here():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_region_that_cannot_be_prepared_leaves_nothing_mapped(ahead):
    size = 256 * 2**20
    arena = _C.HostArena(20 * size, prepares=True, num_failures=4)
    before = mapped_here()
    if ahead:  # on the arena's own thread, then once more by whoever takes it
        arena.reserve([size])
        arena.prepare_ahead()
        while arena.is_preparing:  # or whoever takes the region is faster, and nobody prepares it ahead
            time.sleep(0.001)
    for _ in range(3 if ahead else 4):
        with pytest.raises(_C.SystemError, match="268435456 bytes cannot be pinned"):
            arena.allocate(size)
    assert arena.mapped_bytes == 0 and arena.used_bytes == 0
    assert mapped_here() - before < size  # a thread's stack and heap at most
    assert arena.unreserved_bytes == 20 * size
    arena.allocate(size)
    assert arena.mapped_bytes == size


def test_regions_go_from_one_arena_to_another():
    size = 2**20
    kept = _C.KeptRegions()
    former = _C.HostArena(64 * size, prepares=True)
    former.keep_regions(kept)
    blocks = [former.allocate(4 * size) for _ in range(5)]
    former.free(blocks.pop())
    former.trim()
    assert (kept.num_bytes, former.mapped_bytes) == (4 * size, 16 * size)
    del former  # with blocks in it
    assert kept.num_bytes == 20 * size
    arena = _C.HostArena(64 * size, prepares=True)
    arena.reuse_regions(kept)
    arena.reserve([size] * 6)
    assert (arena.mapped_bytes, kept.num_bytes) == (8 * size, 12 * size)  # two regions, prepared as they are
    assert arena.unreserved_bytes == 56 * size
    other = _C.HostArena(6 * size, prepares=True)
    other.reuse_regions(kept)
    other.reserve([size] * 5)
    assert (other.mapped_bytes, kept.num_bytes) == (4 * size, 8 * size)  # a second one would exceed the limit
    assert other.unreserved_bytes == size
    assert other.peak_mapped_bytes == 4 * size
    other.release_reused()
    arena.release_reused()
    assert arena.allocate_prepared(2 * size) != 0


def policy_of(address: int) -> str:
    line = re.search(rf"^0*{address:x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert line is not None, f"no mapping begins at {address:x}"
    return line.group(1)


def test_the_kernel_knows_the_policy():
    node = _C.read_cpu_topology(_C.allowed_cpus()).cpus[0][2]
    num_bytes = 4 * 2**20
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # In the middle, so that it is a mapping of its own. One node suffices for the kernel.
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


def idle_device_buffers(device_buffers, sizes):
    addresses = [device_buffers.acquire(size) for size in sizes]
    for address in addresses:
        device_buffers.release(address)
    return addresses


def test_device_buffers_of_rare_sizes_are_kept_longest():
    device_buffers = _C.DeviceBufferPool(2000, 0.0)
    head, *_ = idle_device_buffers(device_buffers, [1000, 100, 100, 100, 80, 80])
    assert device_buffers.trim(150) == 200
    assert device_buffers.trim(1) == 80
    assert device_buffers.acquire(1000) == head
    device_buffers.release(head)
    assert device_buffers.trim(2000) == 1000 + 100 + 80
    assert device_buffers.idle_bytes == device_buffers.used_bytes == 0


def test_device_buffers_in_use_make_a_size_common():
    device_buffers = _C.DeviceBufferPool(2000, 0.0)
    used = [device_buffers.acquire(100) for _ in range(3)]
    idle_device_buffers(device_buffers, [500, 500])
    device_buffers.release(used[0])
    assert device_buffers.trim(1) == 100


@pytest.mark.parametrize(("waste_ratio", "served"), [(0.125, True), (0.0, False)])
def test_a_larger_device_buffer_serves_where_memory_is_scarce(waste_ratio, served):
    device_buffers = _C.DeviceBufferPool(300, waste_ratio)
    (larger,) = idle_device_buffers(device_buffers, [117])
    assert (device_buffers.acquire(83) == larger) is served
    assert device_buffers.used_bytes == (117 if served else 83)
    # A buffer more than half as large again does not.
    device_buffers = _C.DeviceBufferPool(300, waste_ratio)
    (larger,) = idle_device_buffers(device_buffers, [117])
    assert device_buffers.acquire(77) != larger


def test_sizes_that_alternate_need_no_new_device_buffers_in_the_end():
    device_buffers = _C.DeviceBufferPool(420, 0.125)
    numbers = []
    for _ in range(3):
        for sizes in ([83, 83, 83], [117, 117, 117], [83, 117, 83]):
            assert all(idle_device_buffers(device_buffers, sizes))
        numbers.append(device_buffers.num_allocations)
    assert numbers[0] == numbers[-1]


@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60), st.sampled_from([0.0, 0.125]))
def test_books(requests, waste_ratio):
    device_buffers = _C.DeviceBufferPool(1000, waste_ratio)
    used = {}
    for size, release in requests:
        address = device_buffers.acquire(size)
        assert address not in used
        if address:
            used[address] = size
        else:
            assert device_buffers.idle_bytes == 0 and device_buffers.used_bytes + size > 1000
        if release and used:
            device_buffers.release(used.popitem()[0])
        assert sum(used.values()) <= device_buffers.used_bytes <= 1000 - device_buffers.idle_bytes
        assert sum(used.values()) * (1.5 if waste_ratio else 1) >= device_buffers.used_bytes


def test_what_stays_gets_the_size_it_asks_for():
    device_buffers = _C.DeviceBufferPool(300, 0.125)
    idle_device_buffers(device_buffers, [110, 110])
    assert device_buffers.acquire(100, _C.DeviceBufferFit.EXACT)
    assert device_buffers.used_bytes == 100
    device_buffers.acquire(100, _C.DeviceBufferFit.EXACT)
    assert device_buffers.used_bytes == 200
    assert device_buffers.idle_bytes == 0

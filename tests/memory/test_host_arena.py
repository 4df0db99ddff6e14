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

import mmap
import os

import pytest

from benchmark.launch import others_resident_bytes, peak_resident_bytes

NUM_BYTES = 64 * 2**20


def test_shared_pages_are_sharded():
    before, file = others_resident_bytes(), os.memfd_create("shared")
    os.truncate(file, NUM_BYTES)
    # Two mappings of one process count as two processes do.
    with mmap.mmap(file, NUM_BYTES) as first, mmap.mmap(file, NUM_BYTES) as second:
        os.close(file)
        for memory in (first, second):
            memory[:: mmap.PAGESIZE] = b"\1" * (NUM_BYTES // mmap.PAGESIZE)
        assert others_resident_bytes() - before == pytest.approx(NUM_BYTES, rel=0.1)
        assert peak_resident_bytes() >= 2 * NUM_BYTES

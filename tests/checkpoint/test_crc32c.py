import random

import pytest

from patrickstar import _C

FUNCTIONS = [_C.crc32c, _C.crc32c_portable]


def bitwise(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", FUNCTIONS)
def test_examples_of_the_rfc(function):
    assert function(b"") == 0
    assert function(b"123456789") == 0xE3069283
    assert function(bytes(32)) == 0x8A9136AA
    assert function(b"\xff" * 32) == 0x62A8AB43
    assert function(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sizes_alignments_and_parts(function):
    """The implementation runs stretches of 256 and 8192 bytes three at a time."""
    generator = random.Random(0)
    data = generator.randbytes(3 * 8192 + 3 * 256 + 100)
    sizes = [*range(0, 40), *range(760, 780), *range(3 * 8192 - 5, 3 * 8192 + 5), len(data) - 16]
    for size in sizes:
        begin = generator.randrange(16)
        part = memoryview(data)[begin : begin + size]
        expected = bitwise(part)
        assert function(part) == expected
        cut = generator.randint(0, size)
        assert function(part[cut:], function(part[:cut])) == expected
        assert _C.joined_crc32c(function(part[:cut]), function(part[cut:]), size - cut) == expected


def test_a_buffer_must_be_contiguous():
    with pytest.raises(BufferError):
        _C.crc32c(memoryview(bytes(10))[::2])

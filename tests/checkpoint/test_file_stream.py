import errno
import fcntl
import itertools
import mmap
import os
import random
import threading

import pytest

from patrickstar.checkpoint import file_stream
from patrickstar.checkpoint.disk import Disk, created
from patrickstar.checkpoint.file_stream import FileStream

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(file_stream, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(file_stream, "_LEAST_BYTES", 3 * BLOCK)
    monkeypatch.setattr(file_stream, "LEAST_UNCOPIED_BYTES", BLOCK)


class Watched(Disk):
    """Notes direct writes; ``can`` and ``refuses`` say what the file system does with them."""

    def __init__(self, can=True, refuses=False):
        self.can, self.refuses, self.direct = can, refuses, []

    def set_direct(self, fd, on):
        return super().set_direct(fd, on) if self.can or not on else False

    def write_at(self, fd, data, offset):
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and self.refuses:
            raise OSError(errno.EINVAL, "unaligned")
        self.direct.append(is_direct)
        return super().write_at(fd, data, offset)


def written(path, disk, pieces):
    with created(disk, path) as fd, FileStream(disk, fd, sum(map(len, pieces))) as stream:
        for piece in pieces:
            stream.append(memoryview(piece))
    return path.read_bytes()


@pytest.mark.parametrize("num_bytes", [0, 1, 3 * BLOCK - 1, 3 * BLOCK, 8 * BLOCK + 5, 20 * BLOCK])
@pytest.mark.parametrize("disk", [Watched(), Watched(can=False), Watched(refuses=True)])
def test_files_have_the_bytes_that_were_appended(tmp_path, num_bytes, disk):
    generator = random.Random(num_bytes)
    data = generator.randbytes(num_bytes)
    cuts = sorted(generator.randrange(num_bytes + 1) for _ in range(9))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, num_bytes], strict=True)]
    disk.direct.clear()
    assert written(tmp_path / "file", disk, pieces) == data
    directly = num_bytes // BLOCK if num_bytes >= 3 * BLOCK and disk.can and not disk.refuses else 0
    assert sum(disk.direct) == directly


class Given:
    """Bytes at an alignment in memory, which change when they are released."""

    def __init__(self, data, alignment):
        memory = mmap.mmap(-1, len(data) + BLOCK)
        self.data = memoryview(memory)[alignment : alignment + len(data)]
        self.data[:] = data
        self.num_releases = 0

    def release(self):
        self.num_releases += 1
        self.data[:] = bytes(len(self.data))


@pytest.mark.parametrize("alignment", [0, 24])
@pytest.mark.parametrize("disk", [Watched(), Watched(can=False), Watched(refuses=True)])
def test_given_bytes_are_written_before_they_are_released(tmp_path, disk, alignment, monkeypatch):
    copied = []
    fill = file_stream._Block.fill
    monkeypatch.setattr(file_stream._Block, "fill", lambda block, data: copied.append(fill(block, data)) or copied[-1])
    generator = random.Random(alignment)
    sizes = [9 * BLOCK, 5 * BLOCK - 1, 2 * BLOCK + 1, 100, 30 * BLOCK, BLOCK]
    pieces = [generator.randbytes(size) for size in sizes]
    begins = itertools.accumulate(sizes, initial=24)
    given = [Given(piece, (begin - 24 + alignment) % BLOCK) for piece, begin in zip(pieces, begins, strict=False)]
    path = tmp_path / "file"
    num_bytes = 24 + sum(sizes)
    with created(disk, path) as fd, FileStream(disk, fd, num_bytes) as stream:
        stream.append(memoryview(b"h" * 24))
        for piece in given:
            stream.give(piece.data, piece.release)
    assert path.read_bytes() == b"h" * 24 + b"".join(pieces)
    assert [piece.num_releases for piece in given] == [1] * len(sizes)
    if disk.can:
        most = 2 * BLOCK * len(sizes)
        assert sum(copied) == num_bytes if alignment == 0 else sum(copied) <= most


class Failing(Watched):
    """Writes fail from a block on."""

    def write_at(self, fd, data, offset):
        if offset >= 4 * BLOCK:
            raise OSError(errno.ENOSPC, "no space")
        return super().write_at(fd, data, offset)


def test_an_error_is_raised_and_ends_the_threads(tmp_path):
    before = threading.active_count()
    for num_blocks in (5, 40):
        with pytest.raises(OSError, match="no space") as caught:
            written(tmp_path / f"{num_blocks}", Failing(), [bytes(num_blocks * BLOCK)])
        assert caught.value.filename == str(tmp_path / f"{num_blocks}")
    disk = Disk()
    with pytest.raises(KeyError), created(disk, tmp_path / "ended") as fd, FileStream(disk, fd, 9 * BLOCK) as stream:
        stream.append(memoryview(bytes(2 * BLOCK)))
        raise KeyError
    given = [Given(bytes(9 * BLOCK), 0) for _ in range(9)]
    with (
        pytest.raises(OSError, match="no space"),
        created(disk, tmp_path / "given") as fd,
        FileStream(Failing(), fd, 81 * BLOCK) as stream,
    ):
        for piece in given:
            stream.give(piece.data, piece.release)
    assert {piece.num_releases for piece in given} <= {0, 1}
    assert threading.active_count() == before

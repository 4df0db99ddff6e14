import errno
import fcntl
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


class Failing(Watched):
    """The n-th write fails."""

    def write_at(self, fd, data, offset):
        if offset == 4 * BLOCK:
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
    assert threading.active_count() == before

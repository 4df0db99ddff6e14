import errno
import os
import resource

import pytest
import torch

from patrickstar import _C, DiskError
from tests.distributed import run_python

PAGE = 4096
IO = {"threads": _C.DiskIo.THREADS, "io_uring": _C.DiskIo.URING}


def aligned(num_bytes: int) -> torch.Tensor:
    memory = torch.zeros(num_bytes + PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + num_bytes]


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    data = aligned(num_bytes)
    data.copy_(torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    return data


def whole(data: torch.Tensor, offset: int = 0) -> tuple[int, int, int]:
    return data.data_ptr(), offset, data.numel()


@pytest.fixture(params=IO)
def io(request):
    if request.param == "io_uring":
        try:
            _C.DiskFile(".", PAGE, IO["io_uring"])
        except _C.SystemError as error:
            pytest.skip(f"the kernel of this machine: {error}")
    return IO[request.param]


def folders(tmp_path):
    return [str(tmp_path), *(["/dev/shm"] if os.access("/dev/shm", os.W_OK) else [])]


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("cuts_short", [False, True])
@pytest.mark.parametrize("is_registered", [False, True])
def test_what_is_written_comes_back(io, is_registered, cuts_short, is_plain, tmp_path):
    """Pieces have 1 MiB. Also on a file system without O_TMPFILE, fallocate and O_DIRECT."""
    for folder in folders(tmp_path):
        data = [random_bytes(size, size) for size in (PAGE, 5 * PAGE, (3 << 20) + PAGE)]
        back = [aligned(part.numel()) for part in data]
        memory = [(part.data_ptr(), part.numel()) for part in (*data, *back)] if is_registered else []
        faults = _C.DiskFaults()
        faults.cuts_short, faults.is_plain = cuts_short, is_plain
        file = _C.DiskFile(folder, sum(part.numel() for part in data), io, faults, memory)
        offsets = [0, PAGE, 6 * PAGE]
        written = file.write([whole(part, offset) for part, offset in zip(data, offsets, strict=True)])
        assert written == [_C.crc32c(part.numpy()) for part in data]
        read = file.read([whole(part, offset) for part, offset in zip(back, offsets, strict=True)])
        assert read == written
        assert all(torch.equal(part, other) for part, other in zip(back, data, strict=True))
        assert list(tmp_path.iterdir()) == []  # it has no name
        assert file.how.endswith("through the file cache") or not is_plain
        print(folder, file.how)


def test_reading_while_writing(io, tmp_path):
    import threading

    size = 4 << 20
    first, second, back = random_bytes(size, 1), random_bytes(size, 2), aligned(size)
    file = _C.DiskFile(str(tmp_path), 2 * size, io)
    [crc] = file.write([whole(first)])
    for _ in range(8):
        writer = threading.Thread(target=file.write, args=([whole(second, size)],))
        writer.start()
        assert file.read([whole(back)]) == [crc]
        writer.join()
    assert torch.equal(back, first)


def test_errors_of_the_disk(io, tmp_path):
    faults = _C.DiskFaults()
    file = _C.DiskFile(str(tmp_path), 8 << 20, io, faults)
    data = random_bytes(8 << 20, 3)
    faults.writes_before_error = 2
    with pytest.raises(DiskError, match="writing 8 MiB of .* failed: Input/output error; check") as raised:
        file.write([whole(data)])
    assert str(tmp_path) in str(raised.value)
    faults.writes_before_error = 0
    faults.error_number = errno.ENOSPC
    with pytest.raises(DiskError, match="No space left on device; free space there"):
        file.write([whole(data)])
    faults.writes_before_error = -1
    file.write([whole(data)])
    faults.reads_before_error, faults.error_number = 0, errno.EIO
    with pytest.raises(DiskError, match="reading 8 MiB of"):
        file.read([whole(data)])
    faults.reads_before_error = -1
    assert file.read([whole(data)]) == [_C.crc32c(data.numpy())]


def test_a_wrong_bit_is_another_checksum(io, tmp_path):
    faults = _C.DiskFaults()
    file = _C.DiskFile(str(tmp_path), 4 << 20, io, faults)
    data = random_bytes(4 << 20, 4)
    crcs = file.write([whole(data)])
    faults.reads_before_flip = 1
    assert file.read([whole(data)]) != crcs
    assert file.read([whole(data)]) == crcs


def test_a_disk_without_room_is_found_at_once(tmp_path):
    free = os.statvfs(tmp_path)
    with pytest.raises(DiskError, match=r"need \d.*iB .*in /.*, where \d.*iB.* are free: .*Nothing was trained yet"):
        _C.DiskFile(str(tmp_path), 2 * free.f_blocks * free.f_frsize)
    with pytest.raises(DiskError, match="No such file or directory; make the folder"):
        _C.DiskFile(str(tmp_path / "none"), PAGE)


def test_a_limit_on_files_is_found_at_once(tmp_path):
    """In its own process: the limit cannot be raised again."""
    script = f"""
import resource
from patrickstar import DiskError, _C
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    _C.DiskFile({str(tmp_path)!r}, 2 << 20)
except DiskError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    output = run_python("-c", script).stdout
    assert "File too large; raise the limit of this process on the size of files (ulimit -f)" in output


def test_ranges_are_checked(tmp_path):
    file = _C.DiskFile(str(tmp_path), 2 * PAGE, _C.DiskIo.THREADS)
    data = aligned(2 * PAGE)
    for range_ in ((data.data_ptr(), PAGE, 2 * PAGE), (data.data_ptr() + 256, 0, PAGE), (data.data_ptr(), 0, 100)):
        with pytest.raises(ValueError, match="is not in a file of 8192 bytes, or no multiple of 4096"):
            file.write([range_])

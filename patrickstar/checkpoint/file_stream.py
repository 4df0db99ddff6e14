"""Bytes of a file, written past the page cache by threads while the next bytes are prepared.

    with FileStream(disk, fd, num_bytes) as stream:
        stream.append(data)            # any number of times; ``data`` may change afterwards
        stream.give(data, release)     # ``data`` may change after release()

A file in the page cache reaches the disk mostly when it is synced, and the disk idles while bytes are gathered. Blocks
that bypass the cache keep it busy from the begin. Small files, and file systems without direct writes, are written as
usual.

Appended bytes are copied into blocks. Given bytes are written from where they lie, if their address and their offset in
the file are the same modulo :data:`ALIGNMENT`; up to ``ALIGNMENT`` bytes at each end are copied.

Memory: :data:`_BLOCKS` blocks of :data:`_BLOCK_BYTES`.
"""

from __future__ import annotations

import errno
import mmap
import queue
import threading
from collections.abc import Callable

import numpy as np

from patrickstar.checkpoint.disk import Disk, write_all

ALIGNMENT = 4096
"""Alignment of direct writes: of bytes, offsets and memory."""
LEAST_UNCOPIED_BYTES = 2**20
"""Fewer given bytes are copied into a block, rather than written alone."""

_LEAST_BYTES = 64 * 2**20  # of a file; below that threads cost more than they save
_BLOCK_BYTES = 16 * 2**20  # a multiple of ALIGNMENT
_BLOCKS = 4  # one is filled while the others are written


class FileStream:
    """See the module's docstring. An error of the disk is raised by a later call."""

    def __init__(self, disk: Disk, fd: int, num_bytes: int):
        """``num_bytes``: of the whole file, which is empty."""
        self._disk, self._fd = disk, fd
        self._is_direct = num_bytes >= _LEAST_BYTES and disk.set_direct(fd, True)
        self._offset = 0  # of the block that is being filled
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._writers = [threading.Thread(target=self._work) for _ in range(_BLOCKS - 1 if self._is_direct else 0)]

    def __enter__(self) -> FileStream:
        if self._is_direct:
            self._block = _Block()
            for _ in self._writers:
                self._free.put(_Block())
        for writer in self._writers:
            writer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._failure = self._failure or error
        for _ in self._writers:
            self._full.put(None)
        for writer in self._writers:
            writer.join()
        if kind is None and self._is_direct:
            self._check()
            self._disk.set_direct(self._fd, False)  # the last block's size is not aligned
            write_all(self._disk, self._fd, self._block.data, self._offset)

    def append(self, data: memoryview) -> None:
        """Appends bytes."""
        if not self._is_direct:
            write_all(self._disk, self._fd, data)
            return
        while len(data) > 0:
            data = data[self._block.fill(data) :]
            if len(self._block.data) == _BLOCK_BYTES:
                self._send_block()

    def give(self, data: memoryview, release: Callable[[], None]) -> None:
        """Appends bytes that stay until ``release()``, which a thread calls when they are written."""
        head, body = self._split(data)
        if body == 0:
            self.append(data)
            release()
            return
        rest = memoryview(bytes(data[head + body :]))  # ``data`` may go before this call ends
        self.append(data[:head])
        if len(self._block.data) > 0:
            self._send_block()
        self._send(data[head : head + body], release)
        self.append(rest)

    def _split(self, data: memoryview) -> tuple[int, int]:
        """Bytes to be copied before the block ends at an aligned offset, and bytes to be written after it uncopied."""
        if not self._is_direct or len(data) < LEAST_UNCOPIED_BYTES:
            return 0, 0
        offset = self._offset + len(self._block.data)
        if (np.frombuffer(data, np.uint8).ctypes.data - offset) % ALIGNMENT != 0:
            return 0, 0
        head = -offset % ALIGNMENT
        return head, (len(data) - head) // ALIGNMENT * ALIGNMENT

    def _send_block(self) -> None:
        block = self._block
        self._send(block.data, lambda: self._free.put(block))
        self._block = self._free.get()
        self._block.clear()

    def _send(self, data: memoryview, release: Callable[[], None]) -> None:
        self._full.put((data, self._offset, release))
        self._offset += len(data)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (item := self._full.get()) is not None:
            data, offset, release = item
            try:
                if self._failure is None:
                    self._write(data, offset)
            except BaseException as error:
                self._failure = error
            try:
                release()
            except BaseException as error:
                self._failure = error

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            write_all(self._disk, self._fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._disk.set_direct(self._fd, False):
                raise
            write_all(self._disk, self._fd, data, offset)  # this file system wants another alignment


class _Block:
    """Memory at the begin of a page, and the bytes in it."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._size = 0

    @property
    def data(self) -> memoryview:
        return memoryview(self._bytes)[: self._size]

    def fill(self, data: memoryview) -> int:
        """Appends as many bytes as it has room for; returns how many. Other threads run meanwhile."""
        count = min(_BLOCK_BYTES - self._size, len(data))
        self._bytes[self._size : self._size + count] = np.frombuffer(data, np.uint8, count)
        self._size += count
        return count

    def clear(self) -> None:
        self._size = 0

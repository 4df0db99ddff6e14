"""Bytes of a file, written in blocks past the page cache while the next block is filled.

    with FileStream(disk, fd, num_bytes) as stream:
        stream.append(data)     # any number of times; ``data`` may change afterwards

A file in the page cache reaches the disk mostly when it is synced, and the disk idles while bytes are gathered. Blocks
that bypass the cache keep it busy from the begin. Small files, and file systems without direct writes, are written as
usual.

Memory: :data:`_BLOCKS` blocks of :data:`_BLOCK_BYTES`.
"""

from __future__ import annotations

import errno
import mmap
import queue
import threading

import numpy as np

from patrickstar.checkpoint.disk import Disk, write_all

_LEAST_BYTES = 64 * 2**20  # of a file; below that threads cost more than they save
_BLOCK_BYTES = 16 * 2**20  # a multiple of 4096, as direct writes want it
_BLOCKS = 4  # one is filled while the others are written


class FileStream:
    """See the module's docstring. An error of the disk is raised by a later call."""

    def __init__(self, disk: Disk, fd: int, num_bytes: int):
        """``num_bytes``: of the whole file, which is empty."""
        self._disk, self._fd = disk, fd
        self._is_direct = num_bytes >= _LEAST_BYTES and disk.set_direct(fd, True)
        self._offset = 0
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[_Block, int] | None] = queue.SimpleQueue()
        self._writers = [threading.Thread(target=self._work) for _ in range(_BLOCKS - 1 if self._is_direct else 0)]

    def __enter__(self) -> FileStream:
        if self._is_direct:
            self._block = _Block()
            for _ in self._writers:
                self._free.put(_Block())
        for writer in self._writers:
            writer.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
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
                self._full.put((self._block, self._offset))
                self._offset += _BLOCK_BYTES
                self._block = self._free.get()
                self._block.clear()
                self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (item := self._full.get()) is not None:
            block, offset = item
            try:
                if self._failure is None:
                    self._write(block.data, offset)
            except BaseException as error:
                self._failure = error
            self._free.put(block)

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

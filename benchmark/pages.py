"""Cost of device memory in pages: mapping a chunk's pages into one range of addresses, and unmapping them.

Pages of one size would need no buffer sizes and no free list by size, but a chunk is one range of addresses, so its
pages are mapped when it comes and unmapped when it leaves (CUDA's virtual memory management). ``benchmark.run pages``
times both, alone and beside a copy from pinned memory that runs on another stream.

* map, unmap: microseconds per chunk, median of ``--rounds``; map includes cuMemSetAccess.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from typing import Any

import torch

from benchmark.common import provenance

_PAGE = 2 << 20
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=50)


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    rows = [
        {"chunk_mib": 2 * pages, "pages": pages, "beside_a_copy": copying} | _times(pages, args.rounds, copying)
        for pages in (1, 8, 32, 128)
        for copying in (False, True)
    ]
    return {"case": "pages", "rows": rows, **provenance()}


def _times(pages: int, rounds: int, copying: bool) -> dict[str, float]:
    """Median microseconds of mapping and of unmapping ``pages`` pages of 2 MiB."""
    driver = ctypes.CDLL("libcuda.so.1")
    location = _Location(1, 0)
    properties = _Properties(1, 0, location)
    address, size = ctypes.c_uint64(), ctypes.c_size_t(pages * _PAGE)
    _check(driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0),
                                      ctypes.c_uint64(0)))  # fmt: skip
    handles = [ctypes.c_uint64() for _ in range(pages)]
    for handle in handles:
        _check(driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(_PAGE), ctypes.byref(properties),
                                  ctypes.c_uint64(0)))  # fmt: skip
    access = _Access(location, _READ_WRITE)
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    stream = torch.cuda.Stream()
    mapping, unmapping = [], []
    for _ in range(rounds):
        if copying:
            with torch.cuda.stream(stream):
                device.copy_(host, non_blocking=True)
        begin = time.perf_counter()
        for number, handle in enumerate(handles):
            at = ctypes.c_uint64(address.value + number * _PAGE)
            _check(driver.cuMemMap(at, ctypes.c_size_t(_PAGE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
        _check(driver.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)))
        mapped = time.perf_counter()
        _check(driver.cuMemUnmap(address, size))
        unmapping.append(time.perf_counter() - mapped)
        mapping.append(mapped - begin)
        stream.synchronize()
    for handle in handles:
        _check(driver.cuMemRelease(handle))
    _check(driver.cuMemAddressFree(address, size))
    return {"map_us": statistics.median(mapping) * 1e6, "unmap_us": statistics.median(unmapping) * 1e6}


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver returned error {result}")

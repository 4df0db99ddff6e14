"""Optimizer states on a disk: a step's bytes per second against sequential reads and writes of the same file system.

A GPT trains with a batch so small that only the disk takes time. Host memory is so small that the states of nearly all
chunks are on the disk.

* step: bytes read and written over the median time of the steps after the first two. A step's time begins when all
  updates of the step before are over.
* reference: as many bytes, or ``--reference``, read and written at the same time in the same folder, by threads that
  call ``preadv`` and ``pwritev`` past the file cache, as ``fio --ioengine=psync --direct=1`` does, without the engine.
* share: step over reference, reads and writes together; the goal is at least 0.85.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import mmap
import os
import statistics
import time
from typing import Any

import torch

from benchmark.common import GptShape, provenance
from benchmark.systems.weights import build_meta_model
from patrickstar import _C
from patrickstar.runtime import initialize_engine

GOAL = 0.85
_WARM_UP = 2
_BLOCK = 4 << 20
_THREADS = 4  # for each direction
_VOCAB, _LENGTH = 512, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", required=True, help="a folder on the disk")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24, help="1.2 B parameters with the default width")
    parser.add_argument("--chunk-numel", type=int, default=16 << 20, help="elements per chunk")
    parser.add_argument("--steps", type=int, default=8, help="including two that are not timed")
    parser.add_argument("--io", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--device-memory", metavar="SIZE", help="device_memory (default: what is free)")
    parser.add_argument("--host-memory", metavar="SIZE", help="host_memory (default: enough without states)")
    parser.add_argument(
        "--reference", type=int, metavar="BYTES", help="most that the reference reads, and writes (default: a step's)"
    )
    parser.add_argument("--states", choices=("fp32", "bf16", "8bit"), default="fp32")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError if no states are on the disk."""
    step = _train(args)
    moved = step["read_bytes"] + step["written_bytes"]
    if not moved:
        raise ValueError(
            f"no states are on the disk: host and device hold those of all {step['num_chunks']} chunks; give a larger "
            "model, or less --host-memory and --device-memory"
        )
    sizes = [step["read_bytes"], step["written_bytes"]]
    if args.reference is not None:
        sizes = [min(size, args.reference // _BLOCK * _BLOCK) for size in sizes]
    reference_gbps = sum(sizes) / _reference_seconds(args.path, *sizes) / 1e9
    step_gbps = moved / step["step_seconds"] / 1e9
    return {
        "case": "disk", **step, "step_gbps": step_gbps, "reference_bytes": sum(sizes),
        "reference_gbps": reference_gbps, "share": step_gbps / reference_gbps, "goal": GOAL, **provenance(),
    }  # fmt: skip


def _train(args: argparse.Namespace) -> dict[str, Any]:
    shape = GptShape(
        hidden=args.hidden, layers=args.layers, heads=16, vocab=_VOCAB, length=_LENGTH, checkpointing=False
    )
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "use_hybrid_adam": False}, "states": args.states},
        "bf16": {"enabled": True}, "default_chunk_size": args.chunk_numel, "steps_per_print": 0, "plan_cache": False,
    }  # fmt: skip
    if args.device_memory is not None:
        config["device_memory"] = args.device_memory
    config["host_memory"] = args.host_memory or _least_host_bytes(shape, config)
    config["disk_memory"] = {"path": args.path, "io": args.io}
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(lambda: build_meta_model(shape), 0, config)
    tokens = torch.randint(1, _VOCAB, (1, _LENGTH))
    ends, reports = [], []
    with engine:
        tokens = tokens.to(engine._session.device)
        for _ in range(args.steps):
            engine.backward(engine(input_ids=tokens, labels=tokens)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            # The forward waits for all updates but those of its last chunks: one period of the disk.
            ends.append(time.perf_counter())
            reports.append(engine.report())
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)][_WARM_UP - 1 :]
    last, before = reports[-1], reports[-2]
    return {
        "num_parameters": last["num_parameters"], "num_disk_chunks": last["num_disk_chunks"],
        "num_chunks": last["num_chunks"], "disk_io": last["disk_io"],
        "read_bytes": last["disk_read_bytes"] - before["disk_read_bytes"],
        "written_bytes": last["disk_written_bytes"] - before["disk_written_bytes"],
        "wait_seconds": last["disk_wait_seconds"] - before["disk_wait_seconds"], "seconds": seconds,
        "step_seconds": statistics.median(seconds),
    }  # fmt: skip


def _least_host_bytes(shape: GptShape, config: dict[str, Any]) -> int:
    """Host memory of a run whose states are all on the disk; touches no memory of the model."""
    with torch.device("meta"):
        model = shape.build()
    numels = [param.numel() for param in model.parameters()]
    states = {"fp32": _C.StateType.FLOAT32, "bf16": _C.StateType.BFLOAT16}
    accesses = [states.get(config["optimizer"]["states"])] * 2
    if accesses[0] is None:
        accesses = [_C.StateType.SIGNED8, _C.StateType.UNSIGNED8]
    formats = [_C.StateFormat(_C.StateType.FLOAT32, *accesses)] * len(numels)
    layout = _C.Layout.pack(
        numels, [_C.DType.BFLOAT16] * len(numels), [True] * len(numels), config["default_chunk_size"], states=formats
    )
    _, least, _ = _C.initial_placement(layout, 0, 0, _C.Backwards.ONE, _C.UNLIMITED)
    return int(least * 1.02) + (64 << 20)


def _reference_seconds(folder: str, read_bytes: int, written_bytes: int) -> float:
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, read_bytes + written_bytes)
        _move(fd, os.pwritev, 0, read_bytes)  # data to read
        os.fsync(fd)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(2) as both:
            jobs = [
                both.submit(_move, fd, os.preadv, 0, read_bytes),
                both.submit(_move, fd, os.pwritev, read_bytes, written_bytes),
            ]
            for job in jobs:
                job.result()
        return time.perf_counter() - begin
    finally:
        os.close(fd)


def _move(fd: int, call: Any, offset: int, num_bytes: int) -> None:
    """Moves all bytes by a few threads, one block at a time each."""

    def work(index: int) -> None:
        block = mmap.mmap(-1, _BLOCK)
        for begin in range(index * _BLOCK, num_bytes, _THREADS * _BLOCK):
            size = min(_BLOCK, num_bytes - begin)
            done = call(fd, [memoryview(block)[:size]], offset + begin)
            assert done == size

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(work, range(_THREADS)))


def format_table(result: dict[str, Any]) -> str:
    return (
        f"{result['num_parameters'] / 1e6:.0f} M parameters, states of {result['num_disk_chunks']} of "
        f"{result['num_chunks']} chunks on disk by {result['disk_io']}\n"
        f"a step of {result['step_seconds']:.3f} s reads {result['read_bytes'] / 1e9:.2f} GB and writes "
        f"{result['written_bytes'] / 1e9:.2f} GB: {result['step_gbps']:.2f} GB/s; updates waited "
        f"{result['wait_seconds']:.3f} s for it\n"
        f"{result['reference_bytes'] / 1e9:.2f} GB by threads without an engine: "
        f"{result['reference_gbps']:.2f} GB/s; share {result['share']:.2f} (goal at least {result['goal']})"
    )

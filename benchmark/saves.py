"""Checkpoints that a thread completes while training goes on, beside ``torch.distributed.checkpoint``.

* waited: seconds until the call returns. complete: until the checkpoint is on the disk.
* steps: median of those before the save (the second half) and after it, and of those that end while it runs.
* host: resident memory beyond that before the call, looked at after the call and each step.
* DCP: the model in float32 with bfloat16 autocast and fused AdamW, all on the GPU, as a user of plain PyTorch has it.
* disk: GB/s of one file of 4 GiB, with fsync.
* no save: CPU seconds of steps in pairs, after a save that is over and without its look in the step: the median ratio,
  and quartiles.

Each system runs in a process of its own, DCP last. All end with ``--timeout``, and the table has what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark.common import SHAPES, provenance, show
from benchmark.launch import launch
from benchmark.saves_worker import KINDS, SYSTEMS, Job
from benchmark.steps import add_engine_arguments, make_job

_WORKER = "benchmark.saves_worker"
_DISK_BYTES = 4 * 2**30
_BYTES_OF_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * 260 / 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--folder", type=Path, help="(default: a temporary one)")
    parser.add_argument("--saves", type=int, default=2, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--pairs", type=int, default=20, help="of steps without a save; 0: none")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="of all systems together")
    parser.set_defaults(steps=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains and saves. The rows are saves."""
    deadline = time.monotonic() + args.timeout
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    found: dict[str, Any] = {"case": "saves", "model": args.model, "rows": [], "no_save": None, "failures": {}}
    try:
        found["num_bytes"] = sizes = {system: _num_bytes(args, system) for system in args.systems}
        check_room(args.model, max(sizes.values()), shutil.disk_usage(folder).free)
        found["disk"] = _disk_rate(folder)
        show(f"disk {found['disk']:.2f} GB/s")
        for system in args.systems:
            job = Job(
                system=system, ranks=1, training=dataclasses.asdict(make_job(args, 1.0)), further=args.further,
                kinds=args.kinds, saves=args.saves, pairs=args.pairs, folder=str(folder), num_bytes=sizes[system],
            )  # fmt: skip
            failure = launch(
                _WORKER, job, timeout_seconds=max(deadline - time.monotonic(), 0.0),
                take=lambda _rank, event: _take(event, found),
            )  # fmt: skip
            if failure is not None:
                show(failure.log_tail)
                found["failures"][system] = str(failure)
            for left in folder.iterdir():
                shutil.rmtree(left)
    finally:
        shutil.rmtree(folder)
    return found | provenance()


def _num_bytes(args: argparse.Namespace, system: str) -> int:
    """Bytes of a checkpoint's tensors, of a model that has all moments in one format."""
    values = 2.0 if args.master == "stochastic" else 4.0
    is_ours = system == "patrickstar"
    per_parameter = values + _BYTES_OF_MOMENTS[args.states] if is_ours else 4.0 + _BYTES_OF_MOMENTS["fp32"]
    return int(SHAPES[args.model].num_parameters() * per_parameter)


def check_room(model: str, num_bytes: int, free_bytes: int) -> None:
    """Raises SystemExit unless a checkpoint of so many bytes fits on the disk, with a hundredth to spare."""
    if max(num_bytes * 1.01, _DISK_BYTES) > free_bytes:
        raise SystemExit(
            f"a checkpoint of {model} takes {num_bytes / 1e9:.1f} GB, and its disk has {free_bytes / 1e9:.1f} GB free; "
            "choose another --folder, a smaller --model, or --states 8bit"
        )


def _take(event: dict[str, Any], found: dict[str, Any]) -> None:
    if event["event"] == "no_save":
        found["no_save"] = event["quartiles"]
        show(_no_save_line(event["quartiles"]))
    else:
        found["rows"].append(event)
        show(_line(event))


def _disk_rate(folder: Path) -> float:
    data = memoryview(bytearray(os.urandom(2**20) * 64))
    begin = time.perf_counter()
    with (folder / "rate").open("wb", buffering=0) as file:
        for _ in range(_DISK_BYTES // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    (folder / "rate").unlink()
    return _DISK_BYTES / seconds / 1e9


def _line(row: dict[str, Any]) -> str:
    during = row["step_during"]
    meanwhile = "" if during is None else f", {during:.3f} during it: {during / row['step_beside']:.2f} x"
    return (
        f"{row['system']:12} {row['kind']:6} waited {row['waited']:7.2f} s, complete {row['complete']:7.2f} s, "
        f"{row['gb']:.1f} GB, {row['gb'] / row['complete']:.2f} GB/s, host +{row['host_bytes'] / 1e9:.1f} GB, steps "
        f"{row['step_beside']:.3f} s{meanwhile}"
    )


def _no_save_line(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"no save: CPU seconds of a step {middle:.4f} times ({low:.4f} to {high:.4f}) those without the look"


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{result['gpu']}, {result['model']}, disk {result['disk']:.2f} GB/s", *map(_line, result["rows"])]
    lines += [] if result["no_save"] is None else [_no_save_line(result["no_save"])]
    return "\n".join(lines + [f"{system} ended: {reason}" for system, reason in result["failures"].items()])

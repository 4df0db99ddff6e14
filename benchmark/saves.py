"""Checkpoints that a thread completes while training goes on, beside ``torch.distributed.checkpoint``.

* waited: seconds until the call returns. complete: until the checkpoint is on the disk.
* steps: median before the save, and of the steps that end while it runs.
* peer: the model in float32 with bfloat16 autocast and fused AdamW, all on the GPU, as a user of plain PyTorch has it.
* disk: GB/s of one file of 4 GiB, with fsync.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.common import provenance, show, synchronize, token_batch
from benchmark.steps import add_engine_arguments, make_job, timed_step

_STEPS = 10
_DISK_BYTES = 4 * 2**30
_KINDS = ["sync", "async"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--folder", type=Path, help="(default: a temporary one)")
    parser.add_argument("--saves", type=int, default=2, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    parser.set_defaults(steps=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains and saves. The rows are saves."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        rate = _disk_rate(folder)
        show(f"disk {rate:.2f} GB/s")
        rows = _engine_rows(args, folder) + _peer_rows(args, folder)
    finally:
        shutil.rmtree(folder)
    return {"case": "saves", "model": args.model, "disk": rate, "rows": rows, **provenance()}


def _engine_rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    job, device = make_job(args, 1.0), training_device()
    config = training_options(job).engine_config() | args.further
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    batches = _batches(job, device)

    def step() -> float:
        return timed_step(engine, optimizer, batches())[0]

    def save(target: Path, later: bool) -> Callable[[], bool]:
        engine.save_checkpoint(target, "tag", wait=not later)
        return lambda: not engine._session.saves.is_running  # each step looks whether it is over

    rows = [_row("patrickstar", kind, step, save, folder) for kind in args.kinds for _ in range(args.saves)]
    engine.discard()
    return rows


def _peer_rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from benchmark.ranks import training_device
    from benchmark.systems.weights import build_meta_model, fill_parameters

    gc.collect()
    job, device = make_job(args, 1.0), training_device()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = build_meta_model(job.shape).to_empty(device=device)
    fill_parameters(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = _batches(job, device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")

    def step() -> float:
        synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batches()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()
        return time.perf_counter() - begin

    def save(target: Path, later: bool) -> Callable[[], bool]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if not later:
            dcp.save(state, checkpoint_id=target)
            return lambda: True
        return dcp.async_save(state, checkpoint_id=target).done

    rows = [_row("DCP", kind, step, save, folder) for kind in args.kinds for _ in range(args.saves)]
    dist.destroy_process_group()
    return rows


def _row(
    system: str,
    kind: str,
    step: Callable[[], float],
    save: Callable[[Path, bool], Callable[[], bool]],
    folder: Path,
) -> dict[str, Any]:
    before = statistics.median([step() for _ in range(_STEPS)][_STEPS // 2 :])
    target = folder / "checkpoint"
    begin = time.perf_counter()
    is_over = save(target, kind == "async")
    waited = time.perf_counter() - begin
    during = []
    while not is_over():
        during.append(step())
    complete = time.perf_counter() - begin
    num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    shutil.rmtree(target)
    row = {
        "system": system, "kind": kind, "waited": waited, "complete": complete,
        "gb": num_bytes / 1e9, "step_before": before, "step_during": statistics.median(during) if during else None,
    }  # fmt: skip
    show(_line(row))
    return row


def _batches(job: Any, device: torch.device) -> Callable[[], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return lambda: {key: value.to(device) for key, value in token_batch(job.shape, job.batch, generator).items()}


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
    during = "-" if row["step_during"] is None else f"{row['step_during']:.3f}"
    return (
        f"{row['system']:12} {row['kind']:6} waited {row['waited']:7.2f} s, complete {row['complete']:7.2f} s, "
        f"{row['gb']:.1f} GB, {row['gb'] / row['complete']:.2f} GB/s, steps {row['step_before']:.3f} s before, "
        f"{during} during it"
    )


def format_table(result: dict[str, Any]) -> str:
    title = f"{result['gpu']}, {result['model']}, disk {result['disk']:.2f} GB/s"
    return "\n".join([title, *map(_line, result["rows"])])

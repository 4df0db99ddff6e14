"""One rank that trains one system on one long sequence (``benchmark.run longest``). It is started with the variables of
torchrun and the job as JSON; each rank writes a JSON line when its model is there and one after each step.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import torch

from benchmark.common import synchronize
from benchmark.longest_systems import SYSTEMS, Job, LongSystem
from benchmark.rank_jobs import add_result, work
from benchmark.systems.device import training_device
from benchmark.systems.events import peak_resident_bytes
from benchmark.systems.ranks import Barrier, RankPlace


def tokens_of_step(vocab: int, length: int, step: int) -> torch.Tensor:
    """The sequence of a step, [1, length], the same on all ranks and of all systems."""
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(step))


def run(job: Job) -> None:
    """Builds the system and runs the steps; does not return, since taking it all apart takes longer."""
    place = RankPlace.from_environment()
    barrier = Barrier(place)
    entry = SYSTEMS[job.system]
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module = importlib.import_module(f"benchmark.longest_systems.{entry.module}")
    begin = time.perf_counter()
    system: LongSystem = module.build(job, entry.variant)
    seconds = time.perf_counter() - begin
    add_result(job, {"rank": place.rank, "built": seconds, "version": system.version, "settings": system.settings})
    for step in range(job.steps):
        tokens = tokens_of_step(job.shape.vocab, job.length, step)
        barrier.wait()
        begin = time.perf_counter()
        loss = system.step(tokens)
        synchronize()
        seconds = time.perf_counter() - begin
        found = {"seconds": seconds, "loss": loss, "grad_norm": system.grad_norm()}
        add_result(job, {"rank": place.rank, "step": step, **found, **_peaks(system)})
    barrier.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _peaks(system: LongSystem) -> dict[str, int | None]:
    peaks = [torch.cuda.max_memory_reserved()] if torch.cuda.is_available() else []
    own = system.device_peak_bytes()
    if own is not None:
        peaks.append(own)
    return {"device_peak_bytes": max(peaks, default=None), "host_peak_bytes": peak_resident_bytes()}


if __name__ == "__main__":
    work(run, Job)

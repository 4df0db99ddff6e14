"""One rank of one system: ``python -m benchmark.systems.worker JOB FD``, started by ``benchmark.systems.run``.

Events in order: ``provenance`` (rank 0 alone), ``initialised``, ``step`` (each), ``measured``, then from rank 0
``profiled`` or ``not_profiled``. ``failed`` may come at any point.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
import transformers

from benchmark.common import provenance, synchronize, token_batch
from benchmark.launch import others_resident_bytes, peak_resident_bytes
from benchmark.ranks import Barrier, EventWriter, RankPlace, describe, training_device, work
from benchmark.systems import Job, System
from benchmark.systems.gpu_activity import NUM_PROFILED_STEPS, profile_step

_BATCH_SEED = 1  # of rank 0 and the ranks that share its batch; the others have the next seeds


class StepTimer:
    """Steps of one system, each timed from the batch on the host to an idle device. All ranks begin a step together."""

    def __init__(self, job: Job, system: System, place: RankPlace, barrier: Barrier):
        self._job = job
        self._system = system
        self._barrier = barrier
        self._generator = torch.Generator().manual_seed(_BATCH_SEED + place.rank // job.ranks_per_batch)

    def run(self) -> tuple[float, float]:
        """Seconds and loss of one step, both this rank's."""
        system = self._system
        tokens = token_batch(self._job.shape, self._job.batch, self._generator)
        self._barrier.wait()
        begin = time.perf_counter()
        loss = system.step({key: value.to(system.device) for key, value in tokens.items()}).item()
        synchronize()
        return time.perf_counter() - begin, loss


def train(job: Job, place: RankPlace, events: EventWriter) -> None:
    """Builds the system; runs warm-up and timed steps, then those of the profiler."""
    barrier = Barrier(place)
    spec = job.spec
    module = importlib.import_module(f"benchmark.systems.{spec.module}")
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.rank == 0:
        if spec.prepare is not None:
            getattr(module, spec.prepare)()
        events.send("provenance", **provenance(), transformers_version=transformers.__version__)
    barrier.wait()
    begin = time.perf_counter()
    system: System = getattr(module, spec.build)(job)
    init_seconds = time.perf_counter() - begin
    events.send("initialised", init_seconds=init_seconds, version=system.version, settings=system.settings)
    timer = StepTimer(job, system, place, barrier)
    for _ in range(job.warmup + job.steps):
        seconds, loss = timer.run()
        events.send("step", seconds=seconds, loss=loss, grad_norm=system.grad_norm() if job.clipping > 0 else None)
    barrier.wait()  # until here no rank may end or release shared memory
    report = system.report()
    events.send(
        "measured",
        device_peak_bytes=_device_peak_bytes(report),
        host_peak_bytes=_host_peak_bytes(place),
        report=report,
    )
    barrier.wait()
    if place.rank == 0:
        _profile(timer, job, events)
    elif torch.cuda.is_available() and job.is_profiled:
        for _ in range(NUM_PROFILED_STEPS):
            timer.run()


def _host_peak_bytes(place: RankPlace) -> int:
    """This rank's part of the sum over all ranks, in which memory shared now counts once."""
    shared = others_resident_bytes() if place.num_ranks > 1 else 0
    return peak_resident_bytes() - shared


def _device_peak_bytes(report: dict[str, Any]) -> int | None:
    """Peak reserved by PyTorch's allocator since the process began; None without a GPU.

    A system that resets the allocator's peaks, or simulates the device, reports its own peak.
    """
    peaks = [torch.cuda.max_memory_reserved()] if torch.cuda.is_available() else []
    if "device_peak_bytes" in report:
        peaks.append(report["device_peak_bytes"])
    return max(peaks, default=None)


def _profile(timer: StepTimer, job: Job, events: EventWriter) -> None:
    """The figures are already sent: a failure here costs the profile alone."""
    if not torch.cuda.is_available() or not job.is_profiled:
        events.send("not_profiled", reason="not asked for" if torch.cuda.is_available() else "no GPU")
        return
    try:
        events.send("profiled", **profile_step(lambda: timer.run() and None))
    except Exception as error:  # noqa: BLE001
        events.send("not_profiled", reason=describe(error))


if __name__ == "__main__":
    work(train, Job)

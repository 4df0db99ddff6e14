"""One rank of one system in a process of its own: ``python -m benchmark.systems.worker JOB FD``, started by
``launcher.py`` with the variables of torchrun.

``JOB`` is a :class:`~benchmark.systems.Job` as JSON; events go to the file descriptor ``FD``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch
import transformers

from benchmark.common import provenance, synchronize, token_batch
from benchmark.systems import SYSTEMS, Job, System
from benchmark.systems.device import training_device
from benchmark.systems.events import EventWriter, Outcome, others_resident_bytes, peak_resident_bytes
from benchmark.systems.gpu_activity import NUM_PROFILED_STEPS, profile_step
from benchmark.systems.ranks import Barrier, RankPlace

_BATCH_SEED = 1  # of rank 0 and those it shares matrices with; the others have the next ones
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StepTimer:
    """Steps of one system on one sequence of batches, each timed from the batch on the host to an idle device. All
    ranks begin a step together.
    """

    def __init__(self, job: Job, system: System, place: RankPlace, barrier: Barrier):
        self._job = job
        self._system = system
        self._barrier = barrier
        self._generator = torch.Generator().manual_seed(_BATCH_SEED + place.rank // job.ranks_per_batch)

    def run(self) -> tuple[float, float]:
        """One step; returns its seconds and its loss, both this rank's."""
        system = self._system
        tokens = token_batch(self._job.shape, self._job.batch, self._generator)
        self._barrier.wait()
        begin = time.perf_counter()
        loss = system.step({key: value.to(system.device) for key, value in tokens.items()}).item()
        synchronize()
        return time.perf_counter() - begin, loss


def train(job: Job, events: EventWriter, place: RankPlace) -> None:
    """Builds the system, runs warm-up and timed steps, and those of the profiler."""
    barrier = Barrier(place)
    spec = SYSTEMS[job.system]
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
    barrier.wait()  # until here no rank may end, nor give back memory that it shares
    report = system.report()
    events.send(
        "measured",
        device_peak_bytes=_device_peak_bytes(report),
        host_peak_bytes=_host_peak_bytes(place),
        report=report,
    )
    barrier.wait()
    if place.rank == 0:
        _profile(timer, events)
    elif torch.cuda.is_available():
        for _ in range(NUM_PROFILED_STEPS):
            timer.run()


def _host_peak_bytes(place: RankPlace) -> int:
    """This rank's part of what all ranks had at most. What they share, as it is now, counts once."""
    shared = others_resident_bytes() if place.num_ranks > 1 else 0
    return peak_resident_bytes() - shared


def _device_peak_bytes(report: dict[str, Any]) -> int | None:
    """What PyTorch's allocator reserved at most since the process began; None without a GPU.

    A system that resets the allocator's peaks for purposes of its own, or simulates the device, reports its own.
    """
    peaks = [torch.cuda.max_memory_reserved()] if torch.cuda.is_available() else []
    if "device_peak_bytes" in report:
        peaks.append(report["device_peak_bytes"])
    return max(peaks, default=None)


def _profile(timer: StepTimer, events: EventWriter) -> None:
    """The figures are already sent: what goes wrong here costs the profile alone."""
    if not torch.cuda.is_available():
        events.send("not_profiled", reason="no GPU")
        return
    try:
        events.send("profiled", **profile_step(lambda: timer.run() and None))
    except Exception as error:  # noqa: BLE001
        events.send("not_profiled", reason=_describe(error))


def _describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _outcome(error: BaseException) -> Outcome:
    """Allocators say that memory is exhausted in classes and words of their own."""
    by_class = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or type(error).__name__ == "MemoryBudgetError"
    by_words = any(words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory"))
    return Outcome.OUT_OF_MEMORY if by_class or by_words else Outcome.FAILED


def _end_with_parent() -> None:
    """The kernel kills this process when the launcher ends, however that ends; it is in no session with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    values: dict[str, Any] = json.loads(sys.argv[1])
    job = Job(**{field.name: values[field.name] for field in dataclasses.fields(Job)})
    events = EventWriter(os.fdopen(int(sys.argv[2]), "w", encoding="utf-8"))
    exit_code = 0
    try:
        train(job, events, RankPlace.from_environment())
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        events.send("failed", outcome=_outcome(error).value, reason=_describe(error))
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking a model of many GB apart, piece by piece, takes longer than letting the kernel have it back at once.
    os._exit(exit_code)


if __name__ == "__main__":
    main()

"""One process of ``benchmark.run saves``: a system that trains and saves."""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.common import synchronize, token_batch
from benchmark.ranks import EventWriter, training_device, work
from benchmark.steps import timed_step
from benchmark.systems import Job as TrainingJob
from patrickstar.machine.host_memory import available_bytes

KINDS = ["sync", "async"]
_STEPS_BEFORE, _STEPS_AFTER = 10, 5


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of one process."""

    system: str
    """A key of :data:`SYSTEMS`."""
    ranks: int
    training: dict[str, Any]
    """Fields of ``benchmark.systems.Job``."""
    further: dict[str, Any]
    """Keys of the engine's configuration."""
    kinds: list[str]
    saves: int
    """Number of saves of each kind."""
    pairs: int
    folder: str
    num_bytes: int
    """Size of a checkpoint's tensors."""


@dataclasses.dataclass
class _Trainer:
    """A system: a step, which returns its seconds; and a save, which returns whether it is over."""

    job: Job
    step: Callable[[], float]
    save: Callable[[Path, str], Callable[[], bool]]

    def send_rows(self, events: EventWriter) -> None:
        """Sends a row for each save."""
        for kind in self.job.kinds:
            for _ in range(self.job.saves):
                events.send("save", **self._row(kind))

    def _row(self, kind: str) -> dict[str, Any]:
        beside = [self.step() for _ in range(_STEPS_BEFORE)][_STEPS_BEFORE // 2 :]
        target = Path(self.job.folder) / "checkpoint"
        resident = _resident_bytes()
        begin = time.perf_counter()
        is_over = self.save(target, kind)
        waited = time.perf_counter() - begin
        most, during = _resident_bytes(), []
        while not is_over():
            during.append(self.step())
            most = max(most, _resident_bytes())
        complete = time.perf_counter() - begin
        num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        shutil.rmtree(target)
        beside += [self.step() for _ in range(_STEPS_AFTER)]
        return {
            "system": self.job.system, "kind": kind, "waited": waited, "complete": complete, "gb": num_bytes / 1e9,
            "host_bytes": max(most - resident, 0), "step_beside": statistics.median(beside),
            "step_during": statistics.median(during) if during else None, "steps_during": len(during),
        }  # fmt: skip


def _run_engine(job: Job, events: EventWriter) -> None:
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    training, device = TrainingJob(**job.training), training_device()
    config = training_options(training).engine_config() | job.further
    engine, optimizer = initialize_engine(lambda: build_job_model(training), device.index or 0, config)
    engine.train()
    batches = _batches(training, device)

    def step() -> float:
        return timed_step(engine, optimizer, batches())[0]

    def save(target: Path, kind: str) -> Callable[[], bool]:
        engine.save_checkpoint(target, "tag", wait=kind == "sync")
        return lambda: not engine._session.saves.is_running  # each step looks whether it is over

    _Trainer(job, step, save).send_rows(events)
    if job.pairs > 0:
        events.send("no_save", quartiles=_ratios_without_a_save(engine, step, job.pairs))


def _ratios_without_a_save(engine: Any, step: Callable[[], float], num_pairs: int) -> list[float]:
    """Quartiles; the first step of a pair alternates."""
    saves, ratios = engine._session.saves, []
    for number in range(num_pairs):
        seconds = {}
        for looks in (True, False) if number % 2 == 0 else (False, True):
            if not looks:
                saves.check = lambda _control: None  # in place of the class's
            begin = time.process_time()
            step()
            seconds[looks] = time.process_time() - begin
            vars(saves).pop("check", None)
        ratios.append(seconds[True] / seconds[False])
    return statistics.quantiles(ratios, n=4)


def _run_dcp(job: Job, events: EventWriter) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from benchmark.systems.weights import build_meta_model, fill_parameters

    training, device = TrainingJob(**job.training), training_device()
    model = build_meta_model(training.shape).to_empty(device=device)
    fill_parameters(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = _batches(training, device)
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

    def save(target: Path, kind: str) -> Callable[[], bool]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if kind == "sync":
            dcp.save(state, checkpoint_id=target)
            return lambda: True
        free = available_bytes()
        if free < job.num_bytes:
            raise MemoryError(f"its copy takes {job.num_bytes / 1e9:.1f} GB, the host has {free / 1e9:.1f} GB free")
        return dcp.async_save(state, checkpoint_id=target).done

    _Trainer(job, step, save).send_rows(events)


SYSTEMS: dict[str, Callable[[Job, EventWriter], None]] = {"patrickstar": _run_engine, "DCP": _run_dcp}


def _batches(job: TrainingJob, device: torch.device) -> Callable[[], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return lambda: {key: value.to(device) for key, value in token_batch(job.shape, job.batch, generator).items()}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    work(lambda job, _place, events: SYSTEMS[job.system](job, events), Job)

"""One process of ``benchmark.run resize``: it trains and resizes, or restarts from a checkpoint."""

from __future__ import annotations

import time

IMPORTED_FROM = time.time()

import dataclasses  # noqa: E402 (imports are timed)
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from benchmark.common import SHAPES, token_batch  # noqa: E402
from benchmark.ranks import EventWriter, RankPlace, work  # noqa: E402
from benchmark.step_counts import counts, in_words, levels, since  # noqa: E402
from benchmark.systems.weights import build_meta_model  # noqa: E402
from patrickstar.elastic import Membership, ResizePhase  # noqa: E402
from patrickstar.ranks.passing import prepare_to_pass  # noqa: E402
from patrickstar.runtime import initialize_engine  # noqa: E402

IMPORTED = time.time()
_STEPS_AFTER = 4
_READY_SECONDS = 280.0  # rank_timeout_seconds of the configuration


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of one run's processes."""

    kind: str
    """``"resize"``, or ``"restart"``: load, train, save."""
    ranks: int
    """Processes."""
    few: int
    """Ranks before the first resize and after the last."""
    model: str
    length: int
    """Tokens per sequence."""
    batch: int
    steps: int
    config: dict[str, Any]
    rendezvous: str
    started: float
    """``time.time()`` before the processes were started."""
    loads: str
    saves: str
    """Folders of checkpoints; "": none."""
    folder: str
    """Joining processes create ``ready.N`` in it."""


class _Process:
    def __init__(self, job: Job, number: int, events: EventWriter):
        self.job, self.number, self._events = job, number, events
        self.shape = dataclasses.replace(SHAPES[job.model], length=job.length)
        begin = time.time()
        build = lambda: build_meta_model(self.shape)  # noqa: E731
        self.engine, self.optimizer = initialize_engine(build, int(os.environ["LOCAL_RANK"]), job.config)
        self._batch = token_batch(self.shape, job.batch, torch.Generator().manual_seed(self.number))
        self.tell("initialised", seconds=time.time() - begin, num_parameters=self.shape.num_parameters())

    def tell(self, what: str, **found: Any) -> None:
        self._events.send(what, process=self.number, **found)

    def train(self, steps: int, when: str) -> None:
        seconds, losses, did = [], [], []
        before = counts(self.engine)
        for _ in range(steps):
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.engine(**self._batch)["loss"]
            self.engine.backward(loss)
            self.optimizer.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
            now = counts(self.engine)
            did.append(", ".join(in_words(since(before, now) | levels(self.engine))))
            before = now
        self.tell("steps", when=when, seconds=seconds, losses=losses, did=did)

    def change(self, direction: str) -> bool:
        """Resizes or joins; returns whether this process is a rank afterwards."""
        phases: list[tuple[str, float]] = []

        def note(phase: ResizePhase) -> None:
            phases.append((phase.name.lower(), time.time()))

        options: dict[str, Any] = {"rendezvous": self.job.rendezvous, "note_phase": note}
        begin = time.time()
        if direction == "join":
            resized = self.engine.join(**options, timeout_seconds=_READY_SECONDS)
        else:
            wanted = self.job.ranks if direction == "up" else self.job.few
            resized = self.engine.resize(wanted, **options, timeout_seconds=120.0)
        end = time.time()
        ends = [at for _, at in phases[1:]] + [end]
        seconds = {name: until - at for (name, at), until in zip(phases, ends, strict=True)}
        self.tell(
            "resized", direction=direction, begin=begin, end=end, phases=seconds, total_bytes=resized.total_bytes,
            membership=resized.membership.value,
        )  # fmt: skip
        return resized.membership is Membership.RANK

    def save(self) -> None:
        if self.job.saves:
            begin = time.time()
            self.engine.save_checkpoint(self.job.saves)
            self.tell("saved", seconds=time.time() - begin)


def _ready(job: Job, number: int) -> Path:
    return Path(job.folder, f"ready.{number}")


def _run(job: Job, place: RankPlace, events: EventWriter) -> None:
    process = _Process(job, int(os.environ["LOCAL_RANK"]), events)
    process.tell("imported", start=IMPORTED_FROM - job.started, imports=IMPORTED - IMPORTED_FROM)
    if job.kind == "restart":
        begin = time.time()
        process.engine.load_checkpoint(job.loads)
        process.tell("loaded", seconds=time.time() - begin, since_start=time.time() - job.started)
        process.train(_STEPS_AFTER, "after the restart")
        process.save()
        process.engine.discard()
        return
    if process.number < job.few:
        prepare_to_pass(process.engine.device)  # as ElasticRun does
    if process.number >= job.few:
        _ready(job, process.number).touch()
        process.change("join")
    else:
        process.train(job.steps, "before")
        deadline = time.monotonic() + _READY_SECONDS
        while not all(_ready(job, number).exists() for number in range(job.few, job.ranks)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes that join are not ready after {_READY_SECONDS:g} s")
            time.sleep(0.02)
        time.sleep(0.5)  # joining processes register at the rendezvous
        process.change("up")
    process.train(_STEPS_AFTER, "after the resize up")
    if not process.change("down"):
        return
    process.train(_STEPS_AFTER, "after the resize down")
    process.save()
    process.engine.discard()


if __name__ == "__main__":
    work(_run, Job)

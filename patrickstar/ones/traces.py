"""Traces of jobs: a format of JSON lines, and learning curves.

The first line is ``{"format": "patrickstar.ones.trace", "version": 2}``; each further one is a :class:`TraceJob` by
field names, with the job and its throughput as nested objects. Version 1 gave the lengths of jobs away and is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patrickstar.ones.jobs import Cluster, Job, Throughput

FORMAT = {"format": "patrickstar.ones.trace", "version": 2}


class Curve(enum.Enum):
    """Families of learning curves: the part of the loss still to fall, after ``x`` times the curve's scale."""

    POWER = "power"
    """``(1 + x)^-0.7``: falls for ever."""
    EXPONENTIAL = "exponential"
    """``exp(-x)``: a plateau after some scales."""
    STEPS = "steps"
    """Plateaus, each half as high, that begin at doubling distances: a learning rate that decays in steps."""

    def left(self, x: float) -> float:
        """1 at 0, falling."""
        if self is Curve.POWER:
            return (1 + x) ** -0.7
        if self is Curve.EXPONENTIAL:
            return math.exp(-x)
        level = math.floor(math.log2(1 + x))
        start = 2.0**level - 1
        return 0.5**level * (0.6 + 0.4 * math.exp(-4 * (x - start) / 2.0**level))


@dataclasses.dataclass(frozen=True)
class TraceJob:
    """A job with its true speed and noise scale, and further properties that only the simulator knows."""

    job: Job
    samples: float
    """Its work: samples at the base batch, after which it ends."""
    initial_loss: float = 1.0
    """Loss before training."""
    floor: float = 0.1
    """Fraction of the initial loss below which training never gets."""
    accuracy: float = 0.9
    """Limit of the accuracy."""
    curve: Curve = Curve.POWER
    """Family of loss and accuracy."""
    curve_samples: float = 1e6
    """The curve's scale in samples of the base batch. It says nothing about the job's work."""
    noise: float = 0.03
    """Standard deviation of losses and accuracies, relative."""
    noise_seed: int = 0
    """Seed of all noise: losses, accuracies, measured step times and noise scales."""
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Relative speed of computing by type of GPUs, for the types that it may have; 1: as its throughput says. Empty:
    all types, and all are equal.
    """
    fit_error: float = 0.0
    """An estimate fitted to the loss is ``exp(fit_error * (1 - p))`` times the remaining work at progress ``p``."""

    def __post_init__(self) -> None:
        if not self.samples > 0 or not self.curve_samples > 0:
            raise ValueError(
                f"job {self.job.name}: samples {self.samples} and curve_samples {self.curve_samples} must be positive; "
                "correct them"
            )
        if not all(speed > 0 for speed in self.speeds.values()):
            raise ValueError(f"job {self.job.name}: speeds {dict(self.speeds)} must be positive; correct them")

    def kinds(self, pools: Mapping[str, Cluster]) -> list[str]:
        """Types of GPUs of a cluster that it may have."""
        return [kind for kind in pools if not self.speeds or kind in self.speeds]

    def measured(self, done_samples: float, epoch: int) -> tuple[float, float]:
        """Loss and accuracy after so many samples of the base batch, as measured at the end of an epoch."""
        noise = 1 + self.noise * np.random.default_rng((self.noise_seed, epoch)).standard_normal(2)
        left = self.curve.left(done_samples / self.curve_samples)
        loss = self.initial_loss * (self.floor + (1 - self.floor) * left)
        return float(loss * noise[0]), float(min(1.0, self.accuracy * (1 - left) * noise[1]))


def with_resize_s(trace: Sequence[TraceJob], resize_s: float) -> tuple[TraceJob, ...]:
    """The same jobs with another cost of a resize, in seconds."""
    return tuple(dataclasses.replace(item, job=dataclasses.replace(item.job, resize_s=resize_s)) for item in trace)


def write_trace(path: str | Path, trace: Sequence[TraceJob]) -> None:
    """Writes a trace, replacing an existing file."""
    lines = [json.dumps(FORMAT), *(json.dumps(_plain(item)) for item in trace)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(item: TraceJob) -> dict[str, Any]:
    return {**dataclasses.asdict(item), "curve": item.curve.value}


def read_trace(path: str | Path) -> tuple[TraceJob, ...]:
    """The jobs of a file, by arrival.

    Raises:
        ValueError: it is no trace, or a line of it is wrong (the message has its number).
        OSError: it cannot be read.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    if not lines or _object(path, 1, lines[0]) != FORMAT:
        raise ValueError(f"{path} is no trace: its first line must be {json.dumps(FORMAT)}")
    found: list[TraceJob] = []
    names: set[str] = set()
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        item = _item(path, number, _object(path, number, line))
        if item.job.name in names:
            raise ValueError(f"{path}:{number}: there is a job {item.job.name} before; give each its own name")
        names.add(item.job.name)
        found.append(item)
    return tuple(sorted(found, key=lambda item: item.job.arrival_s))


def _object(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}:{number}: {line[:40]!r} is no JSON object")
    return value


def _item(path: str | Path, number: int, fields: dict[str, Any]) -> TraceJob:
    try:
        job = dict(fields.pop("job"))
        throughput = Throughput(**job.pop("throughput"))
        for name in ("feasible_gpus", "feasible_batches"):
            job[name] = tuple(job.get(name, ()))
        curve = Curve(fields.pop("curve", Curve.POWER.value))
        return TraceJob(job=Job(throughput=throughput, **job), curve=curve, **fields)
    except (KeyError, TypeError, ValueError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}:{number}: {what}") from None

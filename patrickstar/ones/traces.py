"""Traces of jobs: a format of JSON lines, and generators.

The first line is ``{"format": "patrickstar.ones.trace", "version": 1}``; each further one is a :class:`TraceJob` by
field names, with the job and its throughput as nested objects.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, Job, Throughput, goodputs
from patrickstar.ones.policies.progress import HistoryRow

FORMAT = {"format": "patrickstar.ones.trace", "version": 1}
_NODE = Cluster(num_gpus=2**10, gpus_per_node=4)


@dataclasses.dataclass(frozen=True)
class TraceJob:
    """A job, with properties that only the simulator knows."""

    job: Job
    samples: float
    """Its work: samples at the base batch, after which it ends."""
    initial_loss: float = 1.0
    """Loss of its first epoch."""
    floor: float = 0.1
    """Fraction of the initial loss below which training never gets."""
    steepness: float = 20.0
    """Loss after the fraction ``p`` of the work is ``initial_loss * (floor + (1 - floor) / (1 + steepness * p))``."""
    accuracy: float = 0.9
    """Limit of the accuracy: after ``p`` it is this times ``1 - exp(-5 p)``."""
    noise_seed: int = 0
    """Seed of the noise on losses and accuracies (2 %)."""
    fit_error: float = 0.0
    """An estimate fitted to the loss is ``exp(fit_error * (1 - p))`` times the remaining work."""

    def __post_init__(self) -> None:
        if not self.samples > 0:
            raise ValueError(f"job {self.job.name} has {self.samples} samples of work; give more than 0")

    def curve(self, progress: float, epoch: int) -> tuple[float, float]:
        """Loss and accuracy after this fraction of the work, as measured at the end of an epoch."""
        noise = 1 + 0.02 * np.random.default_rng((self.noise_seed, epoch)).standard_normal(2)
        loss = self.initial_loss * (self.floor + (1 - self.floor) / (1 + self.steepness * progress))
        return float(loss * noise[0]), float(min(1.0, self.accuracy * (1 - math.exp(-5 * progress)) * noise[1]))


@dataclasses.dataclass(frozen=True)
class _Workload:
    name: str
    sample_ms: float
    million_params: float
    gpu_batch: int
    noise_scale: float
    initial_loss: float

    def throughput(self) -> Throughput:
        """Gradients of 4 bytes cross links of 10 GB/s twice, in half the time within a node.

        Each further GPU adds 1 % of the time between nodes.
        """
        sync = 2 * 4 * self.million_params * 1e6 / 10e9
        return Throughput(
            sample_s=self.sample_ms / 1e3, pass_s=0.01, sync_s=0.5 * sync, sync_growth_s=0.01 * sync, node_sync_s=sync,
            node_sync_growth_s=0.01 * sync, max_micro_batch=2 * self.gpu_batch,
        )  # fmt: skip


# The artifact's kinds of models: ten equally frequent workloads. Its trace has no speeds: milliseconds and noise scales
# are estimates for a GPU of 10 to 16 TFLOPS, parameters are those of the models.
_WORKLOADS = (
    _Workload("resnet18", 2.0, 11.7, 64, 1000, 2.3),
    _Workload("resnet34", 3.5, 21.8, 64, 1200, 2.3),
    _Workload("resnet50", 6.0, 25.6, 64, 2000, 6.9),
    _Workload("vgg16", 8.0, 138.0, 64, 800, 6.9),
    _Workload("vgg19", 9.5, 144.0, 64, 800, 6.9),
    _Workload("inception-v3", 8.0, 24.0, 64, 1500, 6.9),
    _Workload("googlenet", 3.0, 6.8, 64, 1000, 4.6),
    _Workload("alexnet", 1.0, 61.0, 128, 2000, 4.6),
    _Workload("bert-cola", 10.0, 110.0, 16, 200, 0.7),
    _Workload("bert-mrpc", 12.0, 110.0, 16, 150, 0.7),
)


def artifact_mix(
    num_jobs: int, seed: int, mean_gap_s: float = 30.0, resize_s: float = 5.0, mean_duration_s: float = 395.0
) -> tuple[TraceJob, ...]:
    """The mix of ONES' artifact: ten workloads and 2, 4, 8 or 16 GPUs, equally frequent, exponential gaps of 30 s.

    ``mean_duration_s`` is the mean duration of a job on its requested GPUs, log-normal with a sigma of 0.7. (The
    artifact's Tiresias, which runs jobs as requested, executes for 395 s on average.)
    """
    rng = np.random.default_rng((seed, 1))
    sigma = 0.7
    return _generate(
        num_jobs, rng, mean_gap_s, resize_s, lambda: int(rng.choice([2, 4, 8, 16])),
        lambda: mean_duration_s * math.exp(sigma * rng.standard_normal() - sigma**2 / 2),
    )  # fmt: skip


def philly_like(
    num_jobs: int, seed: int, mean_gap_s: float = 60.0, resize_s: float = 5.0, median_duration_s: float = 800.0
) -> tuple[TraceJob, ...]:
    """Heavy tails in the manner of the Philly trace: most jobs request one GPU and are short, a few run for days.

    Log-normal durations with a sigma of 1.8, at most ten days; 1 GPU with probability 0.7, 2, 4, 8, 16 with 0.1, 0.1,
    0.07 and 0.03. The shape is the trace's, the numbers are ours.
    """
    rng = np.random.default_rng((seed, 2))
    return _generate(
        num_jobs, rng, mean_gap_s, resize_s, lambda: int(rng.choice([1, 2, 4, 8, 16], p=[0.7, 0.1, 0.1, 0.07, 0.03])),
        lambda: min(10 * 86400.0, median_duration_s * math.exp(1.8 * rng.standard_normal())),
    )  # fmt: skip


MIXES: dict[str, Callable[..., tuple[TraceJob, ...]]] = {"artifact": artifact_mix, "philly-like": philly_like}
"""Generators by name; each takes ``num_jobs``, ``seed``, ``mean_gap_s`` and ``resize_s``."""


def _generate(
    num_jobs: int,
    rng: np.random.Generator,
    mean_gap_s: float,
    resize_s: float,
    draw_gpus: Callable[[], int],
    draw_duration_s: Callable[[], float],
) -> tuple[TraceJob, ...]:
    jobs = []
    now = 0.0
    for index in range(num_jobs):
        workload = _WORKLOADS[int(rng.integers(len(_WORKLOADS)))]
        requested = draw_gpus()
        job = Job(
            name=f"{index:04d}-{workload.name}", arrival_s=now, min_gpus=1, max_gpus=4 * requested,
            requested_gpus=requested, gpu_batch=workload.gpu_batch, base_batch=workload.gpu_batch,
            max_batch=16 * workload.gpu_batch, epoch_samples=1.0, throughput=workload.throughput(),
            noise_scale=workload.noise_scale * math.exp(0.4 * rng.standard_normal()), resize_s=resize_s,
            workload=workload.name,
        )  # fmt: skip
        samples = draw_duration_s() * float(goodputs(job, BatchRule.CONFIGURED, _NODE)[requested])
        epochs = max(3.0, 30 * math.exp(0.5 * rng.standard_normal()))
        jobs.append(
            TraceJob(
                job=dataclasses.replace(job, epoch_samples=samples / epochs), samples=samples,
                initial_loss=workload.initial_loss * math.exp(0.05 * rng.standard_normal()),
                floor=float(rng.uniform(0.05, 0.3)), steepness=20 * math.exp(0.5 * rng.standard_normal()),
                accuracy=float(rng.uniform(0.7, 0.95)), noise_seed=int(rng.integers(2**31)),
                fit_error=0.4 * float(rng.standard_normal()),
            )
        )  # fmt: skip
        now += float(rng.exponential(mean_gap_s))
    return tuple(jobs)


def history(seed: int, num_jobs: int = 20) -> tuple[HistoryRow, ...]:
    """The predictors' initial data: epochs of jobs that ended earlier, as many as in the artifact. They are drawn from
    the artifact's mix with a separate seed, and ran on their requested GPUs.
    """
    rows = []
    for item in artifact_mix(num_jobs, seed + 10**6):
        job = item.job
        batch = job.batch_size(job.requested_gpus, BatchRule.CONFIGURED, _NODE.gpus_per_node)
        worth = job.efficiency(batch)
        seen = item.samples / worth / job.epoch_samples
        for epoch in range(1, math.ceil(seen)):
            loss, accuracy = item.curve(epoch / seen, epoch)
            rows.append(
                HistoryRow(
                    epoch_samples=job.epoch_samples, initial_loss=item.curve(1 / seen, 1)[0], loss=loss,
                    accuracy=accuracy, epochs_seen=epoch, epochs_done=epoch * worth, progress_seen=epoch / seen,
                    progress_done=epoch / seen,
                )
            )  # fmt: skip
    return tuple(rows)


def with_resize_s(trace: Sequence[TraceJob], resize_s: float) -> tuple[TraceJob, ...]:
    """The same jobs with another cost of a resize, in seconds."""
    return tuple(dataclasses.replace(item, job=dataclasses.replace(item.job, resize_s=resize_s)) for item in trace)


def write_trace(path: str | Path, trace: Sequence[TraceJob]) -> None:
    """Writes a trace, replacing an existing file."""
    lines = [json.dumps(FORMAT), *(json.dumps(dataclasses.asdict(item)) for item in trace)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


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
        job["feasible_gpus"] = tuple(job.get("feasible_gpus", ()))
        return TraceJob(job=Job(throughput=throughput, **job), **fields)
    except (KeyError, TypeError, ValueError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}:{number}: {what}") from None

"""Generated traces: mixes of jobs in which nothing observable tells a job's length.

Work, data-set size and the scale of the learning curve are drawn independently. Lengths are seconds on the requested
GPUs with the configured batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from patrickstar.ones.jobs import Cluster, Job, Throughput
from patrickstar.ones.traces import Curve, TraceJob

GPUS_PER_NODE = 4
"""Nodes in which a job's length is defined."""
_DAY_S = 3600.0  # of the diurnal mix


@dataclasses.dataclass(frozen=True)
class Workload:
    """A kind of model; milliseconds, noise scales and speeds are estimates for a V100."""

    name: str
    sample_ms: float
    million_params: float
    gpu_batch: int
    noise_scale: float
    initial_loss: float
    t4: float
    """Speed of computing on a T4, relative to a V100. Data sheets say 0.52 for all models."""
    a100: float
    """The same on an A100. Data sheets say 2.5."""

    def throughput(self) -> Throughput:
        """Gradients of 4 bytes cross links of 10 GB/s twice, in half the time within a node.

        Each further GPU adds 1 % of the time between nodes.
        """
        sync = 2 * 4 * self.million_params * 1e6 / 10e9
        return Throughput(
            sample_s=self.sample_ms / 1e3, pass_s=0.01, sync_s=0.5 * sync, sync_growth_s=0.01 * sync, node_sync_s=sync,
            node_sync_growth_s=0.01 * sync, max_micro_batch=2 * self.gpu_batch,
        )  # fmt: skip


# The models of ONES' artifact, equally frequent.
WORKLOADS = (
    Workload("resnet18", 2.0, 11.7, 64, 1000, 2.3, 0.50, 1.4),
    Workload("resnet34", 3.5, 21.8, 64, 1200, 2.3, 0.43, 1.5),
    Workload("resnet50", 6.0, 25.6, 64, 2000, 6.9, 0.37, 1.9),
    Workload("vgg16", 8.0, 138.0, 64, 800, 6.9, 0.33, 2.2),
    Workload("vgg19", 9.5, 144.0, 64, 800, 6.9, 0.33, 2.2),
    Workload("inception-v3", 8.0, 24.0, 64, 1500, 6.9, 0.40, 1.8),
    Workload("googlenet", 3.0, 6.8, 64, 1000, 4.6, 0.55, 1.4),
    Workload("alexnet", 1.0, 61.0, 128, 2000, 4.6, 0.77, 1.15),
    Workload("bert-cola", 10.0, 110.0, 16, 200, 0.7, 0.28, 2.5),
    Workload("bert-mrpc", 12.0, 110.0, 16, 150, 0.7, 0.28, 2.5),
)

TYPED_POOLS = {"T4": Cluster(24, 4), "V100": Cluster(24, 8), "A100": Cluster(16, 8)}
"""64 GPUs of three types, in the shape of Sia's cluster: its 24 RTX 6000 are V100s here."""

_Drawn = Callable[[np.random.Generator, int], np.ndarray]


def _log_normal(sigma: float, *, median: float = 0.0, mean: float = 0.0, most: float = math.inf) -> _Drawn:
    middle = median or mean * math.exp(-(sigma**2) / 2)
    return lambda rng, count: np.minimum(most, middle * np.exp(sigma * rng.standard_normal(count)))


def _quantiles(*points: tuple[float, float]) -> _Drawn:
    """A distribution by (cumulative probability, value), log-linear between them."""
    levels, values = zip(*points, strict=True)
    return lambda rng, count: np.exp(np.interp(rng.random(count), levels, np.log(values)))


def _choice(values: Sequence[int], weights: Sequence[float] | None = None) -> _Drawn:
    return lambda rng, count: rng.choice(values, count, p=weights)


def _poisson(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.exponential(1.0, count)


def _bursts(rng: np.random.Generator, count: int) -> np.ndarray:
    """Groups of twelve jobs, whose jobs are a fiftieth of the mean gap apart."""
    gaps = np.full(count, 0.02)
    gaps[11::12] = 12.0
    return gaps


@dataclasses.dataclass(frozen=True)
class Mix:
    """A kind of trace."""

    about: str
    """For users, one line."""
    num_jobs: int
    """By default."""
    mean_gap_s: float
    """Mean time between arrivals by default."""
    lengths_s: _Drawn
    gpus: _Drawn
    gaps: _Drawn = _poisson
    """Times between arrivals over their mean."""
    swing: float = 0.0
    """The rate of arrivals varies by this part over a day of an hour."""
    giant_s: float = 0.0
    """Length of the first job, which requests 16 GPUs; 0: it is like the others."""


# Execution times of the artifact's 50 jobs under its Tiresias (out/TIRESIAS_profile.csv), which runs them as requested.
_ARTIFACT_LENGTHS_S = _quantiles(
    (0.0, 37.0), (0.1, 66.0), (0.25, 103.0), (0.5, 153.0), (0.75, 193.0), (0.86, 260.0), (0.92, 535.0), (0.96, 1357.0),
    (1.0, 8070.0),
)  # fmt: skip

MIXES = {
    "artifact": Mix(
        "ONES' artifact: ten models, 2 to 16 GPUs, a job every 30 s; half end within 153 s, a few run for hours",
        50, 30.0, _ARTIFACT_LENGTHS_S, _choice([2, 4, 8, 16], [0.2, 0.3, 0.1, 0.4]),
    ),
    "philly-like": Mix(
        "heavy tail: most jobs request one GPU and are short, a few run for hours",
        100, 60.0, _log_normal(1.7, median=400.0, most=43200.0),
        _choice([1, 2, 4, 8, 16], [0.7, 0.1, 0.1, 0.07, 0.03]),
    ),
    "alibaba-like": Mix(
        "heavier tail: half of the jobs end within 150 s",
        120, 45.0, _log_normal(2.0, median=150.0, most=43200.0),
        _choice([1, 2, 4, 8, 16], [0.6, 0.2, 0.1, 0.06, 0.04]),
    ),
    "bursts": Mix(
        "twelve jobs at once, every six minutes",
        60, 30.0, _log_normal(1.0, mean=300.0), _choice([2, 4, 8, 16]), _bursts,
    ),
    "giant": Mix(
        "one job of an hour on 16 GPUs among short ones on 1, 2 or 4",
        150, 10.0, _log_normal(0.7, mean=240.0), _choice([1, 2, 4]), giant_s=3600.0,
    ),
    "diurnal": Mix(
        "arrivals nine times as frequent at the peak as at the trough of a day, which lasts an hour",
        100, 30.0, _log_normal(1.2, mean=600.0), _choice([1, 2, 4, 8], [0.4, 0.2, 0.2, 0.2]), swing=0.8,
    ),
}  # fmt: skip
"""By name."""


def make_trace(
    mix: str, seed: int, num_jobs: int | None = None, mean_gap_s: float | None = None, resize_s: float = 5.0
) -> tuple[TraceJob, ...]:
    """Draws a trace; defaults are the mix's.

    Raises:
        ValueError: there is no mix of that name.
    """
    if mix not in MIXES:
        raise ValueError(f"there is no mix {mix!r}; choose among {', '.join(MIXES)}")
    kind = MIXES[mix]
    count = kind.num_jobs if num_jobs is None else num_jobs
    rng = np.random.default_rng((seed, list(MIXES).index(mix)))
    lengths, gpus, gaps = kind.lengths_s(rng, count), kind.gpus(rng, count), kind.gaps(rng, count)
    if kind.giant_s:
        lengths[0], gpus[0] = kind.giant_s, 16
    jobs, now = [], 0.0
    for index in range(count):
        jobs.append(draw_job(rng, index, now, int(gpus[index]), float(lengths[index]), resize_s))
        rate = 1 + kind.swing * math.sin(2 * math.pi * now / _DAY_S)
        now += float(gaps[index]) * (kind.mean_gap_s if mean_gap_s is None else mean_gap_s) / rate
    return tuple(jobs)


def draw_job(
    rng: np.random.Generator, index: int, arrival_s: float, gpus: int, length_s: float, resize_s: float
) -> TraceJob:
    """A job of this length on ``gpus`` GPUs; model, data set and learning curve are drawn without looking at it."""
    workload = WORKLOADS[int(rng.integers(len(WORKLOADS)))]
    job = Job(
        name=f"{index:04d}-{workload.name}", arrival_s=arrival_s, min_gpus=1, max_gpus=4 * gpus,
        requested_gpus=gpus, gpu_batch=workload.gpu_batch, base_batch=workload.gpu_batch,
        max_batch=16 * workload.gpu_batch, epoch_samples=1.0, throughput=workload.throughput(),
        noise_scale=workload.noise_scale * math.exp(0.4 * rng.standard_normal()), resize_s=resize_s,
        workload=workload.name, num_parameters=int(1e6 * workload.million_params),
    )  # fmt: skip
    one_gpu = float(job.goodput(1, workload.gpu_batch, 1))
    return TraceJob(
        job=dataclasses.replace(job, epoch_samples=40.0 * one_gpu * math.exp(rng.standard_normal())),
        samples=length_s * job.reference_goodput(GPUS_PER_NODE),
        initial_loss=workload.initial_loss * math.exp(0.05 * rng.standard_normal()),
        floor=float(rng.uniform(0.05, 0.3)), accuracy=float(rng.uniform(0.7, 0.95)),
        curve=list(Curve)[int(rng.integers(len(Curve)))],
        curve_samples=300.0 * one_gpu * math.exp(rng.standard_normal()),
        noise=float(rng.uniform(0.01, 0.05)), noise_seed=int(rng.integers(2**31)),
        fit_error=0.4 * float(rng.standard_normal()),
    )  # fmt: skip


def on_types(trace: Sequence[TraceJob], kinds: Sequence[str]) -> tuple[TraceJob, ...]:
    """The same jobs with the speeds of their models on types of GPUs.

    Raises:
        ValueError: the speed of a model on a type is unknown.
    """
    speeds = {one.name: {"T4": one.t4, "V100": 1.0, "A100": one.a100} for one in WORKLOADS}
    for item in trace:
        known = speeds.get(item.job.workload, {})
        if missing := [kind for kind in kinds if kind not in known]:
            raise ValueError(
                f"the speed of {item.job.workload or 'a model without a name'} (job {item.job.name}) on a GPU of type "
                f"{', '.join(missing)} is unknown; known are {', '.join(known) or 'none'}"
            )
    return tuple(
        dataclasses.replace(item, speeds={kind: speeds[item.job.workload][kind] for kind in kinds}) for item in trace
    )

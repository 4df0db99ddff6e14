"""Jobs and clusters from a scheduler's view: feasible numbers of GPUs, speed, and the cost of a resize.

Speed and noise scale are measurements (:mod:`patrickstar.ones.measurements`). A job's total work is not included: no
scheduler of a real cluster knows it. Standard library and numpy only.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

import numpy as np

_BATCH_SIZES_TRIED = 17
_Ints = int | np.ndarray


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal nodes; GPU ``g`` is in node ``g // gpus_per_node``."""

    num_gpus: int
    """All GPUs, numbered from 0."""
    gpus_per_node: int = 4
    """GPUs of one node; the last node may have fewer."""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"a cluster's {name} is {getattr(self, name)}; give at least 1")

    def num_nodes_of(self, gpus: tuple[int, ...]) -> int:
        """Number of nodes that contain these GPUs."""
        return len({gpu // self.gpus_per_node for gpu in gpus})


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Step time by Pollux's model (OSDI 2021, section 4.1, with its gradient accumulation).

    A step of ``a`` passes over micro-batches takes ``(a - 1) C + (C^gamma + S^gamma)^(1/gamma)`` seconds. ``C = pass_s
    + sample_s * micro_batch`` is computation. ``S`` is gradient synchronisation: zero on one GPU, else ``latency +
    growth * (GPUs - 2)``, with separate constants within a node and between nodes.
    """

    sample_s: float
    """Seconds that one GPU computes for one more sample."""
    pass_s: float = 0.0
    """Seconds of a pass that do not depend on the samples in it."""
    sync_s: float = 0.0
    """Synchronisation seconds of two GPUs in one node."""
    sync_growth_s: float = 0.0
    """Additional seconds for each GPU beyond two, within a node."""
    node_sync_s: float = 0.0
    """Synchronisation seconds of two GPUs in two nodes."""
    node_sync_growth_s: float = 0.0
    """Additional seconds for each GPU beyond two, between nodes."""
    gamma: float = 2.0
    """1: computation and synchronisation are sequential; infinity: they overlap completely."""
    max_micro_batch: int = 2**30
    """Samples that one GPU takes in one pass; larger batches are accumulated."""

    def step_s(self, num_gpus: _Ints, batch_size: _Ints, num_nodes: _Ints = 1) -> Any:
        """Seconds of a step of ``batch_size`` samples, on all GPUs together; arguments broadcast as numpy's."""
        per_gpu = np.ceil(np.divide(batch_size, num_gpus))
        passes = np.ceil(per_gpu / self.max_micro_batch)
        compute = self.pass_s + self.sample_s * per_gpu / passes
        within = self.sync_s + self.sync_growth_s * np.subtract(num_gpus, 2)
        between = self.node_sync_s + self.node_sync_growth_s * np.subtract(num_gpus, 2)
        sync = np.where(np.equal(num_gpus, 1), 0.0, np.where(np.equal(num_nodes, 1), within, between))
        last = (compute**self.gamma + sync**self.gamma) ** (1 / self.gamma)
        return (passes - 1) * compute + last

    def on_faster(self, speed: float) -> Throughput:
        """The same job on GPUs that compute ``speed`` times as fast, with equal links."""
        return dataclasses.replace(self, sample_s=self.sample_s / speed, pass_s=self.pass_s / speed)

    def samples_per_s(self, num_gpus: _Ints, batch_size: _Ints, num_nodes: _Ints = 1) -> Any:
        """Samples per second, on all GPUs together."""
        return np.divide(batch_size, self.step_s(num_gpus, batch_size, num_nodes))


class BatchRule(enum.Enum):
    """Rules for a job's global batch, given its number of GPUs."""

    CONFIGURED = "configured"
    """A fixed number of samples per GPU, as the user wrote it, up to the job's largest batch. ONES' rule too."""
    BEST_GOODPUT = "best goodput"
    """The batch with the highest goodput, between the job's base batch and its largest one. Pollux' rule."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A submitted job, with its measured properties.

    Raises:
        ValueError: on construction, if limits contradict each other.
    """

    name: str
    """Unique in the cluster."""
    arrival_s: float
    """Time of submission, in seconds of the cluster's clock."""
    min_gpus: int
    """Minimum to run."""
    max_gpus: int
    """Maximum to be granted."""
    requested_gpus: int
    """The user's request; schedulers that change nothing grant exactly this."""
    gpu_batch: int
    """Samples per GPU and step, as the user wrote it."""
    base_batch: int
    """The global batch, in samples, at which statistical efficiency is 1 by definition."""
    max_batch: int
    """The largest global batch, in samples, up to which the learning rate is scaled."""
    epoch_samples: float
    """Samples of one epoch."""
    throughput: Throughput
    """Step time by number of GPUs and batch."""
    noise_scale: float
    """The gradient noise scale, in samples: variance of one sample's gradient over the gradient's squared norm."""
    resize_s: float = 0.0
    """Seconds without training at a resize, and at a restart after a stop: measured."""
    feasible_gpus: tuple[int, ...] = ()
    """Numbers of GPUs on which it fits, ascending; empty: all from ``min_gpus`` to ``max_gpus``."""
    workload: str = ""
    """A label for reports."""
    feasible_batches: tuple[int, ...] = ()
    """Global batches that it takes, ascending, each on numbers of GPUs that divide it; empty: any from ``base_batch``
    to ``max_batch``. While its noise scale is unknown (0), it keeps ``base_batch``.
    """
    inner_group: int = 1
    """GPUs that share samples; groups of them divide ``feasible_batches``."""
    num_parameters: int = 0
    """Parameters of its model, which its ranks count; 0: not reported yet."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_gpus <= self.requested_gpus <= self.max_gpus:
            raise ValueError(
                f"job {self.name}: min_gpus {self.min_gpus}, requested_gpus {self.requested_gpus} and max_gpus "
                f"{self.max_gpus} must be at least 1 and ascend; correct its limits"
            )
        if not 1 <= self.base_batch <= self.max_batch or not 1 <= self.gpu_batch <= self.max_batch:
            raise ValueError(
                f"job {self.name}: base_batch {self.base_batch} and gpu_batch {self.gpu_batch} must lie between 1 and "
                f"max_batch {self.max_batch}; correct its batches"
            )
        if self.epoch_samples <= 0 or self.noise_scale < 0 or self.resize_s < 0:
            raise ValueError(
                f"job {self.name}: epoch_samples {self.epoch_samples} must be positive, noise_scale "
                f"{self.noise_scale} and resize_s {self.resize_s} not negative; correct them"
            )
        if not all(self.min_gpus <= n <= self.max_gpus for n in self.feasible_gpus):
            raise ValueError(
                f"job {self.name}: feasible_gpus {self.feasible_gpus} must lie between min_gpus {self.min_gpus} and "
                f"max_gpus {self.max_gpus}; correct its limits"
            )

        if self.feasible_batches and self.base_batch not in self.feasible_batches:
            raise ValueError(
                f"job {self.name}: base_batch {self.base_batch} must be one of feasible_batches "
                f"{self.feasible_batches}; correct its batches"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All numbers of GPUs that it runs on, ascending."""
        found = self.feasible_gpus or tuple(range(self.min_gpus, self.max_gpus + 1))
        return tuple(n for n in found if self.batches_on(n)) if self.feasible_batches else found

    def batches_on(self, num_gpus: int) -> tuple[int, ...]:
        """Batches that it may have now on so many GPUs, of ``feasible_batches``."""
        return tuple(
            batch
            for batch in self.feasible_batches
            if batch % max(1, num_gpus // self.inner_group) == 0 and (self.noise_scale > 0 or batch == self.base_batch)
        )

    def largest_size(self, num_gpus: int) -> int:
        """The largest of :attr:`sizes` that is at most ``num_gpus``; 0 if there is none."""
        if not self.feasible_gpus and not self.feasible_batches:
            return min(num_gpus, self.max_gpus) if num_gpus >= self.min_gpus else 0
        return max((n for n in self.sizes if n <= num_gpus), default=0)

    def rigid_size(self, cluster: Cluster) -> int:
        """Size from a scheduler that changes no job: the request, or the nearest size below or above it."""
        most = min(self.requested_gpus, cluster.num_gpus)
        return self.largest_size(most) or self.sizes[0]

    def efficiency(self, batch_size: _Ints) -> Any:
        """Progress per sample at this global batch, relative to the base batch (Pollux, equation 7)."""
        return (self.noise_scale + self.base_batch) / (self.noise_scale + batch_size)

    def batch_size(self, num_gpus: int, rule: BatchRule, gpus_per_node: int) -> int:
        """The global batch, in samples, on so many GPUs."""
        if rule is BatchRule.CONFIGURED:
            wanted = int(_configured_batch(self, num_gpus))
            if not self.feasible_batches:
                return wanted
            tried = self.batches_on(num_gpus) or (self.base_batch,)  # a request may be for GPUs that it cannot use
            return max((batch for batch in tried if batch <= wanted), default=min(tried))
        return int(_packed(self, rule, max(num_gpus, self.max_gpus), gpus_per_node)[1][num_gpus])

    def goodput(self, num_gpus: _Ints, batch_size: _Ints, num_nodes: _Ints) -> Any:
        """Samples of the base batch per second: throughput times efficiency."""
        return self.throughput.samples_per_s(num_gpus, batch_size, num_nodes) * self.efficiency(batch_size)

    def reference_goodput(self, gpus_per_node: int) -> float:
        """Goodput as the user asked for it: requested GPUs, configured batch. Work over it is the job's length in
        seconds, which compares jobs of all models.
        """
        batch = self.batch_size(self.requested_gpus, BatchRule.CONFIGURED, gpus_per_node)
        return float(self.goodput(self.requested_gpus, batch, math.ceil(self.requested_gpus / gpus_per_node)))


def _configured_batch(job: Job, num_gpus: _Ints) -> Any:
    return np.maximum(num_gpus, np.minimum(job.gpu_batch * num_gpus, job.max_batch))


@functools.lru_cache(maxsize=2**12)
def _packed(job: Job, rule: BatchRule, most: int, gpus_per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """Goodput and batch on 0 to ``most`` GPUs, packed on as few nodes as possible."""
    sizes = np.arange(1, most + 1)
    if job.feasible_batches:
        return _packed_feasible(job, rule, most, gpus_per_node)
    if rule is BatchRule.CONFIGURED:
        tried = _configured_batch(job, sizes)[:, None]
    else:
        low, high = np.maximum(job.base_batch, sizes)[:, None], np.maximum(job.max_batch, sizes)[:, None]
        tried = np.rint(low * (high / low) ** np.linspace(0, 1, _BATCH_SIZES_TRIED)).astype(np.int64)
    speeds = job.goodput(sizes[:, None], tried, np.ceil(sizes / gpus_per_node)[:, None])
    best = speeds.argmax(axis=1)
    rows = np.arange(most)
    return np.append(0.0, speeds[rows, best]), np.append(0, tried[rows, best])


def _packed_feasible(job: Job, rule: BatchRule, most: int, gpus_per_node: int) -> tuple[np.ndarray, np.ndarray]:
    speeds, batches = np.zeros(most + 1), np.zeros(most + 1, dtype=np.int64)
    for size in job.sizes:
        tried = np.array(job.batches_on(size))
        if rule is BatchRule.CONFIGURED:
            tried = np.array([job.batch_size(size, rule, gpus_per_node)])
        found = job.goodput(size, tried, math.ceil(size / gpus_per_node))
        speeds[size], batches[size] = found.max(), tried[found.argmax()]
    return speeds, batches


@functools.lru_cache(maxsize=2**12)
def goodputs(job: Job, rule: BatchRule, cluster: Cluster) -> np.ndarray:
    """Goodput for each number of GPUs, packed on as few nodes as possible.

    Returns:
        float64 of shape ``[min(max_gpus, cluster's GPUs) + 1]``, samples per second; 0 where it does not run. The array
        is cached and read-only.
    """
    found = np.zeros(min(job.max_gpus, cluster.num_gpus) + 1)
    sizes = [n for n in job.sizes if n < len(found)]
    found[sizes] = _packed(job, rule, job.max_gpus, cluster.gpus_per_node)[0][sizes]
    found.setflags(write=False)
    return found


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A measured step."""

    num_gpus: int
    """Ranks that took part."""
    num_nodes: int
    """Nodes that they were on."""
    batch_size: int
    """Global batch, in samples."""
    seconds: float
    """Mean seconds of a step."""


@dataclasses.dataclass(frozen=True)
class JobState:
    """A job that has arrived and not finished, at one time: all information for a policy."""

    job: Job
    gpus: tuple[int, ...]
    """The GPUs that it holds, ascending; empty while it waits."""
    batch_size: int
    """Its global batch in samples; 0 while it waits."""
    done_samples: float
    """Progress in samples of the base batch, by the measured noise scale."""
    seen_samples: float
    """Processed samples, without weighting."""
    gpu_s: float
    """GPU-seconds that it has held so far: its attained service."""
    run_s: float
    """Seconds that it has held GPUs."""
    num_resizes: int
    """Resizes and restarts so far."""
    samples_since_resize: float
    """The part of ``seen_samples`` since its GPUs last changed."""
    run_since_resize_s: float
    """Seconds of training since then; 0 during the change."""
    waited_s: float
    """Seconds since it last held GPUs, or arrived; 0 while it holds some."""
    most_gpus: int
    """The most GPUs that it has held at a time."""
    observed: tuple[StepTime, ...]
    """Measurements, one for each number of GPUs, of nodes and batch, the oldest first."""
    initial_loss: float
    """Loss of its first epoch; 0 before that."""
    loss: float
    """Loss of its last finished epoch."""
    accuracy: float
    """Accuracy of its last evaluation, 0 to 1."""
    remaining_samples: float | None = None
    """Remaining work in samples of the base batch: for policies whose papers have it, None for all others."""

    @property
    def epochs(self) -> float:
        """Epochs seen."""
        return self.seen_samples / self.job.epoch_samples

    @property
    def has_started(self) -> bool:
        """True if it has ever held GPUs."""
        return self.most_gpus > 0


def check_fits(job: Job, cluster: Cluster) -> None:
    """Raises ValueError for a job that no allocation on this cluster can run; call it before the job is queued."""
    if job.sizes[0] > cluster.num_gpus:
        raise ValueError(
            f"job {job.name} needs at least {job.sizes[0]} GPUs and the cluster has {cluster.num_gpus}; lower its "
            "min_gpus, offload more, or submit it to a larger cluster"
        )

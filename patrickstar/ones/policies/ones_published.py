"""ONES (SC 2021, arXiv 2108.03645) as published: evolution of schedules; a schedule assigns a job or none to each GPU.

Reimplemented from its operators. One decision is one generation: refresh, uniform crossover, uniform mutation, padding,
selection by remaining GPU-seconds, reordering, deployment.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, JobState, StepTime
from patrickstar.ones.policies.progress import ProgressModel
from patrickstar.ones.policies.protocol import Allocation, Foresight, Grant, Sizes

_PREDICTED_FROM_EPOCHS = 2
_MUTATION = 0.3
_CROSSOVER = 0.5


class StartSize(enum.Enum):
    """GPUs of a job's first grant."""

    SMALLEST = "smallest"
    """The published code: one GPU."""
    REQUESTED = "requested"
    """The user's request, for comparison."""


class Prediction(enum.Enum):
    """Remaining samples of a job that has seen two epochs."""

    SAMPLED = "sampled"
    """The published code: from a progress drawn from its distribution, at each decision."""
    EXACT = "exact"
    """The truth, in samples of the base batch, for comparison."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The policy's constants. Defaults are the published code's as we read it; others show what each of them decides.

    A job's limit is the most GPUs that a schedule may give it.
    """

    start: StartSize = StartSize.SMALLEST
    """The first limit."""
    growth: float = 2.0
    """Factor of the limit once the job holds as many GPUs."""
    growth_epochs: float = 1.0
    """Epochs on its present GPUs before the limit grows."""
    stop_divisor: int = 2
    """Divides the limit of a job that was stopped; 1: the limit stays."""
    scale_down_from: float = 0.5
    """Share of the cluster from which the largest job loses GPUs, if it has run for longer than the median. Above 1:
    it never does.
    """
    cooldown_epochs: float = 1.0
    """Epochs on its present GPUs before a job's GPUs change."""
    prediction: Prediction = Prediction.SAMPLED
    """Estimate of the remaining work."""


class OnesPublished:
    """Uses measured raw throughput and a prediction of the remaining work; resizes are free in the fitness. Every grant
    is a contiguous range of GPUs.
    """

    sizes = Sizes.ANY

    def __init__(
        self,
        progress: ProgressModel,
        seed: int = 0,
        rules: Rules = Rules(),
        population: int = 16,
        interval_s: float = 1.0,
    ):
        self._rules = rules
        self.foresight = Foresight.EXACT if rules.prediction is Prediction.EXACT else Foresight.NONE
        self.interval_s = interval_s
        self._progress = progress
        self._size = population
        self._rng = np.random.default_rng(seed)
        self._population: np.ndarray | None = None
        self._names: list[str] = []
        self._limits: dict[str, int] = {}
        self._was_running: set[str] = set()

    def finished(self, now: float, state: JobState) -> None:
        """Learns from the job's epochs."""
        self._progress.finished(state)
        self._limits.pop(state.job.name, None)

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            self._population = None
            return {}
        for state in jobs:
            self._progress.watch(state)
        self._set_limits(jobs, cluster)
        grants = np.array([min(self._limits[state.job.name], state.job.max_gpus) for state in jobs])
        speeds = _measured_speeds(jobs, cluster)
        remaining = self._predicted_remaining(jobs)
        old = self._refreshed(jobs, cluster, grants)
        candidates = np.concatenate([old, self._crossed(old, grants), self._mutated(old, jobs)])
        order = np.argsort([left / speed for left, speed in zip(remaining, speeds[:, 1], strict=True)], kind="stable")
        candidates = _padded(candidates, jobs, grants, order)
        counts = count_jobs(candidates, len(jobs))
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = remaining / speeds[np.arange(len(jobs)), counts] * counts
        scores = np.where(counts > 0, seconds, 0.0).sum(axis=1)
        self._population = candidates[np.argsort(scores, kind="stable")[: self._size]]
        self._names = [state.job.name for state in jobs]
        allocation = self._deploy(self._population[0], jobs, cluster)
        self._was_running = set(allocation)
        return allocation

    def _set_limits(self, jobs: Sequence[JobState], cluster: Cluster) -> None:
        """Sets the most GPUs of each job: at first its start size, more when it fills it; less for long-running or
        stopped jobs.
        """
        rules = self._rules
        running = [state for state in jobs if state.gpus]
        median = float(np.median([state.run_s for state in running])) if running else 0.0
        for state in jobs:
            name, size = state.job.name, len(state.gpus)
            if name not in self._limits:
                smallest = rules.start is StartSize.SMALLEST
                self._limits[name] = state.job.sizes[0] if smallest else state.job.rigid_size(cluster)
            limit = self._limits[name]
            if size and size == limit and _epochs_on_its_gpus(state) >= rules.growth_epochs:
                self._limits[name] = min(cluster.num_gpus, int(rules.growth * limit))
            elif not size and name in self._was_running:
                self._limits[name] = max(limit // rules.stop_divisor, state.job.sizes[0])
        if running:
            largest = max(running, key=lambda state: len(state.gpus))
            size = len(largest.gpus)
            if size >= rules.scale_down_from * cluster.num_gpus and largest.run_s > median > 0:
                limit = max(1, int(2 * size / (largest.run_s / median + 1)))
                self._limits[largest.job.name] = max(limit + limit % 2, largest.job.sizes[0])

    def _predicted_remaining(self, jobs: Sequence[JobState]) -> np.ndarray:
        """Remaining samples: by default ``Y (1 / progress - 1)`` with a drawn progress; 0 for new jobs."""
        left = np.zeros(len(jobs))
        known = [i for i, state in enumerate(jobs) if state.epochs >= _PREDICTED_FROM_EPOCHS]
        if self._rules.prediction is Prediction.EXACT:
            left[known] = [jobs[i].remaining_samples or 0.0 for i in known]
        elif known:
            b = self._progress.epochs_left([jobs[i] for i in known])
            drawn = self._rng.beta([jobs[i].epochs for i in known], b)
            seen = np.array([jobs[i].seen_samples for i in known])
            left[known] = seen * (1 / np.clip(drawn, 1e-6, 1) - 1)
        return left

    def _refreshed(self, jobs: Sequence[JobState], cluster: Cluster, grants: np.ndarray) -> np.ndarray:
        """The population in the present order of jobs, without ended jobs and without GPUs beyond grants."""
        if self._population is None or self._population.shape[1] != cluster.num_gpus:
            return np.full((self._size, cluster.num_gpus), -1)
        today = {state.job.name: index for index, state in enumerate(jobs)}
        renamed = np.array([today.get(name, -1) for name in self._names] + [-1])
        return _trimmed(renamed[self._population], grants)

    def _crossed(self, old: np.ndarray, grants: np.ndarray) -> np.ndarray:
        half = len(old) // 2
        first, second = old[self._rng.integers(0, len(old), (2, half))]
        swaps = self._rng.random(first.shape) < _CROSSOVER
        return _trimmed(np.concatenate([np.where(swaps, second, first), np.where(swaps, first, second)]), grants)

    def _mutated(self, old: np.ndarray, jobs: Sequence[JobState]) -> np.ndarray:
        evicts = self._rng.random((len(old), len(jobs) + 1)) < _MUTATION
        evicts[:, :-1] &= np.array([state.epochs >= _PREDICTED_FROM_EPOCHS for state in jobs])
        return np.where(np.take_along_axis(evicts, old, axis=1), -1, old)

    def _deploy(self, row: np.ndarray, jobs: Sequence[JobState], cluster: Cluster) -> dict[str, Grant]:
        running = np.full(cluster.num_gpus, -1)
        for index, state in enumerate(jobs):
            running[list(state.gpus)] = index
        ranges = reorder(_snapped(row, jobs), running)
        wanted = {index: tuple(range(start, end)) for index, (start, end) in ranges.items()}
        wanted = self._allowed(wanted, jobs, running)
        grants = {}
        for index, gpus in wanted.items():
            job = jobs[index].job
            batch = job.batch_size(len(gpus), BatchRule.CONFIGURED, cluster.gpus_per_node)
            grants[job.name] = Grant(gpus, batch)
        return grants

    def _allowed(
        self, wanted: dict[int, tuple[int, ...]], jobs: Sequence[JobState], running: np.ndarray
    ) -> dict[int, tuple[int, ...]]:
        """The changes that are possible now. Changes that take each other's GPUs go together: all, if each running job
        among them may change, else none. Changes that affect no other running job go alone.
        """
        held = {index: state.gpus for index, state in enumerate(jobs) if state.gpus}
        changes = {i for i in held.keys() | wanted.keys() if held.get(i) != wanted.get(i)}
        together = {i: i for i in changes | held.keys()}

        def root(i: int) -> int:
            while together[i] != i:
                i = together[i]
            return i

        for index in changes:
            for other in {int(running[gpu]) for gpu in wanted.get(index, ())} - {-1}:
                together[root(index)] = root(other)
        blocked = {root(i) for i in changes & held.keys() if self._must_stay(jobs[i])}
        kept = {i: gpus for i, gpus in held.items() if i not in changes or root(i) in blocked}
        return kept | {i: wanted[i] for i in changes & wanted.keys() if root(i) not in blocked}

    def _must_stay(self, state: JobState) -> bool:
        return _epochs_on_its_gpus(state) < self._rules.cooldown_epochs


def _epochs_on_its_gpus(state: JobState) -> float:
    return state.samples_since_resize / state.job.epoch_samples


def count_jobs(rows: np.ndarray, num_jobs: int) -> np.ndarray:
    """GPUs of each job in each schedule: int64 ``[rows, num_jobs]`` for schedules ``[rows, GPUs]``, -1 for none."""
    flat = (rows + 1) + (num_jobs + 1) * np.arange(len(rows))[:, None]
    counted = np.bincount(flat.ravel(), minlength=(num_jobs + 1) * len(rows))
    return counted.reshape(len(rows), num_jobs + 1)[:, 1:]


def _trimmed(rows: np.ndarray, grants: np.ndarray) -> np.ndarray:
    """Removes the last GPUs of each job that has more than its grant."""
    order = np.argsort(rows, axis=1, kind="stable")
    ascending = np.take_along_axis(rows, order, axis=1)
    places = np.arange(rows.shape[1])
    starts = np.concatenate([np.ones((len(rows), 1), dtype=bool), ascending[:, 1:] != ascending[:, :-1]], axis=1)
    rank = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    allowed = np.append(grants, 0)  # -1, an empty GPU, takes the last
    kept = np.where(rank < allowed[ascending], ascending, -1)
    trimmed = np.empty_like(rows)
    np.put_along_axis(trimmed, order, kept, axis=1)
    return trimmed


def _padded(rows: np.ndarray, jobs: Sequence[JobState], grants: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Fills empty GPUs: new jobs without GPUs get their minimum, then all jobs in ``order`` up to their grants."""
    counts = count_jobs(rows, len(jobs))
    empty = (rows < 0).sum(axis=1)
    new = np.array([state.epochs < _PREDICTED_FROM_EPOCHS for state in jobs])
    least = np.array([state.job.sizes[0] for state in jobs])
    needs = (np.where(new, np.minimum(least, grants) - counts, 0), grants - counts)
    filled = []
    for turn, wishes in enumerate(needs):
        if turn:
            wishes = wishes - filled[0]
        wishes = np.maximum(wishes, 0)[:, order]
        before = np.cumsum(wishes, axis=1) - wishes
        given = np.clip(empty[:, None] - before, 0, wishes)
        empty = empty - given.sum(axis=1)
        back = np.empty_like(given)
        back[:, order] = given
        filled.append(back)
    added = filled[0] + filled[1]
    padded, free = rows.copy(), rows < 0
    first = free & (np.cumsum(free, axis=1) <= added.sum(axis=1)[:, None])
    padded[first] = np.repeat(np.tile(np.arange(len(jobs)), len(rows)), added.ravel())
    return padded


def _snapped(row: np.ndarray, jobs: Sequence[JobState]) -> np.ndarray:
    """GPUs of each job in one schedule, lowered to a feasible number; int64 ``[jobs]``."""
    counts = count_jobs(row[None], len(jobs))[0]
    return np.array([state.job.largest_size(int(n)) for state, n in zip(jobs, counts, strict=True)])


def reorder(counts: np.ndarray, running: np.ndarray) -> dict[int, tuple[int, int]]:
    """Contiguous ranges of GPUs for jobs that differ from the running schedule in the fewest GPUs.

    Jobs keep their running order; others come last. Positions are found by dynamic programming over GPUs.

    Args:
        counts: GPUs of each job, int ``[jobs]``, together at most all.
        running: the job on each GPU, -1 for none, int ``[GPUs]``.

    Returns:
        ``{job: (first GPU, last GPU + 1)}`` for the jobs with GPUs.
    """
    num_gpus = len(running)
    firsts = {int(job): place for place, job in reversed(list(enumerate(running))) if job >= 0}
    placed = [int(job) for job in np.flatnonzero(counts)]
    placed.sort(key=lambda job: (firsts.get(job, num_gpus), job))
    best = np.zeros(num_gpus + 1)  # the fewest mismatches of the jobs so far, all within the first so many GPUs
    starts = []
    for job in placed:
        size = int(counts[job])
        same = np.concatenate([[0], np.cumsum(running == job)])
        ends = np.arange(size, num_gpus + 1)
        cost = np.full(num_gpus + 1, np.inf)
        cost[size:] = best[ends - size] + size - (same[ends] - same[ends - size])
        lowest = np.minimum.accumulate(cost)
        at = np.where(cost <= lowest, np.arange(num_gpus + 1), 0)
        starts.append(np.maximum.accumulate(at) - size)
        best = lowest
    ranges = {}
    end = num_gpus
    for job, start_at in zip(reversed(placed), reversed(starts), strict=True):
        start = int(start_at[end])
        ranges[job] = (start, start + int(counts[job]))
        end = start
    return ranges


def _measured_speeds(jobs: Sequence[JobState], cluster: Cluster) -> np.ndarray:
    """Samples per second of each job on 0 to all GPUs: linear interpolation of measurements, with 0 at 0 GPUs, and
    extrapolation. A job without measurements gets 1 per GPU: it is new, and its value is not used for ranking.
    """
    return np.stack([_interpolated(state.observed, cluster.num_gpus) for state in jobs])


@functools.lru_cache(maxsize=2**12)
def _interpolated(observed: tuple[StepTime, ...], num_gpus: int) -> np.ndarray:
    places = np.arange(num_gpus + 1)
    measured = {step.num_gpus: step.batch_size / step.seconds for step in observed}
    known = [0, *sorted(measured)]
    values = [0.0, *(measured[n] for n in sorted(measured))]
    if len(known) == 1:
        known, values = [0, 1], [0.0, 1.0]
    speeds = np.interp(places, known, values)
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    beyond = places > known[-1]
    speeds[beyond] = np.maximum(values[-1] + slope * (places[beyond] - known[-1]), 1e-6)
    return speeds

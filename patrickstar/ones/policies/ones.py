"""ONES for a real cluster: measurements alone, job lengths learnt from ended jobs, and a bound on waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState, goodputs
from patrickstar.ones.policies.experience import Experience
from patrickstar.ones.policies.knapsack import best_sizes, with_equal_shares
from patrickstar.ones.policies.past import History
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.protocol import Allocation, Foresight, Sizes

_RULE = BatchRule.BEST_GOODPUT
_LEAST_S = 1e-3


class Ones:
    """Maximises ``sum_j Q_j^a / (Q_j / s_j(n_j) + c_j)``, exactly.

    ``Q`` is the expected seconds of work per end: one over the job's Gittins index. ``s`` is the goodput at the best
    batch over the goodput of the request. ``c`` is the cost of a resize, 0 if ``n`` is the job's present size. With
    ``a = 0`` the sum is ONES' preference for the least remaining work; with ``a = 1`` it is the sum of speed-ups.

    A resize costs its seconds, or more if the job lasts longer than ``horizon_s``: its new size is expected to last no
    longer than that. A resized job keeps its GPUs for a cool-down. A job that has waited for ``max_wait_s`` comes
    before all others; :meth:`longest_wait_s` is the bound that follows.

    Args:
        history: jobs that ended earlier.
        foresight: ``EXACT`` puts the true remaining work in place of ``Q``, to see what the estimate costs.
        weight_power: ``a``.
        cooldown_resizes: the cool-down in costs of a resize, at least ``cooldown_s``.
    """

    sizes = Sizes.ANY

    def __init__(
        self,
        history: History = (),
        foresight: Foresight = Foresight.NONE,
        interval_s: float = 15.0,
        weight_power: float = 0.9,
        horizon_s: float = 30.0,
        cooldown_s: float = 5.0,
        cooldown_resizes: float = 2.0,
        max_wait_s: float = 300.0,
    ):
        self.foresight = foresight
        self.interval_s = interval_s
        self._history = history
        self._experience: Experience | None = None
        self._ended_before: list[JobState] = []  # jobs that ended before the first decision
        self._weight_power = weight_power
        self._horizon_s = horizon_s
        self._cooldown_s = cooldown_s
        self._cooldown_resizes = cooldown_resizes
        self._max_wait_s = max_wait_s
        self._ages_s: dict[str, float] = {}  # of jobs in all pools

    @property
    def past(self) -> History:
        """Jobs that have ended, as they were measured: a history for another scheduler."""
        return self._experience.past if self._experience else self._history

    def longest_wait_s(self, jobs: Sequence[Job], cluster: Cluster) -> float:
        """Bound on the seconds that a job waits for its next GPU, if at most ``jobs`` are unfinished at a time.

        Overdue jobs come by descending wait, and nobody else starts or grows while one of them does not fit. A GPU is
        locked at most for a resize and a cool-down, so each such time serves as many overdue jobs as fit. Two
        consecutive groups need more than the cluster.
        """
        locked_s = max(job.resize_s + self._cooldown(job) for job in jobs)
        groups = max(1, math.ceil(2 * sum(job.sizes[0] for job in jobs) / cluster.num_gpus))
        return self._max_wait_s + self.interval_s + groups * (locked_s + self.interval_s)

    def finished(self, now: float, state: JobState) -> None:
        """Learns the job's length and scaling."""
        self._ages_s.pop(state.job.name, None)
        if self._experience is None:
            self._ended_before.append(state)
        else:
            self._experience.ended(state, np.array(list(self._ages_s.values())))

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            return {}
        if self._experience is None:
            self._experience = Experience(self._history, cluster.gpus_per_node)
            for state in self._ended_before:
                self._experience.ended(state, np.zeros(0))
        current = np.array([len(state.gpus) for state in jobs])
        values = self._values(jobs, cluster, current, self._experience)
        for row, state in enumerate(jobs):
            if state.gpus and state.run_since_resize_s < self._cooldown(state.job):
                _keep_only(values, row, [current[row]])
        self._serve_overdue(jobs, values, current, cluster)
        found = with_equal_shares(best_sizes(values, cluster.num_gpus), values)
        sizes = {state.job.name: int(n) for state, n in zip(jobs, found, strict=True) if n}
        return place(sizes, jobs, cluster, _RULE, self._experience.completed)

    def _cooldown(self, job: Job) -> float:
        return max(self._cooldown_s, self._cooldown_resizes * job.resize_s)

    def _values(
        self, jobs: Sequence[JobState], cluster: Cluster, current: np.ndarray, experience: Experience
    ) -> np.ndarray:
        """Value of each number of GPUs for each job; -inf where the job does not run on it."""
        most = min(cluster.num_gpus, max(state.job.max_gpus for state in jobs))
        speeds = np.zeros((len(jobs), most + 1))
        for row, state in enumerate(jobs):
            known = goodputs(experience.completed(state), _RULE, cluster)
            speeds[row, : len(known)] = known / experience.reference(state)
        work_s = self._work_s(jobs, experience)[:, None]
        resize_s = np.array([state.job.resize_s if state.has_started else 0.0 for state in jobs])[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = work_s / speeds
            cost_s = resize_s * np.maximum(1.0, seconds / self._horizon_s)
            stays, changes = 1 / seconds, 1 / (seconds + cost_s)
        rows, runs = np.arange(len(jobs)), current > 0
        at_present = changes[rows, current] - stays[rows, current]  # a stopped job pays for its restart
        values = np.where(speeds > 0, changes, -np.inf)
        values[rows, current] = np.where(runs, stays[rows, current], 0.0)
        values[:, 0] = np.where(runs, at_present, 0.0)
        return values * work_s**self._weight_power

    def _work_s(self, jobs: Sequence[JobState], experience: Experience) -> np.ndarray:
        """Expected seconds of work per end, on the requested GPUs; float64 ``[jobs]``."""
        ages = experience.ages_s(jobs)
        self._ages_s.update((state.job.name, float(age)) for state, age in zip(jobs, ages, strict=True))
        if self.foresight is Foresight.NONE:
            return experience.remaining_s(ages)
        told = [(state.remaining_samples or 0.0) / experience.reference(state) for state in jobs]
        return np.maximum(told, _LEAST_S)

    def _serve_overdue(
        self, jobs: Sequence[JobState], values: np.ndarray, current: np.ndarray, cluster: Cluster
    ) -> None:
        """Excludes allocations that leave overdue jobs waiting; in place."""
        locked = ~np.isfinite(values[:, 0])
        free = cluster.num_gpus - int(current[locked].sum())
        overdue = [row for row, state in enumerate(jobs) if state.waited_s >= self._max_wait_s]
        served = set()
        for row in sorted(overdue, key=lambda row: (-jobs[row].waited_s, jobs[row].job.arrival_s, jobs[row].job.name)):
            least = jobs[row].job.sizes[0]
            if least > free:  # nobody else starts or grows until this job fits
                for other in set(range(len(jobs))) - served:
                    _keep_only(values, other, [0, current[other]])
                return
            values[row, :least] = -np.inf
            free -= least
            served.add(row)


def _keep_only(values: np.ndarray, row: int, sizes: Sequence[int]) -> None:
    """Allows a job only these sizes, as far as they were allowed; in place."""
    kept = values[row, sizes]
    values[row] = -np.inf
    values[row, sizes] = kept

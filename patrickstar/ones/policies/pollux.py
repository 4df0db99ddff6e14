"""Pollux-like (OSDI 2021): the allocation with the highest power mean of goodput speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, JobState, goodputs
from patrickstar.ones.policies.knapsack import best_sizes
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.protocol import Allocation, Memoryless

_LEAST_SPEEDUP = 1e-3


class PolluxLike(Memoryless):
    """Fitness is ``(mean_j speedup_j^p)^(1/p)`` for ``p < 0`` (section 4.2).

    ``speedup_j`` is the goodput relative to that of an equal share of the cluster, times ``(T - R d) / (T + d)`` if the
    job would be resized. ``T`` is its age, ``R`` its resizes so far, ``d`` the seconds of one (equation 15). No job
    gets more than twice the most that it has held.

    Differences from Pollux: numbers of GPUs are chosen, which are then placed. So the optimum is found exactly, where
    Pollux has a genetic search; with a population and generations of 100 each that has the same means. A round starts
    at once when a job arrives or ends; Pollux waits for the next one, after 60 s.
    """

    def __init__(self, power: float = -1.0, interval_s: float = 30.0):
        self.interval_s = interval_s
        self._power = power

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            return {}
        found = best_sizes(-self._powered(now, jobs, cluster), cluster.num_gpus)
        sizes = {state.job.name: int(n) for state, n in zip(jobs, found, strict=True) if n}
        return place(sizes, jobs, cluster, BatchRule.BEST_GOODPUT)

    def _powered(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> np.ndarray:
        """Speed-ups to the power of p by job and number of GPUs; infinite where it is not allowed."""
        most = min(cluster.num_gpus, max(state.job.max_gpus for state in jobs))
        powered = np.full((len(jobs), most + 1), np.inf)
        powered[:, 0] = _LEAST_SPEEDUP**self._power
        share = max(1, cluster.num_gpus // len(jobs))
        for row, state in enumerate(jobs):
            speeds = goodputs(state.job, BatchRule.BEST_GOODPUT, cluster)
            fair = speeds[max(state.job.largest_size(min(share, len(speeds) - 1)), state.job.sizes[0])]
            factor = np.ones(len(speeds))
            age, delay = now - state.job.arrival_s, state.job.resize_s
            if state.has_started and delay:
                factor[:] = max(age - state.num_resizes * delay, 0.0) / (age + delay)
                factor[len(state.gpus)] = 1.0
            allowed = np.flatnonzero(speeds[: max(2 * state.most_gpus, state.job.sizes[0]) + 1])
            powered[row, allowed] = np.maximum(speeds / fair * factor, _LEAST_SPEEDUP)[allowed] ** self._power
        return powered

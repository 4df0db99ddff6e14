"""Sia-like (SOSP 2023): each round the best configuration of every job by goodput, as an integer linear program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState, goodputs
from patrickstar.ones.policies.knapsack import best_sizes
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.protocol import Allocation, Memoryless


class SiaLike(Memoryless):
    """Minimises the sum of ``(r_j u_j)^p`` of running jobs, with ``p < 0``, and of ``lambda`` for each waiting one.

    ``u`` is a job's goodput over the one of its smallest configuration. ``r = (T - R d) / (T + d)`` discounts every
    configuration but the present one: ``T`` is the job's age, ``R`` its resizes, ``d`` the seconds of one. Sizes
    are powers of two up to a node and then whole nodes; a job's size at most doubles in a round. On equal GPUs the
    program is a multiple-choice knapsack, which is solved exactly.

    Differences from Sia: one type of GPU, sizes that are placed afterwards, and a round that starts at once when a job
    arrives or ends.
    """

    def __init__(self, power: float = -0.5, wait_penalty: float = 1.1, interval_s: float = 60.0):
        self.interval_s = interval_s
        self._power = power
        self._wait_penalty = wait_penalty

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            return {}
        most = min(cluster.num_gpus, max(state.job.max_gpus for state in jobs))
        values = np.full((len(jobs), most + 1), -np.inf)
        for row, state in enumerate(jobs):
            sizes = _configurations(state.job, cluster, max(2 * len(state.gpus), state.job.sizes[0]), len(state.gpus))
            speeds = goodputs(state.job, BatchRule.BEST_GOODPUT, cluster)
            shares = speeds[sizes] / speeds[state.job.sizes[0]]
            age, delay = now - state.job.arrival_s, state.job.resize_s
            if state.has_started and delay:
                factor = max(age - state.num_resizes * delay, 0.0) / (age + delay)
                shares = np.where(sizes == len(state.gpus), shares, shares * factor)
            values[row, sizes] = -(np.maximum(shares, 1e-3) ** self._power)
            values[row, 0] = -self._wait_penalty
        found = best_sizes(values, cluster.num_gpus)
        sizes = {state.job.name: int(n) for state, n in zip(jobs, found, strict=True) if n}
        return place(sizes, jobs, cluster, BatchRule.BEST_GOODPUT)


def _configurations(job: Job, cluster: Cluster, most: int, current: int) -> np.ndarray:
    node = cluster.gpus_per_node
    regular = {n for n in job.sizes if n % node == 0 or (n < node and n & (n - 1) == 0)}
    allowed = {n for n in regular if n <= min(most, cluster.num_gpus)} | {job.sizes[0]} | ({current} - {0})
    return np.array(sorted(allowed))

"""Tiresias (NSDI 2019): least attained service first, in discrete queues; job lengths are unknown."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from patrickstar.ones.jobs import BatchRule, Cluster, JobState
from patrickstar.ones.policies.placement import place, rigid
from patrickstar.ones.policies.protocol import Allocation, Memoryless, Sizes


class TiresiasLas(Memoryless):
    """Discretised 2D-LAS: service is GPUs times seconds; thresholds on it define queues, ordered by arrival.

    Jobs are rigid and are preempted. The paper's guard against starvation (``PROMOTEKNOB``), infinite by default, is
    left out.
    """

    sizes = Sizes.REQUESTED

    def __init__(self, thresholds_gpu_s: Sequence[float] = (3250.0,), interval_s: float = 10.0):
        """Queue boundaries, ascending, in GPU-seconds.

        Tiresias' own simulator has 3250, 7200 and 18000; the first alone performs best on the artifact's mix.

        Raises:
            ValueError: they do not ascend.
        """
        if list(thresholds_gpu_s) != sorted(thresholds_gpu_s):
            raise ValueError(f"the thresholds of Tiresias are {tuple(thresholds_gpu_s)}; give them ascending")
        self._thresholds = tuple(thresholds_gpu_s)
        self.interval_s = interval_s

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""

        def key(state: JobState) -> tuple[int, float, str]:
            return bisect.bisect_right(self._thresholds, state.gpu_s), state.job.arrival_s, state.job.name

        return place(rigid(sorted(jobs, key=key), cluster), jobs, cluster, BatchRule.CONFIGURED)

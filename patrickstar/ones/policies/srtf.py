"""Shortest remaining time first, for rigid jobs, with preemption and the true remaining time."""

from __future__ import annotations

from collections.abc import Sequence

from patrickstar.ones.jobs import BatchRule, Cluster, JobState, goodputs
from patrickstar.ones.policies.placement import place, rigid
from patrickstar.ones.policies.protocol import Allocation, Foresight, Memoryless, Sizes


class Srtf(Memoryless):
    """By remaining seconds on the requested GPUs; jobs that do not fit are skipped."""

    sizes = Sizes.REQUESTED
    foresight = Foresight.EXACT

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`.

        Raises:
            ValueError: the remaining work of a job is missing.
        """
        order = sorted(jobs, key=lambda state: (_remaining_s(state, cluster), state.job.arrival_s, state.job.name))
        return place(rigid(order, cluster), jobs, cluster, BatchRule.CONFIGURED)


def _remaining_s(state: JobState, cluster: Cluster) -> float:
    if state.remaining_samples is None:
        raise ValueError(f"SRTF needs the remaining work of job {state.job.name} and was not told it")
    speed = goodputs(state.job, BatchRule.CONFIGURED, cluster)[state.job.rigid_size(cluster)]
    return state.remaining_samples / speed

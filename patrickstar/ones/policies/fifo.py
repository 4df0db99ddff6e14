"""First in, first out: a job keeps its requested GPUs until it ends, and no job overtakes."""

from __future__ import annotations

from collections.abc import Sequence

from patrickstar.ones.jobs import BatchRule, Cluster, JobState
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.protocol import Allocation, Memoryless, Sizes


class Fifo(Memoryless):
    """Starts jobs by arrival; the first job that does not fit blocks all later ones."""

    sizes = Sizes.REQUESTED

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        sizes = {state.job.name: len(state.gpus) for state in jobs if state.gpus}
        free = cluster.num_gpus - sum(sizes.values())
        for state in jobs:
            if state.gpus:
                continue
            size = state.job.rigid_size(cluster)
            if size > free:
                break
            sizes[state.job.name] = size
            free -= size
        return place(sizes, jobs, cluster, BatchRule.CONFIGURED)

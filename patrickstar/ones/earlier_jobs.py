"""Jobs that ended before a trace, as the scheduler measured them that ran them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar.ones.jobs import BatchRule, Cluster
from patrickstar.ones.mixes import GPUS_PER_NODE, make_trace
from patrickstar.ones.policies.ones import Ones
from patrickstar.ones.policies.past import EpochRecord, History
from patrickstar.ones.simulator import simulate
from patrickstar.ones.traces import TraceJob

HISTORY_SEED = 10**6
"""Added to the seed of a trace, for the jobs that ended before it."""
DEFAULT_CLUSTER = Cluster(64, GPUS_PER_NODE)


def make_history(
    mix: str, seed: int, num_jobs: int = 20, cluster: Cluster = DEFAULT_CLUSTER, resize_s: float = 5.0
) -> History:
    """Jobs of the mix, drawn with a separate seed. The artifact has 20."""
    return measured_history(make_trace(mix, seed + HISTORY_SEED, num_jobs, resize_s=resize_s), cluster)


def measured_history(earlier: Sequence[TraceJob], cluster: Cluster) -> History:
    """Runs the jobs by :class:`Ones`, which starts without knowledge, and returns its records of them.

    A record has the scaling of the sizes that were tried, and errors of all measurements.
    """
    policy = Ones()
    simulate(earlier, policy, cluster)
    measured = {job.name: job for job in policy.past}
    return tuple(dataclasses.replace(measured[item.job.name], epochs=epoch_records(item)) for item in earlier)


def epoch_records(item: TraceJob) -> tuple[EpochRecord, ...]:
    """Epochs of a job that ran as requested, for published ONES' predictor."""
    job = item.job
    worth = float(job.efficiency(job.batch_size(job.requested_gpus, BatchRule.CONFIGURED, GPUS_PER_NODE)))
    seen = item.samples / worth / job.epoch_samples
    records = []
    for epoch in range(1, math.ceil(min(seen, 200))):
        loss, accuracy = item.measured(epoch / seen * item.samples, epoch)
        records.append(
            EpochRecord(
                epoch_samples=job.epoch_samples, initial_loss=item.initial_loss, loss=loss, accuracy=accuracy,
                epochs_seen=epoch, progress_seen=epoch / seen,
            )
        )  # fmt: skip
    return tuple(records)

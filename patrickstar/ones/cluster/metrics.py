"""The scheduler's figures as Ray's metrics, for its dashboard and for Prometheus: gauges ``patrickstar_ones_*``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ray.util.metrics import Gauge

from patrickstar.ones.cluster.rows import Row
from patrickstar.ones.jobs import Cluster

_PREFIX = "patrickstar_ones_"
_OF_JOBS = {
    "job_gpus": "GPUs of a job.",
    "job_steps": "Optimizer steps of a job.",
    "job_step_seconds": "Seconds of a job's step.",
    "job_loss": "Last loss of a job.",
    "job_resizes": "Resizes of a job.",
    "job_resize_seconds": "Seconds of a job's last resize.",
    "job_failures": "Failures of a job, after which it started again.",
}


class SchedulerMetrics:
    """Gauges of one scheduler, in its process."""

    def __init__(self) -> None:
        self._jobs = Gauge(_PREFIX + "jobs", "Jobs by state.", ("state",))
        self._gpus = Gauge(_PREFIX + "gpus", "GPUs of the cluster.")
        self._held = Gauge(_PREFIX + "held_gpus", "GPUs that jobs hold.")
        self._of_jobs = {name: Gauge(_PREFIX + name, text, ("job",)) for name, text in _OF_JOBS.items()}
        self._states: set[str] = set()

    def show(self, rows: Sequence[Row], cluster: Cluster) -> None:
        """Sets all gauges."""
        counts = Counter(row.state for row in rows)
        self._states |= counts.keys()
        for state in self._states:
            self._jobs.set(counts[state], {"state": state})
        self._gpus.set(cluster.num_gpus)
        self._held.set(sum(row.num_gpus for row in rows))
        for row in rows:
            for name, value in values_of(row).items():
                self._of_jobs[name].set(value, {"job": row.name})


def values_of(row: Row) -> dict[str, float]:
    """A job's figures by gauge; those that are unknown are left out."""
    found = {
        "job_gpus": row.num_gpus,
        "job_steps": row.num_steps,
        "job_step_seconds": row.seconds_per_step or None,
        "job_loss": row.loss,
        "job_resizes": row.num_resizes,
        "job_resize_seconds": row.resize_s or None,
        "job_failures": row.num_failures,
    }
    return {name: float(value) for name, value in found.items() if value is not None}

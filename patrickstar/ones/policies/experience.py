"""Knowledge from jobs that ended: their lengths, how they scaled, and their noise scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import Job, JobState, Throughput
from patrickstar.ones.measurements import (
    Scaling,
    Synchronisation,
    fitted_throughput,
    scaling_of,
    throughput_on_links,
)
from patrickstar.ones.policies.lengths import LengthModel
from patrickstar.ones.policies.past import History, PastJob

_MOST_JOBS = 1000
_DEFAULT_SCALING = Scaling(within=0.1, between=0.25)  # of a model of 25 million parameters between GPUs of 12 TFLOPS
_DEFAULT_NOISE_RATIO = 10.0
_CAUTION = 2.0  # a first grant that is too large wastes more than one that is too small


class Experience:
    """Completes what was measured of a running job by the medians of ended ones.

    A job that has run has its synchronisation by its parameters, at the median seconds per parameter. If it has not
    reported them, it has the median ratio of synchronising and computing. One that has not run has twice that ratio.

    Args:
        history: jobs that ended earlier; before any has, scaling and noise scale have typical values.
        gpus_per_node: of the cluster.
    """

    def __init__(self, history: History, gpus_per_node: int):
        self._past = list(history)
        self._gpus_per_node = gpus_per_node
        self._lengths = LengthModel([job.length_s for job in history])
        self._scaling, self._noise_ratio = _DEFAULT_SCALING, _DEFAULT_NOISE_RATIO
        self._of_a_parameter: Synchronisation | None = None
        self._completed: dict[str, tuple[Job, Job, float]] = {}
        self._find_medians()

    @property
    def past(self) -> History:
        """Jobs that ended, the last one last."""
        return tuple(self._past)

    def completed(self, state: JobState) -> Job:
        """The job with priors in place of measurements that are missing."""
        return self._complete(state)[1]

    def ages_s(self, states: Sequence[JobState]) -> np.ndarray:
        """Attained service: progress in seconds on the requested GPUs; float64 ``[states]``."""
        return np.array([state.done_samples / self.reference(state) for state in states])

    def reference(self, state: JobState) -> float:
        """Goodput of the request, in samples of the base batch per second."""
        return self._complete(state)[2]

    def remaining_s(self, ages_s: np.ndarray) -> np.ndarray:
        """See :meth:`LengthModel.remaining_s`."""
        return self._lengths.remaining_s(ages_s)

    def ended(self, state: JobState, ages_s: np.ndarray) -> None:
        """Learns from a job that ended; ``ages_s`` are those of jobs that go on."""
        job = state.job
        length_s = float(self.ages_s([state])[0])
        within, between, base_s = scaling_of(state.observed, job.base_batch, job.throughput.max_micro_batch)
        parameter_s = base_s / job.num_parameters if job.num_parameters else 0.0
        self._past.append(PastJob(job.name, length_s, within, between, parameter_s, job.noise_scale / job.base_batch))
        del self._past[:-_MOST_JOBS]
        self._lengths.ended(length_s, ages_s)
        self._find_medians()

    def _complete(self, state: JobState) -> tuple[Job, Job, float]:
        job = state.job
        known = self._completed.get(job.name)
        if known is None or known[0] != job:
            noise_scale = job.noise_scale or self._expected_noise(job)
            made = dataclasses.replace(job, throughput=self._throughput(state), noise_scale=noise_scale)
            known = job, made, made.reference_goodput(self._gpus_per_node)
            self._completed[job.name] = known
        return known

    def _throughput(self, state: JobState) -> Throughput:
        job, most = state.job, state.job.throughput.max_micro_batch
        if not state.observed:
            return fitted_throughput((), job.base_batch, most, self._scaling.times(_CAUTION))
        if not job.num_parameters or self._of_a_parameter is None:
            return fitted_throughput(state.observed, job.base_batch, most, self._scaling)
        return throughput_on_links(state.observed, self._of_a_parameter.times(job.num_parameters), most)

    def _expected_noise(self, job: Job) -> float:
        # a listed batch changes only by what was measured
        return 0.0 if job.feasible_batches else self._noise_ratio * job.base_batch

    def _find_medians(self) -> None:
        self._scaling = Scaling(
            _median([job.within for job in self._past], _DEFAULT_SCALING.within),
            _median([job.between for job in self._past], _DEFAULT_SCALING.between),
        )
        known = [job for job in self._past if job.parameter_s]
        within = _median([job.within and job.within * job.parameter_s for job in known], 0.0)
        between = _median([job.between and job.between * job.parameter_s for job in known], 0.0)
        if within or between:
            slower = _DEFAULT_SCALING.between / _DEFAULT_SCALING.within
            self._of_a_parameter = Synchronisation(within or between / slower, between or slower * within)
        self._noise_ratio = _median([job.noise_ratio or None for job in self._past], _DEFAULT_NOISE_RATIO)
        self._completed.clear()


def _median(values: Sequence[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else default

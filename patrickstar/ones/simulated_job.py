"""A job in the simulator: its true progress, and the measurements that a scheduler gets to see of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from patrickstar.ones.jobs import Cluster, Job, JobState, StepTime, Throughput
from patrickstar.ones.measurements import fitted_throughput
from patrickstar.ones.policies.protocol import Foresight, Grant, Profiling, Sizes
from patrickstar.ones.pools import Candidate, has_stayed, relative_speeds, seconds_on
from patrickstar.ones.traces import TraceJob

_MEASURED_AFTER_S = 10.0  # of training on the same GPUs with the same batch
_STEP_NOISE = 0.02  # relative standard deviation of a measured step time
_SCALE_NOISE = 0.2  # and of a measured noise scale, on a logarithmic scale
_PROFILE = 1  # added to the seed of measurements before a start


@dataclasses.dataclass(frozen=True)
class Segment:
    """A job on the same GPUs with the same batch, from ``start_s`` to ``end_s``."""

    job: str
    start_s: float
    end_s: float
    gpus: tuple[int, ...]
    """Numbers within their type."""
    batch_size: int
    stalled_s: float
    """Part of this time that a resize took."""
    done_samples: float
    """True progress made in it, in samples of the base batch."""
    gpu_type: str = ""


class SimulatedJob:
    """Progress is computed exactly, not accumulated from small steps."""

    def __init__(self, item: TraceJob, pools: Mapping[str, Cluster], profiling: Profiling = Profiling.NONE):
        self.name = item.job.name
        self.arrival_s = item.job.arrival_s
        self.grant: Grant | None = None
        self.end_s = math.inf
        self.first_start_s = math.nan
        self.waits_since_s = item.job.arrival_s
        self.waits_in: str | None = None
        """The pool in which it waits."""
        self.longest_wait_s = 0.0
        self.num_resizes = 0
        self.run_before_s = 0.0
        self._item, self._true, self._pools = item, item.job, pools
        self.kinds = item.kinds(pools)
        self._rng = np.random.default_rng(item.noise_seed)
        self._noise_scale = 0.0  # as measured
        self._steps: dict[str, dict[tuple[int, int, int], StepTime]] = {kind: {} for kind in self.kinds}
        self._known: dict[str, tuple[Job, tuple[StepTime, ...]]] = {}  # by type; empty after each measurement
        self._speeds: dict[str, float] = {}
        if profiling is Profiling.EACH_TYPE:
            self._profile()
        self._since_s = self._trains_from_s = self._resized_s = 0.0
        self._done_before = self._estimate_before = self._seen_before = self._gpu_s_before = 0.0
        self._seen_at_resize = 0.0
        self._samples_per_s = self._goodput = 0.0
        self._most_gpus = 0
        self._epoch_known = 0
        self._initial_loss = self._loss = self._accuracy = 0.0

    @property
    def kind(self) -> str | None:
        """The type of its GPUs; None while it waits."""
        return self.grant.gpu_type if self.grant else None

    def job_on(self, kind: str) -> Job:
        """The job with its parameters, noise scale and speed on a type of GPUs, as far as they were measured."""
        return self._known_on(kind)[0]

    def candidate(self, now: float, sizes: Sizes) -> Candidate:
        """The job for a choice among types of GPUs, by a policy that grants these sizes."""
        self._measure(now)
        self._speeds = self._speeds or relative_speeds(self._seconds(), self.kinds)
        return Candidate(
            name=self.name, least_gpus=self._true.sizes[0], speeds=self._speeds, held=self.kind, waits=self.waits_in,
            gpus=sizes.most(self._true.requested_gpus, self._true.max_gpus),
            may_leave=bool(self.grant) and has_stayed(now - self._resized_s, self._true.resize_s),
        )  # fmt: skip

    def trained_s(self, now: float) -> float:
        """Seconds trained with the present grant."""
        return max(0.0, now - self._trains_from_s) if self.grant else 0.0

    def _done(self, now: float) -> float:
        """True progress, in samples of the base batch."""
        return self._done_before + self._goodput * self.trained_s(now)

    def _estimate(self, now: float) -> float:
        """Progress by the measured noise scale."""
        if not self.grant:
            return self._estimate_before
        worth = float(self.job_on(self.grant.gpu_type).efficiency(self.grant.batch_size))
        return self._estimate_before + self._samples_per_s * self.trained_s(now) * worth

    def change(self, now: float, grant: Grant | None) -> Segment | None:
        """Sets GPUs and batch; returns the segment that ended, if any."""
        segment = None
        if self.grant:
            held = now - self._since_s
            done = self._done(now) - self._done_before
            segment = Segment(
                self.name, self._since_s, now, self.grant.gpus, self.grant.batch_size,
                min(held, self._trains_from_s - self._since_s), done, self.grant.gpu_type,
            )  # fmt: skip
            self._measure(now)
            self._estimate_before = self._estimate(now)
            self._done_before += done
            self._seen_before += self._samples_per_s * self.trained_s(now)
            self.run_before_s += held
            self._gpu_s_before += held * len(self.grant.gpus)
            if grant is None:
                self.waits_since_s = now
        elif grant is not None:
            self.longest_wait_s = max(self.longest_wait_s, now - self.waits_since_s)
        same_gpus = grant is not None and self.grant is not None and _place(grant) == _place(self.grant)
        delay = max(0.0, self._trains_from_s - now) if same_gpus else 0.0
        self.grant = grant
        if grant is None:
            self._goodput = self._samples_per_s = 0.0
            self.end_s = math.inf
            return segment
        if self._most_gpus == 0:
            self.first_start_s = now
        elif not same_gpus:
            self.num_resizes += 1
            delay = self._true.resize_s
        num_gpus, nodes = len(grant.gpus), self._pools[grant.gpu_type].num_nodes_of(grant.gpus)
        self._most_gpus = max(self._most_gpus, num_gpus)
        true = self._true_on(grant.gpu_type)
        self._samples_per_s = float(true.samples_per_s(num_gpus, grant.batch_size, nodes))
        self._goodput = self._samples_per_s * float(self._true.efficiency(grant.batch_size))
        self._since_s = now
        self._trains_from_s = now + delay
        if not same_gpus:
            self._resized_s, self._seen_at_resize = self._trains_from_s, self._seen_before
        self.end_s = self._trains_from_s + max(0.0, self._item.samples - self._done_before) / self._goodput
        return segment

    def _measure(self, now: float) -> None:
        """Measures step time and noise scale once for each size, number of nodes and batch."""
        if self.grant is None or self.trained_s(now) < _MEASURED_AFTER_S:
            return
        kind = self.grant.gpu_type
        key = len(self.grant.gpus), self._pools[kind].num_nodes_of(self.grant.gpus), self.grant.batch_size
        if key in self._steps[kind]:
            return
        true_s = self.grant.batch_size / self._samples_per_s
        self._steps[kind][key] = StepTime(*key, true_s * math.exp(_STEP_NOISE * self._rng.standard_normal()))
        self._noise_scale = self._true.noise_scale * math.exp(_SCALE_NOISE * self._rng.standard_normal())
        self._known, self._speeds = {}, {}

    def measured_on(self, kind: str) -> tuple[StepTime, ...]:
        """Steps measured on a type of GPUs."""
        return tuple(self._steps[kind].values())

    def _known_on(self, kind: str) -> tuple[Job, tuple[StepTime, ...]]:
        if kind not in self._known:
            observed = self._observed(kind)
            fitted = fitted_throughput(observed, self._true.base_batch, self._true.throughput.max_micro_batch)
            num_parameters = self._true.num_parameters if any(self._steps.values()) else 0
            job = dataclasses.replace(
                self._true, throughput=fitted, noise_scale=self._noise_scale, num_parameters=num_parameters
            )
            self._known[kind] = job, observed
        return self._known[kind]

    def _profile(self) -> None:
        """Measures a step on the fewest GPUs of each type."""
        rng = np.random.default_rng((self._item.noise_seed, _PROFILE))
        for kind, steps in self._steps.items():
            size, batch = self._true.sizes[0], self._true.base_batch
            key = size, math.ceil(size / self._pools[kind].gpus_per_node), batch
            true_s = float(self._true_on(kind).step_s(size, batch, key[1]))
            steps[key] = StepTime(*key, true_s * math.exp(_STEP_NOISE * rng.standard_normal()))

    def _true_on(self, kind: str) -> Throughput:
        return self._true.throughput.on_faster(self._item.speeds.get(kind, 1.0))

    def _seconds(self) -> dict[str, dict[tuple[int, int], float]]:
        """Measured seconds by type, and by GPUs and batch."""
        return {
            kind: {(step.num_gpus, step.batch_size): step.seconds for step in steps.values()}
            for kind, steps in self._steps.items()
        }

    def _observed(self, kind: str) -> tuple[StepTime, ...]:
        """Steps measured on a type, and those measured on others, scaled by relative speeds."""
        own = self.measured_on(kind)
        known = {(step.num_gpus, step.batch_size) for step in own}
        per_node = self._pools[kind].gpus_per_node
        scaled = seconds_on(self._seconds(), kind, self.kinds)
        return own + tuple(
            StepTime(num_gpus, math.ceil(num_gpus / per_node), batch, seconds)
            for (num_gpus, batch), seconds in scaled.items()
            if (num_gpus, batch) not in known
        )

    def state(self, now: float, foresight: Foresight, kind: str) -> JobState:
        """Information for a policy, with the job's speed on a type of GPUs."""
        self._measure(now)
        seen = self._seen_before + self._samples_per_s * self.trained_s(now)
        held_s = now - self._since_s if self.grant else 0.0
        self._look_at_curve(now, int(seen / self._true.epoch_samples))
        job, observed = self._known_on(kind)
        return JobState(
            job=job,
            gpus=self.grant.gpus if self.grant else (),
            batch_size=self.grant.batch_size if self.grant else 0,
            done_samples=self._estimate(now),
            seen_samples=seen,
            gpu_s=self._gpu_s_before + held_s * (len(self.grant.gpus) if self.grant else 0),
            run_s=self.run_before_s + held_s,
            num_resizes=self.num_resizes,
            samples_since_resize=seen - self._seen_at_resize,
            run_since_resize_s=max(0.0, now - self._resized_s) if self.grant else 0.0,
            waited_s=0.0 if self.grant else now - self.waits_since_s,
            most_gpus=self._most_gpus,
            observed=observed,
            initial_loss=self._initial_loss,
            loss=self._loss,
            accuracy=self._accuracy,
            remaining_samples=self._told(now, foresight),
        )

    def _look_at_curve(self, now: float, epoch: int) -> None:
        if epoch <= self._epoch_known:
            return
        done = self._done(now)
        self._loss, self._accuracy = self._item.measured(done, epoch)
        self._initial_loss = self._initial_loss or self._item.measured(done / epoch, 1)[0]
        self._epoch_known = epoch

    def _told(self, now: float, foresight: Foresight) -> float | None:
        if foresight is Foresight.NONE:
            return None
        done = min(self._done(now), self._item.samples)
        error = self._item.fit_error * (1 - done / self._item.samples) if foresight is Foresight.FITTED else 0.0
        return (self._item.samples - done) * math.exp(error)


def _place(grant: Grant) -> tuple[str, tuple[int, ...]]:
    return grant.gpu_type, grant.gpus

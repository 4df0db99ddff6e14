"""Simulated time for real schedulers: event-driven, and deterministic for a trace and seed.

Events are arrivals, ends of jobs and the policy's interval. Between events a job's goodput is constant. A resize, or a
restart after a stop, costs ``resize_s`` seconds in which the job holds its GPUs and does not train. The first start
costs nothing. Policies see goodputs for packed jobs; the simulator counts the actual nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar.ones.jobs import Cluster, JobState, check_fits
from patrickstar.ones.policies.protocol import Allocation, Foresight, Grant, Policy
from patrickstar.ones.traces import TraceJob

_STARVED_S = 3650 * 86400.0


class SimulationError(RuntimeError):
    """A policy made an invalid grant, or lets a job wait forever."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A job on the same GPUs with the same batch, from ``start_s`` to ``end_s``."""

    job: str
    start_s: float
    end_s: float
    gpus: tuple[int, ...]
    batch_size: int
    stalled_s: float
    """Part of this time that a resize took."""
    done_samples: float
    """Progress made in it, in samples of the base batch."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A job at its end; times in seconds."""

    job: str
    arrival_s: float
    first_start_s: float
    end_s: float
    run_s: float
    """Time with GPUs, resizes included."""
    num_resizes: int

    @property
    def jct_s(self) -> float:
        """Seconds from arrival to end."""
        return self.end_s - self.arrival_s


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a simulation."""

    cluster: Cluster
    jobs: tuple[Finished, ...]
    """By arrival."""
    segments: tuple[Segment, ...]
    """By end."""
    num_decisions: int


class _Running:
    """A job in the simulator; progress is computed exactly, not accumulated from small steps."""

    def __init__(self, item: TraceJob):
        self.item = item
        self.job = item.job
        self.grant: Grant | None = None
        self.since_s = 0.0
        self.trains_from_s = 0.0
        self.done_before = 0.0
        self.seen_before = 0.0
        self.run_before_s = 0.0
        self.gpu_s_before = 0.0
        self.samples_per_s = 0.0
        self.goodput = 0.0
        self.end_s = math.inf
        self.first_start_s = math.nan
        self.num_resizes = 0
        self.most_gpus = 0
        self.observed: dict[int, float] = {}
        self.epoch_known = 0
        self.initial_loss = self.loss = self.accuracy = 0.0

    def trained_s(self, now: float) -> float:
        """Seconds trained with the present grant."""
        return max(0.0, now - self.trains_from_s) if self.grant else 0.0

    def done(self, now: float) -> float:
        """Progress, in samples of the base batch."""
        return self.done_before + self.goodput * self.trained_s(now)

    def change(self, now: float, grant: Grant | None, cluster: Cluster) -> Segment | None:
        """Sets GPUs and batch; returns the segment that ended, if any."""
        segment = None
        if self.grant:
            trained = self.trained_s(now)
            held = now - self.since_s
            done = self.done(now) - self.done_before
            segment = Segment(
                self.job.name, self.since_s, now, self.grant.gpus, self.grant.batch_size,
                min(held, self.trains_from_s - self.since_s), done,
            )  # fmt: skip
            self.done_before += done
            self.seen_before += self.samples_per_s * trained
            self.run_before_s += held
            self.gpu_s_before += held * len(self.grant.gpus)
            if trained > 0:
                self.observed[len(self.grant.gpus)] = self.samples_per_s
        same_gpus = grant is not None and self.grant is not None and grant.gpus == self.grant.gpus
        delay = max(0.0, self.trains_from_s - now) if same_gpus else 0.0
        self.grant = grant
        if grant is None:
            self.goodput = self.samples_per_s = 0.0
            self.end_s = math.inf
            return segment
        if self.most_gpus == 0:
            self.first_start_s = now
        elif not same_gpus:
            self.num_resizes += 1
            delay = self.job.resize_s
        num_gpus = len(grant.gpus)
        self.most_gpus = max(self.most_gpus, num_gpus)
        nodes = cluster.num_nodes_of(grant.gpus)
        self.samples_per_s = self.job.throughput.samples_per_s(num_gpus, grant.batch_size, nodes)
        self.goodput = self.job.goodput(num_gpus, grant.batch_size, nodes)
        self.since_s = now
        self.trains_from_s = now + delay
        self.end_s = self.trains_from_s + max(0.0, self.item.samples - self.done_before) / self.goodput
        return segment

    def state(self, now: float, foresight: Foresight) -> JobState:
        """Information for a policy."""
        trained = self.trained_s(now)
        since = self.samples_per_s * trained
        seen = self.seen_before + since
        done = min(self.done(now), self.item.samples)
        held_s = now - self.since_s if self.grant else 0.0
        num_gpus = len(self.grant.gpus) if self.grant else 0
        observed = self.observed
        if trained > 0:
            observed = {**observed, num_gpus: self.samples_per_s}
        epoch = int(seen / self.job.epoch_samples)
        progress = done / self.item.samples
        if epoch > self.epoch_known:
            self.loss, self.accuracy = self.item.curve(progress, epoch)
            self.initial_loss = self.initial_loss or self.item.curve(progress / epoch, 1)[0]
            self.epoch_known = epoch
        left = None
        if foresight is not Foresight.NONE:
            error = self.item.fit_error * (1 - progress) if foresight is Foresight.FITTED else 0.0
            left = (self.item.samples - done) * math.exp(error)
        return JobState(
            job=self.job,
            gpus=self.grant.gpus if self.grant else (),
            batch_size=self.grant.batch_size if self.grant else 0,
            done_samples=done,
            seen_samples=seen,
            gpu_s=self.gpu_s_before + held_s * num_gpus,
            run_s=self.run_before_s + held_s,
            num_resizes=self.num_resizes,
            samples_since_resize=since,
            run_since_resize_s=trained,
            most_gpus=self.most_gpus,
            observed=tuple(sorted(observed.items())),
            initial_loss=self.initial_loss,
            loss=self.loss,
            accuracy=self.accuracy,
            remaining_samples=left,
        )


def simulate(trace: Sequence[TraceJob], policy: Policy, cluster: Cluster) -> Result:
    """Runs all jobs of a trace to their ends.

    Raises:
        ValueError: a job can never run on this cluster, or two have the same name.
        SimulationError: the policy made an invalid grant, or leaves a job without GPUs forever.
    """
    for item in trace:
        check_fits(item.job, cluster)
    if len({item.job.name for item in trace}) != len(trace):
        raise ValueError("two jobs of the trace have the same name; give each its own")
    coming = sorted(trace, key=lambda item: (item.job.arrival_s, item.job.name), reverse=True)
    active: dict[str, _Running] = {}
    finished: list[Finished] = []
    segments: list[Segment] = []
    num_decisions = 0
    tick_s = math.inf
    idle_since_s = 0.0
    while coming or active:
        end_s = min((job.end_s for job in active.values()), default=math.inf)
        arrival_s = coming[-1].job.arrival_s if coming else math.inf
        now = min(end_s, arrival_s, tick_s)
        if any(job.grant for job in active.values()) or not active:
            idle_since_s = now
        if now == math.inf or now - idle_since_s > _STARVED_S:
            raise SimulationError(f"{type(policy).__name__} leaves {', '.join(active)} without GPUs forever")
        ended = [job for job in active.values() if job.end_s <= now]
        for job in ended:
            state = job.state(now, Foresight.EXACT)
            segment = job.change(now, None, cluster)
            if segment is not None:
                segments.append(segment)
            del active[job.job.name]
            finished.append(
                Finished(job.job.name, job.job.arrival_s, job.first_start_s, now, job.run_before_s, job.num_resizes)
            )
            policy.finished(now, state)
        while coming and coming[-1].job.arrival_s <= now:
            item = coming.pop()
            active[item.job.name] = _Running(item)
        if active:
            states = [job.state(now, policy.foresight) for job in active.values()]
            allocation = policy.decide(now, states, cluster)
            num_decisions += 1
            _check(allocation, active, cluster, policy)
            for name, job in active.items():
                grant = allocation.get(name)
                if grant != job.grant:
                    segment = job.change(now, grant, cluster)
                    if segment is not None and segment.end_s > segment.start_s:
                        segments.append(segment)
        tick_s = now + policy.interval_s if active else math.inf
    finished.sort(key=lambda job: (job.arrival_s, job.job))
    return Result(cluster, tuple(finished), tuple(segments), num_decisions)


def _check(allocation: Allocation, active: dict[str, _Running], cluster: Cluster, policy: Policy) -> None:
    who = type(policy).__name__
    taken: set[int] = set()
    for name, grant in allocation.items():
        if name not in active:
            raise SimulationError(f"{who} grants GPUs to {name}, which is not there")
        job = active[name].job
        if job.largest_size(len(grant.gpus)) != len(grant.gpus) or not grant.gpus:
            raise SimulationError(f"{who} grants {len(grant.gpus)} GPUs to {name}, which runs on {job.sizes}")
        if grant.batch_size < len(grant.gpus):
            raise SimulationError(f"{who} grants {name} a batch of {grant.batch_size} on {len(grant.gpus)} GPUs")
        own = set(grant.gpus)
        if len(own) != len(grant.gpus) or not own <= set(range(cluster.num_gpus)) or own & taken:
            raise SimulationError(f"{who} grants GPUs {grant.gpus} to {name}, of which some are not there or taken")
        taken |= own

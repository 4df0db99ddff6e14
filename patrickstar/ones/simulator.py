"""Simulated time for real schedulers: event-driven, and deterministic for a trace and seed.

Events are arrivals, ends of jobs and the policy's interval. Between events a job's goodput is constant. A resize, or a
restart after a stop, costs ``resize_s`` seconds in which the job holds its GPUs and does not train. The first start
costs nothing. Policies see measurements (:class:`patrickstar.ones.simulated_job.SimulatedJob`) and goodputs for packed
jobs; the simulator counts the actual nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar.ones.jobs import Cluster, check_fits
from patrickstar.ones.policies.protocol import Allocation, Foresight, Policy
from patrickstar.ones.simulated_job import Segment, SimulatedJob
from patrickstar.ones.traces import TraceJob

_STARVED_S = 3650 * 86400.0


class SimulationError(RuntimeError):
    """A policy made an invalid grant, or lets a job wait forever."""


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
    longest_wait_s: float
    """The longest time without GPUs, from arrival or a stop to the next start."""

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
    active: dict[str, SimulatedJob] = {}
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
            state = job.state(now, Foresight.NONE)
            segment = job.change(now, None)
            if segment is not None:
                segments.append(segment)
            del active[job.name]
            finished.append(
                Finished(
                    job.name, job.arrival_s, job.first_start_s, now, job.run_before_s, job.num_resizes,
                    job.longest_wait_s,
                )
            )  # fmt: skip
            policy.finished(now, state)
        while coming and coming[-1].job.arrival_s <= now:
            item = coming.pop()
            active[item.job.name] = SimulatedJob(item, cluster)
        if active:
            states = [job.state(now, policy.foresight) for job in active.values()]
            allocation = policy.decide(now, states, cluster)
            num_decisions += 1
            _check(allocation, active, cluster, policy)
            for name, job in active.items():
                grant = allocation.get(name)
                if grant != job.grant:
                    segment = job.change(now, grant)
                    if segment is not None and segment.end_s > segment.start_s:
                        segments.append(segment)
        tick_s = now + policy.interval_s if active else math.inf
    finished.sort(key=lambda job: (job.arrival_s, job.job))
    return Result(cluster, tuple(finished), tuple(segments), num_decisions)


def _check(allocation: Allocation, active: dict[str, SimulatedJob], cluster: Cluster, policy: Policy) -> None:
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
        if job.feasible_batches and grant.batch_size not in job.batches_on(len(grant.gpus)):
            raise SimulationError(f"{who} grants {name} a batch of {grant.batch_size}, which it does not take now")
        own = set(grant.gpus)
        if len(own) != len(grant.gpus) or not own <= set(range(cluster.num_gpus)) or own & taken:
            raise SimulationError(f"{who} grants GPUs {grant.gpus} to {name}, of which some are not there or taken")
        taken |= own

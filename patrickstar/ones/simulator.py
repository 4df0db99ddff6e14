"""Simulated time for real schedulers: event-driven, and deterministic for a trace and seed.

Events are arrivals, ends of jobs and the policy's interval. Between events a job's goodput is constant. A resize, or a
restart after a stop, costs ``resize_s`` seconds in which the job holds its GPUs and does not train. The first start
costs nothing. Policies see measurements (:class:`patrickstar.ones.simulated_job.SimulatedJob`) and goodputs for packed
jobs; the simulator counts the actual nodes.

With GPUs of several types a policy decides within pools, which the cluster's scheduler divides by the same code
(:mod:`patrickstar.ones.pools`). A :class:`TypesPolicy` chooses types itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from patrickstar.ones.jobs import Cluster, JobState, check_fits
from patrickstar.ones.policies.protocol import Allocation, Foresight, Policy, Profiling, TypesPolicy
from patrickstar.ones.pools import Division, divide, total
from patrickstar.ones.simulated_job import Segment, SimulatedJob
from patrickstar.ones.traces import TraceJob

_STARVED_S = 3650 * 86400.0
_MOST_ROUNDS = 20  # decisions at one time, while each changes what jobs of other pools see


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

    pools: Mapping[str, Cluster]
    """The cluster's GPUs by type."""
    jobs: tuple[Finished, ...]
    """By arrival."""
    segments: tuple[Segment, ...]
    """By end."""
    num_decisions: int

    @property
    def cluster(self) -> Cluster:
        """All GPUs."""
        return total(self.pools)


def simulate(trace: Sequence[TraceJob], policy: Policy, cluster: Cluster | Mapping[str, Cluster]) -> Result:
    """Runs all jobs of a trace to their ends.

    Args:
        cluster: equal GPUs, or GPUs by type.

    Raises:
        ValueError: a job can never run on this cluster, or two have the same name.
        SimulationError: the policy made an invalid grant, or leaves a job without GPUs forever.
    """
    pools = {"": cluster} if isinstance(cluster, Cluster) else dict(cluster)
    _check_trace(trace, pools)
    typed = policy if isinstance(policy, TypesPolicy) else None  # asked once, since the answer takes long
    profiling = typed.profiling if typed else Profiling.NONE
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
            state = job.state(now, Foresight.NONE, job.grant.gpu_type)
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
            active[item.job.name] = SimulatedJob(item, pools, profiling)
        if active:
            for _ in range(_MOST_ROUNDS):
                parts, is_settled = _decide(now, policy, typed, active, pools)
                segments += parts
                num_decisions += 1
                if is_settled:
                    break
        tick_s = now + policy.interval_s if active else math.inf
    finished.sort(key=lambda job: (job.arrival_s, job.job))
    return Result(pools, tuple(finished), tuple(segments), num_decisions)


def _check_trace(trace: Sequence[TraceJob], pools: Mapping[str, Cluster]) -> None:
    for item in trace:
        kinds = item.kinds(pools)
        if not kinds:
            raise ValueError(
                f"job {item.job.name} runs on {', '.join(item.speeds)} and the cluster has {', '.join(pools)}; "
                "correct its speeds"
            )
        check_fits(item.job, max((pools[kind] for kind in kinds), key=lambda pool: pool.num_gpus))
    if len({item.job.name for item in trace}) != len(trace):
        raise ValueError("two jobs of the trace have the same name; give each its own")


def _decide(
    now: float,
    policy: Policy,
    typed: TypesPolicy | None,
    active: Mapping[str, SimulatedJob],
    pools: Mapping[str, Cluster],
) -> tuple[list[Segment], bool]:
    """Carries out a decision. Returns the segments that ended, and False if a change may move jobs to other pools."""

    def state_on(name: str, kind: str) -> JobState:
        return active[name].state(now, policy.foresight, kind)

    candidates = [job.candidate(now, policy.sizes) for job in active.values()]
    if typed:
        allocation = typed.decide_on_types(now, candidates, state_on, pools)
    else:
        allocation = _decide_in_pools(now, policy, divide(candidates, pools, state_on), active, pools)
    _check(allocation, active, pools, policy)
    changed = [job for name, job in active.items() if allocation.get(name) != job.grant]
    segments = [job.change(now, allocation.get(job.name)) for job in changed]
    ended = [part for part in segments if part is not None and part.end_s > part.start_s]
    return ended, typed is not None or len(pools) == 1 or not changed


def _decide_in_pools(
    now: float, policy: Policy, division: Division, active: Mapping[str, SimulatedJob], pools: Mapping[str, Cluster]
) -> Allocation:
    if division.leaving:  # the next decision is on the others
        kept = {name: job.grant for name, job in active.items() if name not in division.leaving}
        return {name: grant for name, grant in kept.items() if grant is not None}
    for name, job in active.items():
        job.waits_in = division.pools.get(name)
    allocation = {}
    for kind, states in division.states.items():
        grants = policy.decide(now, states, pools[kind]) if states else {}
        allocation.update((name, dataclasses.replace(grant, gpu_type=kind)) for name, grant in grants.items())
    return allocation


def _check(
    allocation: Allocation, active: Mapping[str, SimulatedJob], pools: Mapping[str, Cluster], policy: Policy
) -> None:
    who = type(policy).__name__
    taken: dict[str, set[int]] = {kind: set() for kind in pools}
    for name, grant in allocation.items():
        if name not in active:
            raise SimulationError(f"{who} grants GPUs to {name}, which is not there")
        if grant.gpu_type not in active[name].kinds:
            raise SimulationError(f"{who} grants {name} GPUs of type {grant.gpu_type!r}, which it cannot have")
        job, there = active[name].job_on(grant.gpu_type), taken[grant.gpu_type]
        if job.largest_size(len(grant.gpus)) != len(grant.gpus) or not grant.gpus:
            raise SimulationError(f"{who} grants {len(grant.gpus)} GPUs to {name}, which runs on {job.sizes}")
        if grant.batch_size < len(grant.gpus):
            raise SimulationError(f"{who} grants {name} a batch of {grant.batch_size} on {len(grant.gpus)} GPUs")
        if job.feasible_batches and grant.batch_size not in job.batches_on(len(grant.gpus)):
            raise SimulationError(f"{who} grants {name} a batch of {grant.batch_size}, which it does not take now")
        own = set(grant.gpus)
        if len(own) != len(grant.gpus) or not own <= set(range(pools[grant.gpu_type].num_gpus)) or own & there:
            raise SimulationError(f"{who} grants GPUs {grant.gpus} to {name}, of which some are not there or taken")
        there |= own

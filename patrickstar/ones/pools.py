"""A pool is all GPUs of one type. A job's ranks are in one pool, and the policy decides within each.

Pure functions, for the cluster's scheduler and the simulator.

A job waits in the pool where it raises the product of all jobs' speeds most (proportional fairness). A job's speed is
its relative speed on the type times an equal share of the pool's GPUs, at most those that the policy grants the job.
Others get what it does not take. Relative speeds are measured at equal ranks and batch; before, they are those of data
sheets. A job leaves its pool for one where the product would be :data:`WORTH_A_MOVE` times as high.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from patrickstar.ones.jobs import Cluster, JobState
from patrickstar.planning.gpus import DATA_SHEETS

WORTH_A_MOVE = 1.5
_STAYS = 10  # times as long as it took to start, before a job may leave its pool

Seconds = Mapping[tuple[int, int], float]
"""Seconds of a step by number of ranks and global batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job that runs in a pool or waits for one."""

    name: str
    least_gpus: int
    """Minimum to run."""
    gpus: int
    """The most that the policy may grant: requested, or the job's maximum."""
    speeds: Mapping[str, float]
    """Relative speeds on the types of GPUs that it may have."""
    held: str | None = None
    """The type of its GPUs; None: it waits."""
    waits: str | None = None
    """The pool in which it waits, once one was chosen. It moves as a running job does, since GPUs are being freed."""
    may_leave: bool = False
    """True if the job keeps checkpoints, and :func:`has_stayed`."""


StateOn = Callable[[str, str], JobState]
"""The state of a job, by name, with its speed on a type of GPUs."""


@dataclasses.dataclass(frozen=True)
class Division:
    """Jobs by pool."""

    pools: Mapping[str, str]
    """The pool of each job that one can hold."""
    leaving: tuple[str, ...]
    """Running jobs to stop, which then wait for another pool."""
    states: Mapping[str, Sequence[JobState]]
    """Other jobs that fit, by pool: the policy decides on them."""


def divide(candidates: Sequence[Candidate], pools: Mapping[str, Cluster], state_on: StateOn) -> Division:
    """Pools of all jobs, by :func:`choose_pools`."""
    chosen = choose_pools(candidates, pools)
    leaving = tuple(
        one.name for one in candidates if one.held is not None and chosen.get(one.name, one.held) != one.held
    )
    states = {}
    for kind, pool in pools.items():
        names = [one.name for one in candidates if chosen.get(one.name) == kind and one.name not in leaving]
        found = [state_on(name, kind) for name in names]
        states[kind] = [state for state in found if min(state.job.sizes, default=math.inf) <= pool.num_gpus]
    return Division(chosen, leaving, states)


def states_on_types(one: Candidate, state_on: StateOn, pools: Mapping[str, Cluster]) -> dict[str, JobState]:
    """A job's states by the types that can hold it; on other types than its own it holds no GPUs."""
    kinds = [kind for kind in one.speeds if one.least_gpus <= pools[kind].num_gpus]
    states = {kind: state_on(one.name, kind) for kind in kinds}
    return {kind: state if kind == one.held else dataclasses.replace(state, gpus=()) for kind, state in states.items()}


def has_stayed(run_s: float, start_s: float) -> bool:
    """True if a job has run long enough, since a start or resize that took ``start_s``, to leave its pool."""
    return run_s > _STAYS * start_s


def total(pools: Mapping[str, Cluster]) -> Cluster:
    """The whole cluster."""
    return Cluster(sum(pool.num_gpus for pool in pools.values()), max(pool.gpus_per_node for pool in pools.values()))


def sheet_tflops(gpu_type: str) -> float | None:
    """Rate of the data sheet of a type as Ray names it (``H100``, ``A100-40G``); None: unknown."""
    name = gpu_type.lower()
    for found in (name, name.removesuffix("g"), name.partition("-")[0]):
        if found in DATA_SHEETS:
            return DATA_SHEETS[found].tflops
    return None


def relative_speeds(measured: Mapping[str, Seconds], kinds: Sequence[str]) -> dict[str, float]:
    """Speeds of a job on some types, relative to each other.

    Args:
        measured: its steps, by type.
        kinds: the types.
    """
    rates = [sheet_tflops(kind) for kind in kinds]
    sheets = {kind: 1.0 if None in rates else rate or 1.0 for kind, rate in zip(kinds, rates, strict=True)}
    base = next((kind for kind in kinds if measured.get(kind)), None)
    if base is None:
        return sheets
    speeds = {}
    for kind in kinds:
        common = measured[base].keys() & measured.get(kind, {}).keys()
        ratios = [measured[base][key] / measured[kind][key] for key in common]
        speeds[kind] = statistics.median(ratios) if ratios else sheets[kind] / sheets[base]
    return speeds


def seconds_on(measured: Mapping[str, Seconds], kind: str, kinds: Sequence[str]) -> Seconds:
    """Seconds of a job's steps on a type: measured there, or elsewhere and scaled by relative speeds.

    Steps on another type are left out if both types were measured, but never at equal ranks and batch.
    """
    own = measured.get(kind, {})
    found = dict(own)
    speeds = relative_speeds(measured, kinds)
    for other in kinds if kind in kinds else ():
        steps = measured.get(other, {})
        if other != kind and (not own or own.keys() & steps.keys()):
            for key, seconds in steps.items():
                found.setdefault(key, seconds * speeds[other] / speeds[kind])
    return found


def choose_pools(candidates: Sequence[Candidate], pools: Mapping[str, Cluster]) -> dict[str, str]:
    """The pool of each job that one can hold. At most one running job leaves its pool at a time.

    Args:
        candidates: by arrival.
        pools: clusters by type.
    """
    chosen = {one.name: one.held for one in candidates if one.held in pools}
    for one in candidates:
        waits = one.waits if one.waits in pools and one.least_gpus <= pools[one.waits].num_gpus else None
        if one.held is None and (best := _better(one, waits, candidates, chosen, pools)) is not None:
            chosen[one.name] = best
    for one in candidates:
        if one.may_leave and one.held in pools:
            best = _better(one, one.held, candidates, chosen, pools)
            if best != one.held and best is not None:
                return {**chosen, one.name: best}
    return chosen


def _better(
    one: Candidate,
    present: str | None,
    candidates: Sequence[Candidate],
    chosen: Mapping[str, str],
    pools: Mapping[str, Cluster],
) -> str | None:
    """The best pool for a job, or the present one if no other is worth a move; None: no pool can hold it."""
    best = _best(one, candidates, chosen, pools)
    if best in (None, present) or present not in pools or present not in one.speeds:
        return best
    gain = _worth(one, best, candidates, chosen, pools) - _worth(one, present, candidates, chosen, pools)
    return best if gain > math.log(WORTH_A_MOVE) else present


def _best(
    one: Candidate, candidates: Sequence[Candidate], chosen: Mapping[str, str], pools: Mapping[str, Cluster]
) -> str | None:
    kinds = [kind for kind in one.speeds if kind in pools and one.least_gpus <= pools[kind].num_gpus]
    if len(kinds) == 1:
        return kinds[0]
    return max(
        kinds, key=lambda kind: (_worth(one, kind, candidates, chosen, pools), pools[kind].num_gpus), default=None
    )


def _worth(
    one: Candidate, kind: str, candidates: Sequence[Candidate], chosen: Mapping[str, str], pools: Mapping[str, Cluster]
) -> float:
    """The logarithm of the factor by which a job multiplies the product of all speeds if it joins a pool."""
    others = [other.gpus for other in candidates if chosen.get(other.name) == kind and other.name != one.name]
    before, after = _equal_share(others, pools[kind].num_gpus), _equal_share([*others, one.gpus], pools[kind].num_gpus)
    lost = sum(math.log(min(gpus, after) / min(gpus, before)) for gpus in others)
    return math.log(one.speeds[kind] * min(one.gpus, after)) + lost


def _equal_share(most: Sequence[int], num_gpus: int) -> float:
    """GPUs of each job, as far as it takes so many: what jobs do not take goes to the others."""
    left, rest = float(num_gpus), len(most)
    for gpus in sorted(most):
        if gpus * rest >= left:
            return left / rest
        left, rest = left - gpus, rest - 1
    return math.inf

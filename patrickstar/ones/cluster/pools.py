"""Pools: all GPUs of one type. A job's ranks are in one pool, and the policy decides within each. Pure functions.

A job waits in the pool where it raises the product of all jobs' speeds most (proportional fairness). A job's speed is
its relative speed on the type, times the pool's GPUs over those that its jobs have requested, at most 1. Relative
speeds are measured at equal ranks and batch; before that they are those of data sheets. A running job leaves its pool
for one where the product would be :data:`WORTH_A_MOVE` times as high.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from patrickstar.ones.jobs import Cluster
from patrickstar.planning.gpus import DATA_SHEETS

WORTH_A_MOVE = 1.5

Seconds = Mapping[tuple[int, int], float]
"""Seconds of a step by number of ranks and global batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job that runs in a pool or waits for one."""

    name: str
    least_gpus: int
    """Minimum to run."""
    gpus: int
    """Requested."""
    speeds: Mapping[str, float]
    """Relative speeds on the types of GPUs that it may have."""
    held: str | None = None
    """The type of its GPUs; None: it waits."""
    may_leave: bool = False
    """True if the job keeps checkpoints, and has run long enough since its start."""


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
    """Seconds of a job's steps on a type: measured there, or elsewhere and scaled by relative speeds."""
    others = [other for other in kinds if measured.get(other)]
    if measured.get(kind) or kind not in kinds or not others:
        return measured.get(kind, {})
    speeds = relative_speeds(measured, kinds)
    return {key: seconds * speeds[others[0]] / speeds[kind] for key, seconds in measured[others[0]].items()}


def choose_pools(candidates: Sequence[Candidate], pools: Mapping[str, Cluster]) -> dict[str, str]:
    """The pool of each job that one can hold. At most one running job leaves its pool at a time.

    Args:
        candidates: by arrival.
        pools: clusters by type.
    """
    chosen = {one.name: one.held for one in candidates if one.held in pools}
    for one in candidates:
        if one.held is None and (best := _best(one, candidates, chosen, pools)) is not None:
            chosen[one.name] = best
    for one in candidates:
        if not one.may_leave or one.held not in pools:
            continue
        others = {name: kind for name, kind in chosen.items() if name != one.name}
        best = _best(one, candidates, others, pools)
        gain = (
            0.0
            if best is None
            else math.exp(
                _worth(one, best, candidates, others, pools) - _worth(one, one.held, candidates, others, pools)
            )
        )
        if gain > WORTH_A_MOVE:
            return {**chosen, one.name: best}
    return chosen


def _best(
    one: Candidate, candidates: Sequence[Candidate], chosen: Mapping[str, str], pools: Mapping[str, Cluster]
) -> str | None:
    kinds = [kind for kind in one.speeds if kind in pools and one.least_gpus <= pools[kind].num_gpus]
    return max(
        kinds, key=lambda kind: (_worth(one, kind, candidates, chosen, pools), pools[kind].num_gpus), default=None
    )


def _worth(
    one: Candidate, kind: str, candidates: Sequence[Candidate], chosen: Mapping[str, str], pools: Mapping[str, Cluster]
) -> float:
    """The logarithm of the factor by which a job multiplies the product of all speeds if it joins a pool."""
    others = [other for other in candidates if chosen.get(other.name) == kind]
    load = sum(other.gpus for other in others)
    before = min(1.0, pools[kind].num_gpus / max(load, 1))
    after = min(1.0, pools[kind].num_gpus / (load + one.gpus))
    return math.log(one.speeds[kind] * after) + len(others) * math.log(after / before)

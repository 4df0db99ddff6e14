"""Gavel (OSDI 2020): shares of time on types of GPUs by a linear program, and rounds in which jobs receive them."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, JobState
from patrickstar.ones.policies.placement import place_on_types
from patrickstar.ones.policies.protocol import Allocation, Memoryless, Profiling, Sizes
from patrickstar.ones.policies.simplex import best_shares
from patrickstar.ones.pools import Candidate, StateOn, states_on_types

_LEAST_SHARE = 1e-6
_REST = 1e-3  # weight of the sum of all speeds beside the least one, so that no GPU is idle for the sake of fairness


class Objective(enum.Enum):
    """The function of the jobs' gains that shares of time maximise."""

    LEAST = "least"
    """The least gain: max-min fairness."""
    TOTAL = "total"
    """The sum of gains: total throughput. A job may have no share until others end."""


class Gavel(Memoryless):
    """Least attained service and total throughput with the speeds of types, by its mechanism of rounds (section 5).

    ``X[m, j]`` is the share of time of job ``m`` on GPUs of type ``j``. A job's gain is ``z_m sum_j T[m, j] X[m, j] /
    E_m``: ``z`` is the request in GPUs, ``T`` the job's speed there, and ``E`` its speed with equal shares of all GPUs.
    Each round serves jobs by descending ``X[m, j]`` over the share that they have had on that type since they arrived.
    Jobs are rigid, keep their configured batch, and have one type in a round.

    Differences from Gavel: rounds of 120 s in place of 360, since half of the jobs of some mixes end within 150 s; free
    GPUs are granted at once when a job arrives or ends; jobs do not share a GPU; total throughput is a sum of gains,
    since steps of different models do not compare. Relative speeds are known from a job's arrival.
    """

    sizes = Sizes.REQUESTED
    profiling = Profiling.EACH_TYPE

    def __init__(self, interval_s: float = 120.0, objective: Objective = Objective.LEAST):
        self.interval_s = interval_s
        self._objective = objective
        self._next_round_s = 0.0
        self._seen_s = 0.0
        self._had_s: dict[tuple[str, str], float] = {}
        """Seconds on each type, by job and type."""

    def finished(self, now: float, state: JobState) -> None:
        """Forgets the job."""
        for key in [key for key in self._had_s if key[0] == state.job.name]:
            del self._had_s[key]

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        return self._decide(now, [{"": state} for state in jobs], [{"": 1.0}] * len(jobs), {"": cluster})

    def decide_on_types(
        self, now: float, candidates: Sequence[Candidate], state_on: StateOn, pools: Mapping[str, Cluster]
    ) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.TypesPolicy.decide_on_types`."""
        jobs = [states_on_types(one, state_on, pools) for one in candidates]
        return self._decide(now, jobs, [one.speeds for one in candidates], pools)

    def _decide(
        self,
        now: float,
        jobs: Sequence[Mapping[str, JobState]],
        speeds: Sequence[Mapping[str, float]],
        pools: Mapping[str, Cluster],
    ) -> Allocation:
        """Grants for jobs whose states are given by type; those on other types than a job's own hold no GPUs."""
        if not jobs:
            return {}
        held = {row: kind for row, states in enumerate(jobs) for kind, state in states.items() if state.gpus}
        self._note(now, [(jobs[row][kind].job.name, kind) for row, kind in held.items()])
        chosen = held
        if now >= self._next_round_s:
            self._next_round_s, chosen = now + self.interval_s, {}
        free = {kind: pool.num_gpus for kind, pool in pools.items()}
        for row, kind in chosen.items():
            free[kind] -= len(jobs[row][kind].gpus)
        sizes = [{kind: state.job.rigid_size(pools[kind]) for kind, state in states.items()} for states in jobs]
        shares = self._shares(sizes, speeds, pools)
        for _, row, kind in sorted(self._urgencies(now, jobs, shares), key=lambda one: (-one[0], *one[1:])):
            if row not in chosen and sizes[row][kind] <= free[kind]:
                chosen[row] = kind
                free[kind] -= sizes[row][kind]
        placed: dict[str, list[tuple[JobState, int]]] = {kind: [] for kind in pools}
        for row, kind in chosen.items():
            placed[kind].append((jobs[row][kind], sizes[row][kind]))
        return place_on_types(placed, pools, BatchRule.CONFIGURED)

    def _note(self, now: float, held: Sequence[tuple[str, str]]) -> None:
        """Counts the time since the last decision for jobs that held GPUs of a type."""
        for key in held:
            self._had_s[key] = self._had_s.get(key, 0.0) + now - self._seen_s
        self._seen_s = now

    def _urgencies(
        self, now: float, jobs: Sequence[Mapping[str, JobState]], shares: Sequence[Mapping[str, float]]
    ) -> list[tuple[float, int, str]]:
        """Share of time over the share so far, of each job and type, with the job's row."""
        found = []
        for row, states in enumerate(jobs):
            for kind, state in states.items():
                age_s, had_s = now - state.job.arrival_s, self._had_s.get((state.job.name, kind), 0.0)
                if shares[row][kind] > _LEAST_SHARE:
                    found.append((shares[row][kind] * age_s / had_s if had_s else math.inf, row, kind))
        return found

    def _shares(
        self, sizes: Sequence[Mapping[str, int]], speeds: Sequence[Mapping[str, float]], pools: Mapping[str, Cluster]
    ) -> list[dict[str, float]]:
        """``X`` by job and type."""
        columns = [(row, kind) for row, by_kind in enumerate(sizes) for kind in by_kind]
        num_gpus, count = sum(pool.num_gpus for pool in pools.values()), len(columns)
        gains = np.zeros(count)  # of a share of 1, in units of the job's speed with equal shares
        per_job, per_type = np.zeros((len(sizes), count)), np.zeros((len(pools), count))
        for column, (row, kind) in enumerate(columns):
            equal = sum(speeds[row][other] * pools[other].num_gpus for other in sizes[row]) / num_gpus
            gains[column] = sizes[row][kind] * speeds[row][kind] / equal
            per_job[row, column] = 1.0
            per_type[list(pools).index(kind), column] = sizes[row][kind]
        least = np.ones((len(sizes), 1))
        rows = np.vstack(
            [
                np.hstack([-per_job * gains, least]),  # no job's gain is below the least one, the last variable
                np.hstack([per_job, 0 * least]),
                np.hstack([per_type, np.zeros((len(pools), 1))]),
            ]
        )
        limits = [0.0] * len(sizes) + [1.0] * len(sizes) + [float(pool.num_gpus) for pool in pools.values()]
        worth = np.append(gains, 0.0) if self._objective is Objective.TOTAL else np.append(_REST * gains / count, 1.0)
        solved = best_shares(worth, rows, np.array(limits))
        found: list[dict[str, float]] = [{} for _ in sizes]
        for (row, kind), share in zip(columns, solved, strict=False):
            found[row][kind] = float(share)
        return found

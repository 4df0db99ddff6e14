"""Pollux-like (OSDI 2021): a genetic search for the allocation with the highest power mean of goodput speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, JobState, goodputs
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.protocol import Allocation, Memoryless

_LEAST_SPEEDUP = 1e-3


class PolluxLike(Memoryless):
    """Fitness is ``(mean_j speedup_j^p)^(1/p)`` (section 4.2).

    ``speedup_j`` is the goodput relative to that of an equal share of the cluster, times ``(T - R d) / (T + d)`` if the
    job would be resized. ``T`` is its age, ``R`` its resizes so far, ``d`` the seconds of one (equation 15). No job
    gets more than twice the most that it has held.

    Differences from Pollux: the search is over numbers of GPUs, which are then placed. It starts at once when a job
    arrives or ends; Pollux waits for its next round of 60 s.
    """

    def __init__(
        self, seed: int = 0, power: float = -1.0, population: int = 48, generations: int = 24, interval_s: float = 30.0
    ):
        self.interval_s = interval_s
        self._power = power
        self._population = population
        self._generations = generations
        self._rng = np.random.default_rng(seed)

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            return {}
        powered, limits = self._tables(now, jobs, cluster)
        columns = np.arange(len(jobs))
        current = np.array([len(state.gpus) for state in jobs])
        share = np.minimum(np.maximum(cluster.num_gpus // len(jobs), 1), limits)
        population = np.stack([current, share, *self._random(limits, self._population - 2, cluster)])
        for generation in range(self._generations + 1):
            self._repair(population, cluster)
            order = np.argsort(-powered[columns, population].mean(axis=1) * np.sign(self._power), kind="stable")
            population = population[order[: self._population]]
            if generation < self._generations:
                population = np.concatenate([population, self._children(population, limits)])
        snapped = [state.job.largest_size(int(n)) for state, n in zip(jobs, population[0], strict=True)]
        sizes = {state.job.name: n for state, n in zip(jobs, snapped, strict=True) if n}
        return place(sizes, jobs, cluster, BatchRule.BEST_GOODPUT)

    def _tables(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
        """Speed-ups to the power of p by job and number of GPUs, and the most GPUs of each job."""
        most = min(cluster.num_gpus, max(state.job.max_gpus for state in jobs))
        powered = np.full((len(jobs), most + 1), _LEAST_SPEEDUP)
        limits = np.zeros(len(jobs), dtype=np.int64)
        share = max(1, cluster.num_gpus // len(jobs))
        for row, state in enumerate(jobs):
            speeds = goodputs(state.job, BatchRule.BEST_GOODPUT, cluster)
            fair = speeds[max(state.job.largest_size(min(share, len(speeds) - 1)), state.job.sizes[0])]
            factor = np.ones(len(speeds))
            age, delay = now - state.job.arrival_s, state.job.resize_s
            if state.has_started and delay:
                factor[:] = max(age - state.num_resizes * delay, 0.0) / (age + delay)
                factor[len(state.gpus)] = 1.0
            powered[row, : len(speeds)] = np.maximum(speeds / fair * factor, _LEAST_SPEEDUP)
            limits[row] = state.job.largest_size(min(len(speeds) - 1, max(2 * state.most_gpus, state.job.sizes[0])))
        return powered**self._power, limits

    def _random(self, limits: np.ndarray, rows: int, cluster: Cluster) -> list[np.ndarray]:
        mean = max(1.0, cluster.num_gpus / len(limits))
        return [np.minimum(self._rng.poisson(mean, len(limits)), limits) for _ in range(rows)]

    def _children(self, population: np.ndarray, limits: np.ndarray) -> np.ndarray:
        shape = population.shape
        first = population[np.minimum(*self._rng.integers(0, shape[0], (2, shape[0])))]
        second = population[np.minimum(*self._rng.integers(0, shape[0], (2, shape[0])))]
        children = np.where(self._rng.random(shape) < 0.5, first, second)
        mutates = self._rng.random(shape) < 1.0 / shape[1]
        return np.where(mutates, self._rng.integers(0, limits + 1, shape), children)

    def _repair(self, population: np.ndarray, cluster: Cluster) -> None:
        """Removes GPUs of random jobs from rows that exceed the cluster."""
        for row in np.flatnonzero(population.sum(axis=1) > cluster.num_gpus):
            counts = population[row]
            slots = np.repeat(np.arange(len(counts)), counts)
            kept = self._rng.permutation(slots)[: cluster.num_gpus]
            population[row] = np.bincount(kept, minlength=len(counts))

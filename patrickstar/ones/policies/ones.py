"""ONES with its defects corrected: goodput instead of raw throughput, and measured resize costs.

The operators are those of :mod:`patrickstar.ones.policies.ones_published`, on numbers of GPUs instead of single GPUs.
Instead of its reordering, jobs that keep their number of GPUs keep their GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, JobState, goodputs
from patrickstar.ones.policies.placement import place
from patrickstar.ones.policies.progress import ProgressModel
from patrickstar.ones.policies.protocol import Allocation, Foresight

_MUTATION = 0.3
_RULE = BatchRule.BEST_GOODPUT


class Ones:
    """Maximises ``sum_j 1 / (R_j / G_j(n_j) + c_j)``: the rate at which jobs end if nothing changed any more.

    ``R`` is the expected remaining work (the mean of its distribution), ``G`` the goodput at the best batch. ``c`` is
    the seconds of a resize if ``n`` differs from the job's present number, else 0. A resized job keeps its GPUs for
    ``cooldown_resizes`` times the cost of a resize, and at least for ``cooldown_s``.
    """

    foresight = Foresight.NONE

    def __init__(
        self,
        progress: ProgressModel,
        seed: int = 0,
        population: int = 16,
        interval_s: float = 10.0,
        cooldown_s: float = 5.0,
        cooldown_resizes: float = 2.0,
    ):
        self.interval_s = interval_s
        self._progress = progress
        self._size = population
        self._cooldown_s = cooldown_s
        self._cooldown_resizes = cooldown_resizes
        self._rng = np.random.default_rng(seed)
        self._population = np.zeros((0, 0), dtype=np.int64)
        self._names: list[str] = []

    def finished(self, now: float, state: JobState) -> None:
        """Learns from the job's epochs."""
        self._progress.finished(state)

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        if not jobs:
            return {}
        for state in jobs:
            self._progress.watch(state)
        current = np.array([len(state.gpus) for state in jobs])
        held = np.array([bool(state.gpus) and not self._may_change(state) for state in jobs])
        values = self._values(jobs, cluster, current, held)
        old = self._refreshed(jobs, values.shape[1] - 1)
        rows = np.concatenate(
            [old, self._crossed(old), self._mutated(old), current[None], np.zeros_like(current)[None]]
        )
        rows = np.where(held, current, rows)
        _repair(rows, values, held, cluster.num_gpus)
        rows = _pad(np.unique(rows, axis=0), values, cluster.num_gpus)
        scores = values[np.arange(len(jobs)), rows].sum(axis=1)
        self._population = rows[np.argsort(-scores, kind="stable")[: self._size]]
        self._names = [state.job.name for state in jobs]
        sizes = {state.job.name: int(n) for state, n in zip(jobs, self._population[0], strict=True) if n}
        return place(sizes, jobs, cluster, _RULE)

    def _may_change(self, state: JobState) -> bool:
        return state.run_since_resize_s >= max(self._cooldown_s, self._cooldown_resizes * state.job.resize_s)

    def _remaining(self, jobs: Sequence[JobState]) -> np.ndarray:
        """Expected remaining samples of the base batch, by job; float64 ``[jobs]``."""
        unknown = self._progress.total_epochs()
        known = [i for i, state in enumerate(jobs) if state.epochs >= 1 and state.initial_loss > 0]
        left = np.array([unknown * state.job.epoch_samples for state in jobs])
        if known:
            epochs = self._progress.epochs_left([jobs[i] for i in known])
            left[known] = epochs * np.array([jobs[i].job.epoch_samples for i in known])
        return left

    def _values(self, jobs: Sequence[JobState], cluster: Cluster, current: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Value per second of each number of GPUs for each job; -inf where the job cannot have it."""
        most = min(cluster.num_gpus, max(state.job.max_gpus for state in jobs))
        speeds = np.zeros((len(jobs), most + 1))
        for row, state in enumerate(jobs):
            known = goodputs(state.job, _RULE, cluster)
            speeds[row, : len(known)] = known
        started = np.array([state.has_started for state in jobs])
        resize_s = np.array([state.job.resize_s for state in jobs])
        left = self._remaining(jobs)
        changed = started[:, None] & (np.arange(most + 1) != current[:, None])
        with np.errstate(divide="ignore"):
            seconds = left[:, None] / speeds
        values = np.where(speeds > 0, 1 / (seconds + resize_s[:, None] * changed + 1e-9), -np.inf)
        values[:, 0] = 0.0
        runs = np.flatnonzero(current)
        stays = seconds[runs, current[runs]]
        values[runs, 0] = 1 / (stays + resize_s[runs] + 1e-9) - 1 / (stays + 1e-9)
        stuck = values[held, current[held]]
        values[held] = -np.inf
        values[held, current[held]] = stuck
        return values

    def _refreshed(self, jobs: Sequence[JobState], most: int) -> np.ndarray:
        """The population in the present order of jobs, without ended jobs; new jobs have no GPU yet."""
        before = {name: column for column, name in enumerate(self._names)}
        old = np.zeros((len(self._population), len(jobs)), dtype=np.int64)
        for column, state in enumerate(jobs):
            if state.job.name in before:
                old[:, column] = self._population[:, before[state.job.name]]
        return np.minimum(old, most)

    def _crossed(self, old: np.ndarray) -> np.ndarray:
        if not len(old):
            return old
        first, second = old[self._rng.integers(0, len(old), (2, len(old)))]
        return np.where(self._rng.random(old.shape) < 0.5, first, second)

    def _mutated(self, old: np.ndarray) -> np.ndarray:
        return np.where(self._rng.random(old.shape) < _MUTATION, 0, old)


def _repair(rows: np.ndarray, values: np.ndarray, held: np.ndarray, num_gpus: int) -> None:
    """Evicts the jobs with the least value per GPU from rows with more GPUs than there are; in place."""
    columns = np.arange(rows.shape[1])
    rows[~np.isfinite(values[columns, rows])] = 0
    over = np.flatnonzero(rows.sum(axis=1) > num_gpus)
    if not len(over):
        return
    chosen = rows[over]
    density = np.where(chosen > 0, values[columns, chosen] / np.maximum(chosen, 1), 0.0)
    density[:, held] = np.inf
    order = np.argsort(-density, axis=1, kind="stable")
    ascending = np.take_along_axis(chosen, order, axis=1)
    kept = np.where(np.cumsum(ascending, axis=1) <= num_gpus, ascending, 0)
    np.put_along_axis(chosen, order, kept, axis=1)
    rows[over] = chosen


def _pad(rows: np.ndarray, values: np.ndarray, num_gpus: int) -> np.ndarray:
    """Grants free GPUs repeatedly to the job whose value rises most per GPU, by one size or by several."""
    jobs, columns = np.arange(values.shape[0]), np.arange(values.shape[1])
    slopes = np.full(values.shape, -np.inf)
    jumps = np.tile(columns, (len(jobs), 1))
    steps = slopes.copy()
    nexts = jumps.copy()
    for n in columns[:-1]:
        with np.errstate(invalid="ignore"):
            rise = (values[:, n + 1 :] - values[:, n : n + 1]) / (columns[n + 1 :] - n)
        rise = np.where(np.isfinite(rise), rise, -np.inf)
        best = rise.argmax(axis=1)
        slopes[:, n], jumps[:, n] = rise[jobs, best], n + 1 + best
        near = np.isfinite(rise).argmax(axis=1)
        steps[:, n], nexts[:, n] = rise[jobs, near], n + 1 + near
    curve = _Rises(slopes, jumps - columns, steps, nexts - columns)
    for row in rows:
        _pad_row(row, curve, int(num_gpus - row.sum()))
    return rows


@dataclasses.dataclass(frozen=True)
class _Rises:
    """Rises by job and number of GPUs; float64 and int64 of shape ``[jobs, GPUs + 1]``."""

    best: np.ndarray
    """The largest rise of the value per additional GPU; -inf if there is none."""
    best_width: np.ndarray
    """Additional GPUs for that rise."""
    near: np.ndarray
    """The rise per additional GPU up to the next feasible number of GPUs."""
    near_width: np.ndarray
    """Additional GPUs for that rise."""


def _pad_row(row: np.ndarray, rises: _Rises, free: int) -> None:
    """Grants free GPUs in one row; in place. A step changes one job's rises; the others' are cached."""
    jobs = np.arange(len(row))
    best, best_width = rises.best[jobs, row], rises.best_width[jobs, row]
    near, near_width = rises.near[jobs, row], rises.near_width[jobs, row]
    widest = int(rises.best_width.max(initial=0))
    while free > 0:
        gain = best
        if free < widest:
            gain = np.where(best_width <= free, best, np.where(near_width <= free, near, -np.inf))
        job = int(gain.argmax())
        if not gain[job] > 0:
            return
        width = int(best_width[job])
        if width > free:
            width = int(near_width[job])
        free -= width
        row[job] += width
        n = row[job]
        best[job], best_width[job] = rises.best[job, n], rises.best_width[job, n]
        near[job], near_width[job] = rises.near[job, n], rises.near_width[job, n]

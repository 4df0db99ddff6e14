"""Lengths of jobs: a survival function learnt from jobs that ended and from the ages of those that run.

Hazards are constant within bins of the logarithm of length, and pulled towards a prior of one end per e-fold of age. So
without data a job is expected to last about as long as it has lasted, and the shortest-served job ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EDGES_S = np.geomspace(1.0, 1e7, 85)
_WIDTHS = np.diff(np.log(_EDGES_S))
_PRIOR_JOBS = 2.0  # the prior counts as so many jobs
_KERNEL = np.exp(-0.5 * (np.arange(-6, 7) / 2.0) ** 2)  # smoothing by 2 bins: a factor of 1.5 in length


class LengthModel:
    """Lengths are work in seconds on the requested GPUs with the configured batch."""

    def __init__(self, ended_s: Sequence[float] = (), most: int = 1000):
        self._ended = list(ended_s)
        self._most = most
        self._fit(np.zeros(0))

    def ended(self, length_s: float, ages_s: np.ndarray) -> None:
        """Learns the length of a job that ended; ``ages_s`` are those of jobs that go on."""
        self._ended.append(length_s)
        del self._ended[: -self._most]
        self._fit(ages_s)

    def remaining_s(self, ages_s: np.ndarray) -> np.ndarray:
        """Expected seconds of work per end, if the job is served as long as that pays: one over its Gittins index.

        The index at age ``a`` is the largest ``(S(a) - S(b)) / integral of S from a to b`` over ``b > a``.
        """
        places = np.log(np.maximum(ages_s, _EDGES_S[0]))
        return np.exp(np.interp(places, np.log(_EDGES_S[:-1]), self._log_remaining))

    def _fit(self, ages_s: np.ndarray) -> None:
        ends, at_risk = np.zeros(len(_WIDTHS)), np.zeros(len(_WIDTHS))
        lengths = np.clip(self._ended, _EDGES_S[0], _EDGES_S[-1] * 0.999)
        np.add.at(ends, np.searchsorted(_EDGES_S, lengths, side="right") - 1, 1.0)
        logs = np.log(np.maximum(np.concatenate([lengths, ages_s]), _EDGES_S[0]))
        at_risk = np.clip(logs[:, None] - np.log(_EDGES_S[:-1]), 0, _WIDTHS).sum(axis=0)
        ends, at_risk = np.convolve(ends, _KERNEL, "same"), np.convolve(at_risk, _KERNEL, "same")
        prior = _PRIOR_JOBS * _WIDTHS * _KERNEL.sum()
        hazards = (ends + prior) / (at_risk + prior)  # per e-fold
        survival = np.exp(-np.append(0.0, np.cumsum(hazards * _WIDTHS)))
        survival = np.maximum(survival, 1e-300)
        served = np.append(0.0, np.cumsum(0.5 * (survival[1:] + survival[:-1]) * np.diff(_EDGES_S)))
        drops = survival[:-1, None] - survival[None, 1:]
        costs = served[None, 1:] - served[:-1, None]
        rates = np.where(np.tri(len(_WIDTHS)).T > 0, drops / np.where(costs > 0, costs, np.inf), 0.0)
        self._log_remaining = -np.log(np.maximum(rates.max(axis=1), 1e-12))

"""Prediction of a job's progress, learnt from ended jobs: ONES' predictor as in its code, and corrected.

Progress after ``a`` epochs is taken as distributed by Beta(a, b). A network with one hidden layer of 64 predicts ``b``
from (log of an epoch's samples, initial loss, epochs, 1 - loss / initial loss, accuracy). The mean is ``a / (a + b)``,
so ``b`` is the expected number of remaining epochs.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from patrickstar.ones.jobs import JobState

_HIDDEN = 64
_BATCH = 64
_EDGE = 1e-4


class Recipe(enum.Enum):
    """Variants of training and prediction."""

    AS_WRITTEN = "as written"
    """ONES' code. It is trained on the logarithm of an epoch's samples and evaluated on the number itself. The
    likelihood of each ``b`` is taken at all jobs' progress, since shapes [B] and [B, 1] broadcast. ``b = 1 + ReLU``,
    Adam at 1e-4.
    """
    MENDED = "mended"
    """The same inputs in training and prediction, standardised; each row by itself; ``b`` on a logarithmic scale, Adam
    at 3e-3; epochs are weighted by statistical efficiency.
    """


@dataclasses.dataclass(frozen=True)
class HistoryRow:
    """One epoch of a job that has ended."""

    epoch_samples: float
    """Samples of an epoch."""
    initial_loss: float
    """Loss of its first epoch."""
    loss: float
    """Loss of this epoch."""
    accuracy: float
    """Accuracy after it, 0 to 1."""
    epochs_seen: float
    """Epochs so far."""
    epochs_done: float
    """Epochs so far, weighted by statistical efficiency."""
    progress_seen: float
    """``epochs_seen`` over the whole job's."""
    progress_done: float
    """``epochs_done`` over the whole job's."""


class ProgressModel:
    """The network, refitted by :meth:`fit` on the newest ``max_rows`` rows of history."""

    def __init__(self, recipe: Recipe, seed: int = 0, history: tuple[HistoryRow, ...] = (), max_rows: int = 1000):
        self._recipe = recipe
        self._max_rows = max_rows
        self._rng = np.random.default_rng(seed)
        self._rows: list[HistoryRow] = list(history)
        self._open: dict[str, list[JobState]] = {}
        bound = 5**-0.5
        self._weights = [
            self._rng.uniform(-bound, bound, (5, _HIDDEN)),
            self._rng.uniform(-bound, bound, _HIDDEN),
            self._rng.uniform(-0.125, 0.125, _HIDDEN),
            self._rng.uniform(-0.125, 0.125, ()),
        ]
        self._moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in self._weights]
        self._num_updates = 0
        self._shift, self._scale = np.zeros(5), np.ones(5)
        if self._rows:
            self.fit(num_epochs=60 if recipe is Recipe.AS_WRITTEN else 200)

    def watch(self, state: JobState) -> None:
        """Records a running job; one row for each finished epoch."""
        if state.initial_loss <= 0:
            return
        seen = self._open.setdefault(state.job.name, [])
        if not seen or int(seen[-1].epochs) < int(state.epochs):
            seen.append(state)

    def finished(self, state: JobState) -> None:
        """Turns the records of this job into rows, and refits."""
        for seen in self._open.pop(state.job.name, []):
            self._rows.append(
                HistoryRow(
                    seen.job.epoch_samples,
                    seen.initial_loss,
                    seen.loss,
                    seen.accuracy,
                    seen.epochs,
                    seen.done_samples / seen.job.epoch_samples,
                    seen.seen_samples / state.seen_samples,
                    seen.done_samples / state.done_samples,
                )  # fmt: skip
            )
        del self._rows[: -self._max_rows]
        if self._rows:
            self.fit(num_epochs=15)

    def total_epochs(self) -> float:
        """Weighted epochs of a job without data: the median of history, else 30."""
        totals = [row.epochs_done / row.progress_done for row in self._rows if row.progress_done > 0]
        return float(np.median(totals)) if totals else 30.0

    def epochs_left(self, states: list[JobState]) -> np.ndarray:
        """The network's ``b`` of each job: the expected number of remaining epochs; float64, ``[len(states)]``."""
        if not states:
            return np.zeros(0)
        columns = np.array(
            [
                (state.job.epoch_samples, state.initial_loss, self._epochs(state), _fall(state), state.accuracy)
                for state in states
            ]
        )
        if self._recipe is Recipe.MENDED:
            columns[:, 0] = np.log(columns[:, 0])
            columns = np.clip((columns - self._shift) / self._scale, -4, 4)
        return self._b(columns)[0]

    def _epochs(self, state: JobState) -> float:
        mended = self._recipe is Recipe.MENDED
        return state.done_samples / state.job.epoch_samples if mended else state.epochs

    def fit(self, num_epochs: int) -> None:
        """Makes so many passes over the rows, starting from the present weights."""
        mended = self._recipe is Recipe.MENDED
        rows = self._rows
        a = np.array([row.epochs_done if mended else row.epochs_seen for row in rows])
        progress = np.array([row.progress_done if mended else row.progress_seen for row in rows])
        progress = np.clip(progress, _EDGE, 1 - _EDGE)
        inputs = np.array(
            [
                (np.log(row.epoch_samples), row.initial_loss, epochs, 1 - row.loss / row.initial_loss, row.accuracy)
                for row, epochs in zip(rows, a, strict=True)
            ]
        )
        if mended:
            if self._num_updates == 0:
                self._shift, self._scale = inputs.mean(axis=0), inputs.std(axis=0) + 1e-6
            inputs = np.clip((inputs - self._shift) / self._scale, -4, 4)
        for _ in range(num_epochs):
            order = self._rng.permutation(len(rows))
            for start in range(0, len(rows), _BATCH):
                chosen = order[start : start + _BATCH]
                self._update(inputs[chosen], a[chosen], progress[chosen])

    def _b(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``b``, its derivative by the network's output, and the hidden layer."""
        first, first_bias, second, second_bias = self._weights
        hidden = np.tanh(inputs @ first + first_bias)
        output = hidden @ second + second_bias
        if self._recipe is Recipe.AS_WRITTEN:
            return 1 + np.maximum(output, 0), (output > 0).astype(np.float64), hidden
        b = np.exp(np.clip(output + 2.0, -4, 8))
        return b, b, hidden

    def _update(self, inputs: np.ndarray, a: np.ndarray, progress: np.ndarray) -> None:
        """A step of Adam on the negative log likelihood; its derivative is d/db = psi(b) - psi(a + b) - log(1 -
        progress).
        """
        b, slope, hidden = self._b(inputs)
        if self._recipe is Recipe.AS_WRITTEN:
            by_b = (digamma(b)[:, None] - digamma(a[None, :] + b[:, None]) - np.log1p(-progress)[None, :]).mean(axis=1)
        else:
            of_b, of_both = np.split(digamma(np.concatenate([b, a + b])), 2)  # one call is cheaper than two
            by_b = of_b - of_both - np.log1p(-progress)
        by_output = by_b * slope / len(a)
        by_hidden = (by_output[:, None] * self._weights[2]) * (1 - hidden**2)
        gradients = [inputs.T @ by_hidden, by_hidden.sum(axis=0), hidden.T @ by_output, by_output.sum()]
        rate = 1e-4 if self._recipe is Recipe.AS_WRITTEN else 3e-3
        self._num_updates += 1
        correct = np.sqrt(1 - 0.999**self._num_updates) / (1 - 0.9**self._num_updates)
        for i, gradient in enumerate(gradients):
            gradient = gradient + 1e-4 * self._weights[i]
            momentum, variance = self._moments[i]
            momentum = 0.9 * momentum + 0.1 * gradient
            variance = 0.999 * variance + 0.001 * gradient**2
            self._moments[i] = momentum, variance
            self._weights[i] = self._weights[i] - rate * correct * momentum / (np.sqrt(variance) + 1e-8)


def _fall(state: JobState) -> float:
    return 1 - state.loss / state.initial_loss if state.initial_loss > 0 else 0.0


def digamma(x: np.ndarray) -> np.ndarray:
    """The derivative of log gamma for x > 0, to about 1e-9: recurrence up to 6, then the asymptotic series."""
    x = np.array(x, dtype=np.float64)
    shift = np.zeros_like(x)
    for _ in range(6):
        small = x < 6
        if not small.any():
            break
        shift -= np.where(small, 1 / x, 0)
        x = np.where(small, x + 1, x)
    inverse = 1 / x**2
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse * (1 / 240 - inverse / 132))))
    return shift + np.log(x) - 0.5 / x - series

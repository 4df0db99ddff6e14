"""ONES' prediction of a job's progress, learnt from the epochs of ended jobs.

Progress after ``a`` epochs is taken as distributed by Beta(a, b). A network with one hidden layer of 64 predicts ``b``
from (log of an epoch's samples, initial loss, epochs, 1 - loss / initial loss, accuracy). The mean is ``a / (a + b)``,
so ``b`` is the expected number of remaining epochs.

Three defects of the authors' code are corrected: inputs are the same in training and prediction, and standardised; each
row's likelihood is taken at its own progress; ``b`` is on a logarithmic scale and fitted with Adam at 3e-3.
"""

from __future__ import annotations

import numpy as np

from patrickstar.ones.jobs import JobState
from patrickstar.ones.policies.past import EpochRecord, History

_HIDDEN = 64
_BATCH = 64
_EDGE = 1e-4


class ProgressModel:
    """The network, refitted by :meth:`fit` on the newest ``max_rows`` rows of history."""

    def __init__(self, seed: int = 0, history: History = (), max_rows: int = 1000):
        self._max_rows = max_rows
        self._rng = np.random.default_rng(seed)
        self._rows: list[EpochRecord] = [row for job in history for row in job.epochs][-max_rows:]
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
            self.fit(num_epochs=200)

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
                EpochRecord(
                    seen.job.epoch_samples, seen.initial_loss, seen.loss, seen.accuracy, seen.epochs,
                    seen.seen_samples / state.seen_samples,
                )
            )  # fmt: skip
        del self._rows[: -self._max_rows]
        if self._rows:
            self.fit(num_epochs=15)

    def epochs_left(self, states: list[JobState]) -> np.ndarray:
        """The network's ``b`` of each job: the expected number of remaining epochs; float64, ``[len(states)]``."""
        if not states:
            return np.zeros(0)
        rows = [
            (np.log(state.job.epoch_samples), state.initial_loss, state.epochs, _fall(state), state.accuracy)
            for state in states
        ]
        return self._b(np.clip((np.array(rows) - self._shift) / self._scale, -4, 4))[0]

    def fit(self, num_epochs: int) -> None:
        """Makes so many passes over the rows, starting from the present weights."""
        rows = self._rows
        a = np.array([row.epochs_seen for row in rows])
        progress = np.clip([row.progress_seen for row in rows], _EDGE, 1 - _EDGE)
        inputs = np.array(
            [
                (np.log(row.epoch_samples), row.initial_loss, epochs, 1 - row.loss / row.initial_loss, row.accuracy)
                for row, epochs in zip(rows, a, strict=True)
            ]
        )
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
        b = np.exp(np.clip(output + 2.0, -4, 8))
        return b, b, hidden

    def _update(self, inputs: np.ndarray, a: np.ndarray, progress: np.ndarray) -> None:
        """A step of Adam on the negative log likelihood; its derivative is d/db = psi(b) - psi(a + b) - log(1 -
        progress).
        """
        b, slope, hidden = self._b(inputs)
        of_b, of_both = np.split(digamma(np.concatenate([b, a + b])), 2)  # one call is cheaper than two
        by_b = of_b - of_both - np.log1p(-progress)
        by_output = by_b * slope / len(a)
        by_hidden = (by_output[:, None] * self._weights[2]) * (1 - hidden**2)
        gradients = [inputs.T @ by_hidden, by_hidden.sum(axis=0), hidden.T @ by_output, by_output.sum()]
        self._num_updates += 1
        correct = np.sqrt(1 - 0.999**self._num_updates) / (1 - 0.9**self._num_updates)
        for i, gradient in enumerate(gradients):
            gradient = gradient + 1e-4 * self._weights[i]
            momentum, variance = self._moments[i]
            momentum = 0.9 * momentum + 0.1 * gradient
            variance = 0.999 * variance + 0.001 * gradient**2
            self._moments[i] = momentum, variance
            self._weights[i] = self._weights[i] - 3e-3 * correct * momentum / (np.sqrt(variance) + 1e-8)


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

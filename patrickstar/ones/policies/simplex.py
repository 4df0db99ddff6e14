"""Small linear programs, by the primal simplex method on a dense tableau."""

from __future__ import annotations

import numpy as np

_LEAST = 1e-9
_PERTURBATION = 1e-8  # of limits, so that no step is degenerate and the method ends


def best_shares(gains: np.ndarray, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Maximises ``gains @ x`` with ``rows @ x <= limits`` and ``x >= 0``, to about 1e-7.

    Args:
        gains: float64 ``[n]``.
        rows: float64 ``[m, n]``.
        limits: float64 ``[m]``, none negative, so that ``x = 0`` is allowed.

    Returns:
        ``x``, float64 ``[n]``.

    Raises:
        ValueError: the sum has no bound.
    """
    (count, width), moved = rows.shape, _PERTURBATION * (1 + np.random.default_rng(0).random(len(limits)))
    table = np.hstack([rows, np.eye(count), (limits + moved)[:, None]])
    worth = np.concatenate([gains, np.zeros(count + 1)])
    basis = np.arange(width, width + count)
    while worth[column := int(worth[:-1].argmax())] > _LEAST:
        positive = table[:, column] > _LEAST
        if not positive.any():
            raise ValueError(f"variable {column} of a linear program has no bound; a policy is wrong")
        row = int(np.where(positive, table[:, -1] / np.where(positive, table[:, column], 1.0), np.inf).argmin())
        table[row] /= table[row, column]
        others = table[:, column].copy()
        others[row] = 0.0
        table -= others[:, None] * table[row]
        worth -= worth[column] * table[row]
        basis[row] = column
    found = np.zeros(width + count)
    found[basis] = table[:, -1]
    return found[:width]

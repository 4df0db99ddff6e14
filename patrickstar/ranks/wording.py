"""Formats ranks, and disagreements between them, for messages."""

from __future__ import annotations

import os
from collections.abc import Sequence

_SHOWN_CHARACTERS = 100


def format_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"; consecutive ranks are joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def describe_disagreement(name: str, values: dict[int, str]) -> str:
    """Lists the ranks that have each value, shown from shortly before the first difference."""
    distinct = sorted(set(values.values()), key=lambda value: min(r for r, v in values.items() if v == value))
    start = max(len(os.path.commonprefix(distinct)) - _SHOWN_CHARACTERS // 4, 0)
    shown = []
    for value in distinct:
        part = value[start : start + _SHOWN_CHARACTERS]
        part = f"{'...' if start else ''}{part}{'...' if len(value) > start + _SHOWN_CHARACTERS else ''}"
        shown.append(f"{format_ranks([rank for rank, other in values.items() if other == value])}: {part}")
    return f"ranks disagree on {name}; it must be the same on all. " + "; ".join(shown)

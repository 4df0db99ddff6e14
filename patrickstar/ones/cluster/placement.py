"""Nodes for a job's new ranks: as few as possible, and first those where the job is already. Pure functions.

Ray frees a placement group's GPUs only as a whole, and ranks leave one by one. So each rank, or inner group of ranks,
has a placement group of its own. Groups of one start are packed here; their GPUs are reserved together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def choose_nodes(free: Mapping[str, int], num_groups: int, group_size: int, present: Collection[str]) -> list[str]:
    """A node for each group. Groups for which no node has room get the emptiest node, and wait there or go elsewhere.

    Args:
        free: free GPUs by node.
        num_groups: groups to place.
        group_size: GPUs of a group; they are on one node.
        present: nodes where the job has ranks.
    """
    left = dict(free)
    chosen: list[str] = []
    while len(chosen) < num_groups and left:
        missing = (num_groups - len(chosen)) * group_size
        node = min(left, key=lambda one: _cost(left[one], missing, group_size, one in present or one in chosen, one))
        number = max(1, min(left[node] // group_size, num_groups - len(chosen)))
        chosen += [node] * number
        left[node] -= number * group_size
    return chosen


def _cost(free: int, missing: int, group_size: int, is_present: bool, name: str) -> tuple[bool, bool, bool, int, str]:
    """Smaller is better: room for a group; where the job is; room for all, as little as possible; else the most."""
    holds_all = free >= missing
    return free < group_size, not is_present, not holds_all, free if holds_all else -free, name

"""Transfers of a resize: which old rank sends which part of which parameter to which new rank. Pure functions.

Vocabulary:
  part      the elements [begin, end) of a parameter that a rank owns, flattened in memory order; begin == end: none.
  parts     a rank's part of each parameter, by the parameter's index.
  former    by new rank: this process's old rank, or None for a joining process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

Part = tuple[int, int]
Parts = Sequence[Part]


@dataclasses.dataclass(frozen=True, order=True)
class Move:
    """Elements [begin, end) of a parameter that the old rank ``source`` has and the new rank ``target`` lacks."""

    source: int
    target: int
    param: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def assign_ranks(num_old: int, num_new: int, leaving: Sequence[int] | None = None) -> list[int | None]:
    """The old rank of each new rank. Staying ranks keep their order, and rank 0 stays rank 0.

    The assignment lets them keep as much data as possible. Shards of a chunk are equal, so that is the overlap of the
    intervals [old / num_old, (old + 1) / num_old) and [new / num_new, (new + 1) / num_new).

    Args:
        num_old: ranks so far.
        num_new: ranks from now on.
        leaving: the old ranks that end, possibly more than ``num_old - num_new`` (others join instead). None: as few as
            possible, those whose shards overlap least.

    Raises:
        ValueError: a number is below 1, or ``leaving`` names rank 0, an unknown rank, or too few.
    """
    if min(num_old, num_new) < 1:
        raise ValueError(f"a resize from {num_old} to {num_new} ranks; give at least 1")
    if leaving is not None and (0 in leaving or not set(leaving) <= set(range(num_old))):
        raise ValueError(
            f"leaving is {list(leaving)}; give ranks from 1 to {num_old - 1}: rank 0 leads the resize and stays"
        )
    staying = [rank for rank in range(num_old) if rank not in set(leaving or ())]
    if leaving is not None and len(staying) > num_new:
        raise ValueError(f"{len(staying)} of {num_old} ranks would stay, and {num_new} are wanted; let more leave")
    num_staying = min(len(staying), num_new)
    # best[i][j][k]: most overlap with k of the first i old ranks placed among the first j new ones.
    none = -1
    best = [[[none] * (num_staying + 1) for _ in range(num_new + 1)] for _ in range(len(staying) + 1)]
    for i in range(len(staying) + 1):
        for j in range(num_new + 1):
            best[i][j][0] = 0
            for k in range(1, min(i, j, num_staying) + 1):
                found = max(best[i - 1][j][k], best[i][j - 1][k])
                before = best[i - 1][j - 1][k - 1]
                if before != none and (staying[i - 1] == 0) == (j == 1):
                    found = max(found, before + _overlap(staying[i - 1], num_old, j - 1, num_new))
                best[i][j][k] = found
    former: list[int | None] = [None] * num_new
    i, j, k = len(staying), num_new, num_staying
    while k > 0:
        if best[i][j][k] == best[i - 1][j][k]:
            i -= 1
        elif best[i][j][k] == best[i][j - 1][k]:
            j -= 1
        else:
            former[j - 1] = staying[i - 1]
            i, j, k = i - 1, j - 1, k - 1
    return former


def _overlap(old: int, num_old: int, new: int, num_new: int) -> int:
    """Overlap in units of 1 / (num_old x num_new)."""
    begin, end = max(old * num_new, new * num_old), min((old + 1) * num_new, (new + 1) * num_old)
    return max(end - begin, 0)


def find_moves(old: Sequence[Parts], new: Sequence[Parts], former: Sequence[int | None]) -> list[Move]:
    """The transfers, sorted: everything that a new rank owns and did not own before, from the one old rank that did.

    Args:
        old: parts by old rank; together they cover each element once.
        new: parts by new rank; the same.
        former: see the module's docstring.

    Raises:
        ValueError: the numbers of ranks or parameters do not fit.
    """
    if len(former) != len(new) or len({len(parts) for parts in (*old, *new)}) > 1:
        raise ValueError(f"{len(old)} old, {len(new)} new and {len(former)} former ranks have parts that do not fit")
    moves = []
    for target, parts in enumerate(new):
        for param, wanted in enumerate(parts):
            own = former[target]
            kept = (wanted[0], wanted[0]) if own is None else old[own][param]
            for piece in without(wanted, kept):
                for source, others in enumerate(old):
                    begin, end = max(piece[0], others[param][0]), min(piece[1], others[param][1])
                    if begin < end:
                        moves.append(Move(source, target, param, begin, end))
    return sorted(moves)


def without(part: Part, other: Part) -> Iterator[Part]:
    """The difference of two parts: none, one or two parts."""
    begin, end = max(part[0], other[0]), min(part[1], other[1])
    if begin >= end:
        if part[0] < part[1]:
            yield part
        return
    if part[0] < begin:
        yield part[0], begin
    if end < part[1]:
        yield end, part[1]


def kept(part: Part, other: Part) -> Part:
    """The intersection of two parts; if empty, an empty part at ``part``'s beginning."""
    begin, end = max(part[0], other[0]), min(part[1], other[1])
    return (begin, end) if begin < end else (part[0], part[0])

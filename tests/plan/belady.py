"""The least bytes that any policy must upload for a timeline, by a linear program that is independent of the planner.

Between two uses an array is kept, which takes room at every access in between, or dropped and uploaded again. For
arrays of one size the matrix is totally unimodular (intervals on a line), so the optimum is a schedule; otherwise it is
a lower bound.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix


def least_uploaded_bytes(uses: list[set[int]], sizes: list[int], room: list[int]) -> float:
    """Args:
    uses: for each access, the arrays it reads.
    sizes: bytes by array.
    room: for each access, bytes for arrays.
    """
    intervals = []  # (array, last use, next use)
    last: dict[int, int] = {}
    uploaded = 0
    for access, arrays in enumerate(uses):
        for array in arrays:
            if array in last:
                intervals.append((array, last[array], access))
            uploaded += sizes[array]
            last[array] = access
    if not intervals:
        return uploaded
    matrix = lil_matrix((len(uses), len(intervals)))
    left = np.array(
        [room[access] - sum(sizes[array] for array in arrays) for access, arrays in enumerate(uses)], dtype=float
    )
    for index, (array, begin, end) in enumerate(intervals):
        for access in range(begin + 1, end):
            matrix[access, index] = sizes[array]
    saved = [-float(sizes[array]) for array, _, _ in intervals]
    result = linprog(saved, A_ub=matrix.tocsr(), b_ub=left, bounds=(0, 1), method="highs")
    assert result.status == 0, result.message
    return uploaded + result.fun

import itertools
import random

import pytest

from patrickstar import _C
from patrickstar.elastic.movement import assign_ranks, find_moves


def parts_of(numels, chunk_numel, num_ranks):
    layouts = [
        _C.Layout.pack(
            numels, [_C.DType.FLOAT32] * len(numels), [True] * len(numels), chunk_numel, num_ranks=num_ranks, rank=rank
        )
        for rank in range(num_ranks)
    ]
    return [
        [(begin, begin + numel) for begin, numel, _ in map(layout.shard_of, range(len(numels)))] for layout in layouts
    ]


def owner_of(parts, param, element):
    owners = [rank for rank, of_rank in enumerate(parts) if of_rank[param][0] <= element < of_rank[param][1]]
    assert len(owners) == 1
    return owners[0]


def test_moves_are_all_that_is_lacking_and_nothing_else():
    for seed in range(20):
        check_moves(random.Random(seed))


def check_moves(chance):
    numels = [chance.choice([1, 300, 5000, 9000]) for _ in range(chance.randint(1, 6))]
    num_old, num_new = chance.randint(1, 5), chance.randint(1, 5)
    old, new = parts_of(numels, 16384, num_old), parts_of(numels, 16384, num_new)
    former = assign_ranks(num_old, num_new)
    moves = find_moves(old, new, former)
    for param, numel in enumerate(numels):
        for element in {*range(0, numel, 97), *(edge for parts in (*old, *new) for edge in parts[param])} - {numel}:
            target, source = owner_of(new, param, element), owner_of(old, param, element)
            travels = [m for m in moves if m.param == param and m.begin <= element < m.end]
            expected = [] if former[target] == source else [(source, target)]
            assert [(move.source, move.target) for move in travels] == expected


def equal_parts(numel, num_ranks):
    return [[(rank * numel // num_ranks, (rank + 1) * numel // num_ranks)] for rank in range(num_ranks)]


def test_no_other_order_of_ranks_keeps_more():
    for num_old, num_new in itertools.product(range(1, 6), repeat=2):
        check_order(num_old, num_new)


def check_order(num_old, num_new):
    old, new = equal_parts(60, num_old), equal_parts(60, num_new)
    former = assign_ranks(num_old, num_new)
    assert former[0] == 0
    stayed = [rank for rank in former if rank is not None]
    assert len(stayed) == len(set(stayed)) == min(num_old, num_new)
    least = min(
        sum(move.numel for move in find_moves(old, new, [0, *rest]))
        for rest in set(itertools.permutations([*range(1, num_old), *[None] * (num_new - 1)], num_new - 1))
        if sum(rank is not None for rank in rest) == min(num_old, num_new) - 1
    )
    assert sum(move.numel for move in find_moves(old, new, former)) == least


def test_doubling_moves_half_and_keeps_places():
    assert assign_ranks(2, 4) == [0, None, None, 1] or assign_ranks(2, 4) == [0, None, 1, None]
    moves = find_moves(equal_parts(4096, 2), equal_parts(4096, 4), assign_ranks(2, 4))
    assert sum(move.numel for move in moves) == 2048


def test_who_leaves_may_be_said():
    assert assign_ranks(4, 3, leaving=[2]) == [0, 1, 3]
    assert [rank for rank in assign_ranks(3, 3, leaving=[1]) if rank is not None] == [0, 2]
    with pytest.raises(ValueError, match="rank 0 leads"):
        assign_ranks(2, 1, leaving=[0])
    with pytest.raises(ValueError, match="let more leave"):
        assign_ranks(4, 2, leaving=[3])

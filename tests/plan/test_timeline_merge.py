from hypothesis import given
from hypothesis import strategies as st

from patrickstar import _C

READ, WRITE, FINALISE = _C.ArrayUseMode.READ, _C.ArrayUseMode.WRITE, _C.ArrayUseMode.FINALISE
PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD
NUM_CHUNKS = 5


def timeline(*phases, peak=1):
    """Phases in turn forward and backward, each a list of chunks; a backward's last access of a chunk frees its
    gradient.
    """
    accesses = []
    for index, chunks in enumerate(phases):
        backward = index % 2 == 1
        for position, chunk in enumerate(chunks):
            uses = [(chunk, PARAM, READ)]
            if backward:
                uses.append((chunk, GRAD, WRITE))
                uses += [(chunk, GRAD, FINALISE)] * (chunk not in chunks[position + 1 :])
            accesses.append({
                "phase": _C.Phase.BACKWARD if backward else _C.Phase.FORWARD, "uses": uses,
                "activation_peak_bytes": peak, "ends_phases": int(position == len(chunks) - 1),
            })  # fmt: skip
    return accesses


def chunks_of(accesses):
    return [(access["phase"], access["uses"][0][0]) for access in accesses]


def merged(a, b):
    return _C.merged_timelines(a, b, NUM_CHUNKS)


def is_within(part, whole):
    rest = iter(whole)
    return all(one in rest for one in part)


sequences = st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=12)
steps = st.builds(timeline, sequences, sequences)


@given(steps, steps)
def test_both_can_follow(a, b):
    both = merged(a, b)
    assert is_within(chunks_of(a), chunks_of(both)) and is_within(chunks_of(b), chunks_of(both))
    assert len(both) <= len(a) + len(b)
    assert sum(access.get("ends_phases", 0) for access in both) == 2
    finalised = [use[0] for access in both for use in access["uses"] if use[2] == FINALISE]
    assert sorted(finalised) == sorted({chunk for phase, chunk in chunks_of(both) if phase == _C.Phase.BACKWARD})


@given(steps)
def test_a_path_merges_with_itself_and_its_parts(a):
    assert merged(a, a) == merged(merged(a, a), a)
    assert chunks_of(merged(a, a)) == chunks_of(a)


def test_a_tower_joins_the_trunk():
    trunk, with_tower = timeline([0, 1, 2], [2, 1, 0], peak=1), timeline([0, 3, 4, 1, 2], [2, 1, 4, 3, 0], peak=7)
    for a, b in ((trunk, with_tower), (with_tower, trunk)):
        assert chunks_of(merged(a, b)) == chunks_of(with_tower)
        assert {access["activation_peak_bytes"] for access in merged(a, b)} == {7}


def test_two_towers_follow_each_other():
    both = merged(timeline([0, 1, 2], [2, 1, 0]), timeline([0, 3, 2], [2, 3, 0]))
    assert [chunk for _, chunk in chunks_of(both)] == [0, 1, 3, 2, 2, 1, 3, 0]


def test_other_phases_are_not_merged():
    one = timeline([0, 1], [1, 0])
    assert chunks_of(merged(one, timeline([0, 1], [1, 0], [0, 1], [1, 0]))) == chunks_of(one)

from tests.distributed import run_ranks
from tests.engine.test_stashed_activations import LENGTH, wide_reference
from tests.ranks.leaving import trained


def test_each_rank_decides_alone():
    _, tide = wide_reference()
    ample, scarce = int(1.25 * tide), int(1.17 * tide)
    settings = [("never", 2**40), ("auto", ample), ("auto", scarce)]
    long, short = run_ranks(2, trained, [LENGTH, LENGTH // 2], settings)
    print(long, short)
    for (losses, *_), found in ((long[0], long), (short[0], short)):
        assert all(others == losses for others, *_ in found)
    for (_, stayed, tides), (_, others, same_tides) in zip(long, short, strict=True):
        assert tides == same_tides
        assert others == [0] * len(stayed)
    never, roomy, tight = (stashed for _, stashed, _ in long)
    assert never == [0] * 4
    assert roomy[0] > 0 and roomy[1:] == [0] * 3  # while the plan after the first step has room for them already
    assert long[1][2][0] >= max(long[0][2])
    assert all(num_bytes > 0 for num_bytes in tight)

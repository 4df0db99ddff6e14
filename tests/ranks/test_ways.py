import pytest
import torch

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import lose_gradients, lose_gradients_plain
from tests.ranks.ways import Ways, train_ways, train_ways_plain

ANY = ("shorter", "other", "one")
TIGHT = {"device_memory": "350KB"}
AMPLE = {"device_memory": "8MiB"}


def check(num_ranks: int, seeds: range, accumulate: int, kinds: tuple[str, ...]) -> None:
    all_ways = [Ways.drawn(seed, 9, num_ranks, accumulate, kinds) for seed in seeds]
    planned = run_ranks(num_ranks, train_ways, all_ways, TIGHT, timeout_seconds=300)
    without = run_ranks(num_ranks, train_ways, all_ways, AMPLE, True, timeout_seconds=300)
    for index, ways in enumerate(all_ways):
        for rank in range(num_ranks):
            run = planned[rank][index]
            wanted = train_ways_plain(ways, rank)
            assert run["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
            for name, value in wanted["state"].items():
                torch.testing.assert_close(run["state"][name], value, rtol=1e-5, atol=2e-6)
            # With three ranks or more, a gradient after its reduce-scatter is added in another order.
            if num_ranks == 2 or kinds == ("shorter",):
                assert run["losses"] == without[rank][index]["losses"]
                assert_same_bits(run["state"], without[rank][index]["state"])
    replayed = [run["report"]["num_replayed_accesses"] for run in planned[0]]
    print(f"{num_ranks} ranks, {accumulate} micro-batches: accesses that followed a plan {replayed}")
    assert all(count > 0 for count in replayed)


@pytest.mark.parametrize(("num_ranks", "accumulate", "kinds"), [(2, 2, ANY), (3, 1, ("shorter",)), (3, 1, ANY)])
def test_ranks_that_go_different_ways_train_as_plain_pytorch(num_ranks, accumulate, kinds):
    check(num_ranks, range(2), accumulate, kinds)


@pytest.mark.parametrize("lost", ["bias", "weight and bias"])
def test_a_parameter_without_a_gradient_on_one_rank_gets_the_mean_with_zero(lost):
    wanted = lose_gradients_plain(lost, 1)
    for state in run_ranks(2, lose_gradients, lost, 1):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "accumulate", "kinds"), [(2, 1, ANY), (2, 3, ANY), (3, 2, ANY), (4, 1, ANY), (4, 2, ("shorter",))]
)
def test_many_ways(num_ranks, accumulate, kinds):
    check(num_ranks, range(100, 115), accumulate, kinds)

import pytest

from tests.distributed import run_ranks
from tests.lifetimes import come_and_go

# Garbage of a closed engine and its model, some 200 KB each: the collector is off.
GARBAGE_BYTES = 2**20
SLACK_REGIONS = 8  # the heaps of threads that have ended, kept by malloc


@pytest.mark.parametrize("config", [{}, {"device_memory": "1MiB"}], ids=["roomy", "scarce"])
def test_forty_engines(config):
    ((before, after, more),) = run_ranks(1, come_and_go, 40, config, timeout_seconds=300)
    print(before, after, more)
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["regions"] <= before["regions"] + SLACK_REGIONS
    assert more < 40 * GARBAGE_BYTES


@pytest.mark.parametrize("collecting_rank", [None, 1])
def test_engines_of_two_ranks(collecting_rank):
    for before, after, _ in run_ranks(2, come_and_go, 12, {}, collecting_rank, timeout_seconds=300):
        print(before, after)
        assert after["threads"] <= before["threads"]
        assert after["descriptors"] <= before["descriptors"]

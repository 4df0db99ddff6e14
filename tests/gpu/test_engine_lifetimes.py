import pytest
import torch

from tests.distributed import run_ranks
from tests.gpu.test_ranks import see_gpus
from tests.lifetimes import come_and_go

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 2**20
NUM_RANKS = min(max(torch.cuda.device_count(), 1), 2)


def check(before, after):
    print(before, after)
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["device_bytes"] <= before["device_bytes"] + 2 * MIB


def test_a_hundred_engines():
    ((before, after, _),) = run_ranks(1, come_and_go, 100, {}, timeout_seconds=120, environment=see_gpus)
    check(before, after)


@pytest.mark.parametrize("collecting_rank", [None, 1])
def test_ten_engines_over_nccl(collecting_rank):
    for before, after, _ in run_ranks(
        NUM_RANKS, come_and_go, 10, {}, collecting_rank, timeout_seconds=120, environment=see_gpus
    ):
        check(before, after)

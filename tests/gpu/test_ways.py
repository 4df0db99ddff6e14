import pytest
import torch

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.gpu.test_rank_training import NUM_RANKS, see_gpus
from tests.ranks.test_mixed_batches import check as check_families
from tests.ranks.ways import Ways, train_ways, train_ways_plain

pytestmark = pytest.mark.gpu

HIDDEN = 256
OPTIONS = {"default_chunk_size": 300_000, "device_memory": "96MiB"}


def train_deterministically(*arguments):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    runs = train_ways(*arguments, hidden=HIDDEN)
    return [{**run, "state": {name: value.cpu() for name, value in run["state"].items()}} for run in runs]


def train(ways, forgets_plans):
    return run_ranks(
        NUM_RANKS, train_deterministically, ways, OPTIONS, forgets_plans, timeout_seconds=200, environment=see_gpus
    )


@pytest.mark.parametrize(("accumulate", "kinds"), [(1, ("shorter",)), (2, ("shorter", "other", "one"))])
def test_ranks_that_go_different_ways(accumulate, kinds):
    all_ways = [Ways.drawn(seed, 9, NUM_RANKS, accumulate, kinds) for seed in range(4)]
    planned, without = train(all_ways, False), train(all_ways, True)
    for index, ways in enumerate(all_ways):
        for rank in range(NUM_RANKS):
            run = planned[rank][index]
            assert run["report"]["num_replayed_accesses"] > 0
            wanted = train_ways_plain(ways, rank, HIDDEN)
            assert run["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
            if NUM_RANKS <= 2 or kinds == ("shorter",):
                assert run["losses"] == without[rank][index]["losses"]
                assert_same_bits(run["state"], without[rank][index]["state"])


@pytest.mark.skipif(NUM_RANKS == 1, reason="ranks with batches of their own need several GPUs")
def test_batches_without_images_and_tokens_of_other_experts():
    check_families(
        ["Llava", "Qwen3VLMoe", "Qwen3Moe", "DeepseekV3"], NUM_RANKS, 2, True, tolerance=1e-3, environment=see_gpus
    )

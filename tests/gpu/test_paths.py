import pytest
import torch

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.engine.test_paths import share_replayed, train
from tests.gpu.test_rank_training import NUM_RANKS, see_gpus
from tests.ranks import test_paths as of_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HIDDEN = 1024
CHUNKS = {"default_chunk_size": 4 * 2**20}


@pytest.mark.parametrize("budget", ["160MiB", "400MiB"])
def test_paths_that_alternate_keep_their_plans(budget):
    paths = [["" if step % 2 else "ab"] for step in range(10)]
    losses, state, counters = train(paths, {**CHUNKS, "device_memory": budget}, "bf16", HIDDEN)
    ample_losses, ample_state, _ = train(paths, CHUNKS, "bf16", HIDDEN)
    assert losses == ample_losses
    assert_same_bits(state, ample_state)
    print(f"replayed {share_replayed(counters)}, plans {[step['num_plans'] for step in counters]}")
    assert share_replayed(counters[2:]) == [1.0] * 8
    assert max(step["num_on_demand_fetches"] for step in counters[4:]) < counters[0]["num_on_demand_fetches"]


def train_deterministically(runs):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    results = of_ranks.train(runs)
    return [{**run, "state": {name: value.cpu() for name, value in run["state"].items()}} for run in results]


def test_ranks_with_mixed_batches_follow_one_plan():
    kinds = ["", "a", "ab", "c"]
    paths = [[kinds[(step // (rank + 1)) % 4] for rank in range(NUM_RANKS)] for step in range(12)]
    runs = [({**CHUNKS, **budget}, paths, HIDDEN) for budget in ({"device_memory": "300MiB"}, {})]
    by_rank = run_ranks(NUM_RANKS, train_deterministically, runs, timeout_seconds=200, environment=see_gpus)
    for rank, (tight, ample) in enumerate(by_rank):
        assert tight["losses"] == ample["losses"]
        assert_same_bits(tight["state"], ample["state"])
        shares = share_replayed(tight["counters"])
        print(f"rank {rank}: replayed {shares}")
        assert sum(share == 1 for share in shares) >= 6

import pytest

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.gpu.test_rank_training import NUM_RANKS, see_gpus
from tests.ranks.expert_parallel import train_each
from tests.ranks.test_mixed_batches import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_RANKS == 1, reason="experts need several GPUs")]


def test_families_with_divided_experts():
    settings = {"expert_parallel": {"size": NUM_RANKS}}
    families = ["Qwen3Moe", "GptOss", "DeepseekV3", "Jamba"]
    check(families, NUM_RANKS, 2, True, tolerance=1e-3, settings=settings, environment=see_gpus)


def test_budgets_change_no_bit():
    found = run_ranks(2, train_each, "bf16", "200MiB", timeout_seconds=300, environment=see_gpus)
    for rank in found:
        for name in ("scarce", "on_host"):
            assert rank[name]["steps"] == rank["divided"]["steps"]
            assert_same_bits(rank[name]["state"], rank["divided"]["state"])
        assert_same_bits(rank["divided"]["state"], found[0]["divided"]["state"])

import os

import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.several_engines import RECIPES, config_of, run, run_plain

BUDGETS = {"distil": "600KB", "prefer": "700KB", "adversaries": "300KB", "actor_and_critic": "300KB"}
"""Device bytes of all engines together."""


def run_all():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # once for all engines
    results = {}
    for name in RECIPES:
        configs = [config_of("fp32"), config_of("fp32", device_memory=BUDGETS[name])]
        results[name] = [*(run(name, config, rank=rank) for config in configs), run_plain(name, rank=rank)]
    dist.destroy_process_group()
    return results


@pytest.mark.slow
def test_two_ranks():
    by_rank = run_ranks(2, run_all, timeout_seconds=200)
    for name in RECIPES:
        (roomy, scarce, plain), (other, *_) = by_rank[0][name], by_rank[1][name]
        moved = {role: report["num_evictions"] for role, report in scarce.reports.items()}
        print(f"{name}: arrays that made room {moved}")
        assert sum(moved.values()) > 0
        assert [loss.hex() for loss in scarce.losses] == [loss.hex() for loss in roomy.losses]
        for role, state in roomy.states.items():
            assert_same_bits(scarce.states[role], state, role)
            assert_same_bits(other.states[role], state, role)
        torch.testing.assert_close(roomy.losses, plain.losses, rtol=1e-5, atol=1e-6)
        for role, state in plain.states.items():
            for key, value in state.items():
                torch.testing.assert_close(roomy.states[role][key], value, rtol=1e-4, atol=1e-5)
        assert roomy.losses != other.losses  # each rank has batches of its own

import pytest
import torch
from torch import nn

from patrickstar.module.param_ranks import RankPart, keep_part
from patrickstar.module.preprocess import plan_params
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.experts import CLIPPING, STEPS, Run, train_experts, train_experts_plain
from tests.ranks.in_turn import train_in_turn
from tests.ranks.test_training import relative_error

SCARCE = {"device_memory": "200KB", "gradient_clipping": CLIPPING}
LINK = {"delays": {"link_gbps": 0.5}}  # so that steps are measured, and plans made by the Clock
UNCLIPPED = {"gradient_clipping": 0.0}
ALIKE = {
    "exact": [Run(), Run(options=SCARCE), Run(on_host=True, speculation="always", options={**SCARCE, **LINK})],
    "accumulated": [Run("bf16", accumulate=2), Run("bf16", accumulate=2, options=SCARCE)],
    "committed": [
        Run("bf16", options=UNCLIPPED),
        Run("bf16", options=UNCLIPPED, speculation="commit"),
        Run("bf16", options={**SCARCE, **UNCLIPPED}, on_host=True, speculation="commit"),
    ],
}


def test_experts_of_two_ranks():
    runs = [run for alike in ALIKE.values() for run in alike]
    by_rank = [iter(results) for results in run_ranks(2, train_in_turn, train_experts, runs, timeout_seconds=300)]
    results = {name: [[next(rank) for rank in by_rank] for _ in alike] for name, alike in ALIKE.items()}
    for first, *others in results.values():
        for rank, result in enumerate(first):
            for other in others:
                assert other[rank]["losses"] == result["losses"]
                assert other[rank]["norms"] == first[0]["norms"]
                assert_same_bits(other[rank]["values"], result["values"])
        for result in first:
            assert_same_bits(result["values"], first[0]["values"])  # after close() the module is whole again
            assert_same_bits(result["state"], first[0]["state"])
    ample, scarce, timed = results["exact"]
    expected = train_experts_plain(2)
    assert min(expected["norms"]) > CLIPPING
    for rank, result in enumerate(ample):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for found in (result["values"], result["state"]):
            error = relative_error(found, expected["values"])
            print(f"rank {rank}: relative error to plain PyTorch {error:.2g}")
            assert error < 2e-6
        shapes = [tuple(state["exp_avg"].shape) for state in result["states"].values()]
        assert shapes.count((128, 64)) == 2
        assert shapes.count((64, 64)) == 3
        assert result["report"]["scattered_bytes"] == STEPS * result["shared_numel"] * 4 // 2
        assert timed[rank]["exchanged"] == timed[rank]["shared_chunks"]
        assert scarce[rank]["report"]["num_replayed_accesses"] > 0
        assert scarce[rank]["report"]["num_evictions"] > 0


def test_a_part_of_a_parameter_that_pytorch_would_share_is_refused():
    module = nn.Embedding(4, 4)
    keep_part(module.weight, RankPart(0, 2, lambda part: part))
    with pytest.raises(ValueError, match=r"weight is divided over ranks, but stays with PyTorch.*leave expert"):
        plan_params(module, torch.float32, use_cpu_embedding=True)

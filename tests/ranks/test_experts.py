import pytest
import torch
from torch import nn

from patrickstar.config import parse_config
from patrickstar.module.param_ranks import keep_on_rank
from patrickstar.module.preprocess import plan_params
from patrickstar.session.own_params import check_settings
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
        one, another = (result["values"] for result in first)
        assert all(one[name].equal(another[name]) == name.startswith("shared.") for name in one)
    ample, scarce, timed = results["exact"]
    expected = train_experts_plain(2)
    assert min(expected["norms"]) > CLIPPING
    for rank, result in enumerate(ample):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        error = relative_error(result["values"], expected["values"][rank])
        print(f"rank {rank}: relative error to plain PyTorch {error:.2g}")
        assert error < 2e-6
        assert result["report"]["scattered_bytes"] == STEPS * result["shared_numel"] * 4 // 2
        assert timed[rank]["exchanged"] == timed[rank]["shared_chunks"]
        assert scarce[rank]["report"]["num_replayed_accesses"] > 0
        assert scarce[rank]["report"]["num_evictions"] > 0
        assert [said for said in result["refused"] if "parameters of its own (experts.0.weight and" not in said] == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"gradient_allreduce_op": "sum"}, r'"sum", but each rank has parameters of its own \(weight and 1 more\)'),
        ({"sequence_parallel": {"size": 2}}, "2 ranks share each sample"),
    ],
)
def test_settings_of_shared_parameters_are_refused(section, message):
    module = nn.Linear(4, 4)
    config = parse_config(section)
    check_settings(module, config, 2)
    keep_on_rank(module.parameters())
    check_settings(module, config, 1)
    with pytest.raises(ValueError, match=message):
        check_settings(module, config, 2)


def test_an_own_parameter_that_pytorch_would_share_is_refused():
    module = nn.Embedding(4, 4)
    keep_on_rank(module.parameters())
    with pytest.raises(ValueError, match=r"weight is kept on its rank.*do_allreduce=False"):
        plan_params(module, torch.float32, use_cpu_embedding=True)

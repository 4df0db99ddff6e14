import pytest
import torch

from tests.distributed import run_ranks
from tests.gpu.test_rank_training import NUM_RANKS, see_gpus
from tests.ranks.on_mesh import MeshRun, train_all, train_plainly
from tests.ranks.test_adapters import ALL_GPT2, ALL_LLAMA, LLAMA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_RANKS == 1, reason="a mesh needs several GPUs")]


def train_in_float32(runs):
    torch.backends.cuda.matmul.allow_tf32 = False
    found = train_all(runs)
    return [
        {"losses": run["losses"], "state": {name: value.cpu() for name, value in run["state"].items()}} for run in found
    ]


def test_adapters_are_trained_as_by_peft():
    runs = [MeshRun(LLAMA, 1, 2), MeshRun(ALL_LLAMA, 1, 2, "1d"), MeshRun(ALL_GPT2, 1, 2, checkpointing=True)]
    by_rank = run_ranks(2, train_in_float32, runs, timeout_seconds=200, environment=see_gpus)
    for index, run in enumerate(runs):
        expected = train_plainly(run)
        for results in by_rank:
            found = results[index]
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            trained = [name for name in expected["state"] if "lora_" in name]
            assert trained
            for name in trained:
                torch.testing.assert_close(found["state"][name], expected["state"][name], rtol=2e-2, atol=1e-4)

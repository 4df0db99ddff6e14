import pytest
import torch

from tests.distributed import run_ranks
from tests.gpu.test_rank_training import NUM_RANKS, see_gpus
from tests.ranks.on_mesh import MeshRun, train_all, train_plainly
from tests.ranks.sharded import Model
from tests.ranks.test_meshes_of_families import Classifier, Classifying
from tests.ranks.test_tensor_parallel import assert_alike

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_RANKS == 1, reason="a mesh needs several GPUs")]

RUNS = [
    MeshRun(Model("MixtralForCausalLM"), 1, 2, checkpointing=False),
    MeshRun(Model("Gemma3ForCausalLM"), 1, 2, "1d", kind="left", checkpointing=True),
    MeshRun(Model("Qwen3ForCausalLM"), 2, 1, kind="right", checkpointing=True),
    Classifying(Classifier("LlamaForSequenceClassification", lora=True), 1, 2),
]


def train_with_exact_products(runs):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    found = train_all(runs)
    return [{**run, "logits": run["logits"].cpu(), "state": to_host(run["state"])} for run in found]


def to_host(state):
    return {name: value.cpu() for name, value in state.items()}


def gap(found, expected):
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def test_families_on_a_mesh_as_on_one_processor():
    by_rank = run_ranks(2, train_with_exact_products, RUNS, timeout_seconds=300, environment=see_gpus)
    for index, run in enumerate(RUNS):
        ranks, expected = [results[index] for results in by_rank], train_plainly(run)
        assert_alike(ranks)
        gaps = {name: gap(ranks[0][name], expected[name]) for name in ("losses", "norms", "logits")}
        assert max(gaps.values()) <= 1e-4, (run.model.name, gaps)

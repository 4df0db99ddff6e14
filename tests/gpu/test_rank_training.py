import hashlib
import os

import pytest
import torch

from tests.distributed import run_ranks
from tests.gpu.test_equality import MIB, wide_batch
from tests.models import Case, gpt2
from tests.ranks.runs import Task, train_plain, train_tasks
from tests.ranks.test_training import assert_same, assert_same_state, relative_error

pytestmark = pytest.mark.gpu


def wide_gpt2():
    return gpt2(hidden=512, layers=8)


WIDE = Case(wide_gpt2, wide_batch)

NUM_RANKS = max(torch.cuda.device_count(), 1)


def see_gpus(rank):
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def train_deterministically(tasks):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    results = train_tasks(tasks)
    return [{**result, "state": {name: value.cpu() for name, value in result["state"].items()}} for result in results]


def train_and_digest(tasks):
    results = train_deterministically(tasks)
    return [{**result, "state": {key: _digest(value) for key, value in result["state"].items()}} for result in results]


def _digest(tensor):
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)


def run(tasks, size=NUM_RANKS, train=train_deterministically):
    by_rank = run_ranks(size, train, tasks, timeout_seconds=130, environment=see_gpus)
    return [[results[index] for results in by_rank] for index in range(len(tasks))]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_budgets(precision):
    options = {"gradient_clipping": 1.0, "default_chunk_size": 4 * MIB}
    common = {"precision": precision, "steps": 5}
    scarce = {**options, "device_memory": (250 if precision == "fp32" else 180) * MIB}
    results = run_alike([Task(WIDE, options=options, **common), Task(WIDE, options=scarce, **common)])
    assert results[1][0]["report"]["uploaded_bytes"] > 0


def test_sides_of_adam():
    options = {"gradient_clipping": 1.0, "default_chunk_size": 4 * MIB}
    common = {"precision": "bf16", "steps": 5}
    on_host = Task(WIDE, options=options, on_host=True, optimizer={"speculation": "always"}, **common)
    run_alike([Task(WIDE, options=options, **common), on_host])


def test_accumulation():
    common = {"precision": "bf16", "steps": 5, "accumulate": 2}
    small_chunks = Task(WIDE, options={"gradient_clipping": 1.0, "default_chunk_size": MIB}, **common)
    on_host = Task(WIDE, options={"gradient_clipping": 1.0, "default_chunk_size": 4 * MIB}, on_host=True, **common)
    run_alike([small_chunks, on_host])


def run_alike(tasks):
    results = run(tasks, size=min(NUM_RANKS, 2), train=train_and_digest)
    for ranks in results:
        assert_same_state(ranks[0]["state"], ranks[-1]["state"])
        report = ranks[0]["report"]
        keys = ["device_peak_bytes", "num_device_state_chunks", "num_chunks", "gathered_bytes", "scattered_bytes"]
        print({key: report[key] for key in keys})
    for one, other in zip(*results, strict=True):
        assert_same(one, other)
    return results


@pytest.mark.parametrize("name", ["unused", "mixture_of_experts", "t5", "conv_net"])
def test_models(name):
    tasks = [Task(name), Task(name, on_host=True, options={"default_chunk_size": 4096})]
    roomy, on_host = run(tasks, size=min(NUM_RANKS, 2))
    for rank, result in enumerate(roomy):
        assert_same(on_host[rank], result)


def test_against_one_process():
    task = Task("gpt2", steps=10)
    size = min(NUM_RANKS, 2)  # a row of the batch each
    state = run([task], size)[0][0]["state"]
    error = relative_error(state, train_plain(task, size))
    print(f"{size} ranks: parameters within {error:.1e} of one process's on the CPU")
    assert error < 1e-3

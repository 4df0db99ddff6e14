import os
import signal

import pytest
import torch

from patrickstar import _C
from patrickstar.ranks.distributed import open_ranks
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import rank_outcomes, run_ranks
from tests.gpu import test_rank_training
from tests.gpu.test_equality import MIB
from tests.gpu.test_rank_training import WIDE, train_and_digest, train_deterministically
from tests.gpu.test_ranks import check_collectives, lose_the_last_rank
from tests.models import MODELS
from tests.ranks.runs import Task, rank_and_size, rows, train_plain
from tests.ranks.test_training import assert_same, assert_same_state, relative_error
from tests.training import make_config

pytestmark = pytest.mark.gpu

SHARED = {"client": {"mem_tracer": {"use_fake_dist": True}}}
ROUNDS = 40


def see_one_gpu(rank):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    return test_rank_training.see_gpus(rank) | {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_have_the_hosts_bits(num_ranks):
    run_ranks(num_ranks, check_collectives, 0, timeout_seconds=300, environment=see_one_gpu)


def enqueue_in_an_own_order():
    """Enqueues many collectives of changing sizes behind GPU work: rank 0 all gathers before all scatters, the others
    the other way round. No rank waits before all are enqueued.
    """
    with open_ranks(device_type="cuda", device_index=0, timeout_seconds=60) as ranks:
        size, rank, device = ranks.gather.size, ranks.gather.rank, ranks.context.device
        numels = [1 + (index * 7919) % 50_000 for index in range(ROUNDS)]
        gathered = [torch.full((size, numel), float(rank + 1), device=device) for numel in numels]
        whole = [torch.full((size, numel), float(rank + numel), device=device) for numel in numels]
        scratch = torch.empty(size * max(numels), device=device)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        scratch.mul_(2).add_(1)  # kernels are loaded here, not behind a gate
        torch.cuda.synchronize()

        def gather():
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(50_000_000)
                for values, numel in zip(gathered, numels, strict=True):
                    ranks.gather.all_gather(values.data_ptr(), numel * 4)
                    values.mul_(2)

        def scatter():
            with torch.cuda.stream(streams[1]):
                for values, numel in zip(whole, numels, strict=True):
                    values.add_(1)
                    pointers = (values.data_ptr(), values[rank].data_ptr(), scratch.data_ptr())
                    ranks.scatter.reduce_scatter_mean(*pointers, numel, _C.DType.FLOAT32)

        for enqueue in (gather, scatter) if rank == 0 else (scatter, gather):
            enqueue()
        torch.cuda.synchronize()
        for communicator in (ranks.gather, ranks.scatter):
            communicator.check()
        for values, means, numel in zip(gathered, whole, numels, strict=True):
            expected = torch.arange(1.0, size + 1).mul(2).repeat_interleave(numel).view(size, numel)
            assert_same_bits(values.cpu(), expected, f"all_gather of {numel}")
            mean = sum(float(r + numel + 1) for r in range(size)) / size
            assert_same_bits(means[rank].cpu(), torch.full((numel,), mean), f"mean of {numel}")


def test_ranks_enqueue_in_orders_of_their_own():
    run_ranks(2, enqueue_in_an_own_order, timeout_seconds=120, environment=see_one_gpu)


def switch_streams():
    with open_ranks(device_type="cuda", device_index=0, timeout_seconds=60) as ranks:
        size, rank, device = ranks.gather.size, ranks.gather.rank, ranks.context.device
        streams = [torch.cuda.Stream() for _ in range(3)]
        values = [torch.full((size, 100_000), float(10 * index + rank), device=device) for index in range(ROUNDS)]
        torch.cuda.synchronize()
        for index, whole in enumerate(values):
            with torch.cuda.stream(streams[index % 3]):
                ranks.gather.all_gather(whole.data_ptr(), 400_000)
        torch.cuda.synchronize()
        for index, whole in enumerate(values):
            assert whole[:, 0].tolist() == [10.0 * index + r for r in range(size)]
            assert torch.equal(whole, whole[:, :1].expand_as(whole))


def test_streams_take_turns():
    run_ranks(2, switch_streams, timeout_seconds=120, environment=see_one_gpu)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training(precision):
    options = {**SHARED, "gradient_clipping": 1.0, "default_chunk_size": 4 * MIB}
    common = {"precision": precision, "steps": 4}
    scarce = {**options, "device_memory": (250 if precision == "fp32" else 180) * MIB}
    tasks = [
        Task(WIDE, options=options, **common),
        Task(WIDE, options=scarce, **common),
        Task(WIDE, options=options, on_host=True, **common),
    ]
    by_rank = run_ranks(2, train_and_digest, tasks, timeout_seconds=200, environment=see_one_gpu)
    for first, second in zip(*by_rank, strict=True):
        assert_same_state(first["state"], second["state"])
    for results in by_rank:
        for other in results[1:]:
            assert_same(other, results[0])
        assert results[1]["report"]["uploaded_bytes"] > 0
    total = torch.cuda.get_device_properties(0).total_memory
    assert sum(results[0]["report"]["device_budget_bytes"] for results in by_rank) <= total


def test_against_one_process():
    task = Task("gpt2", options=SHARED, steps=10)
    first, second = run_ranks(2, train_deterministically, [task], timeout_seconds=130, environment=see_one_gpu)
    assert_same_state(first[0]["state"], second[0]["state"])
    error = relative_error(first[0]["state"], train_plain(task, 2))
    print(f"parameters within {error:.1e} of one process's on the CPU")
    assert error < 1e-3


def fail_in_the_third_step():
    rank, _ = rank_and_size()
    case = MODELS["gpt2"]
    engine, optimizer = initialize_engine(case.build, 0, make_config("fp32", rank_timeout_seconds=30, **SHARED))
    generator = torch.Generator().manual_seed(1)
    with engine:
        for step in range(5):
            optimizer.zero_grad()
            if step == 2 and rank == 1:
                raise ValueError("the batch is bad")
            engine.backward(case.loss(engine(**rows(case.batch(generator)))))
            optimizer.step()


def test_a_rank_that_raises():
    first, second = rank_outcomes(2, fail_in_the_third_step, timeout_seconds=120, environment=see_one_gpu)
    assert second.error.startswith("ValueError: the batch is bad")
    assert first.error.startswith("RankFailure: ") and "rank 1: ValueError: the batch is bad" in first.error


def test_a_killed_rank():
    first, second = rank_outcomes(2, lose_the_last_rank, 0, timeout_seconds=120, environment=see_one_gpu)
    assert second.returncode == -signal.SIGKILL
    assert first.error.startswith("RankFailure: ") and "rank 1" in first.error


def initialize_unshared():
    local_rank = rank_and_size()[0]
    engine, _ = initialize_engine(MODELS["gpt2"].build, local_rank, make_config("fp32"))
    engine.close()


def test_too_few_gpus_without_sharing():
    second = rank_outcomes(2, initialize_unshared, timeout_seconds=60, environment=see_one_gpu, absent=(0,))[1]
    assert second.error.startswith("ValueError: local_rank is 1, but this process sees 1 GPUs")
    assert "use_fake_dist" in second.error

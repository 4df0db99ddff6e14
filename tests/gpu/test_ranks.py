import os
import signal

import pytest
import torch

from patrickstar.ranks.distributed import open_ranks
from tests.bits import assert_same_bits
from tests.collective.test_communicator import reference, values_of
from tests.distributed import rank_outcomes, run_ranks
from tests.optim.kernel_calls import DTYPES

pytestmark = pytest.mark.gpu

TIMEOUT_SECONDS = 20
NUM_RANKS = max(torch.cuda.device_count(), 1)


def see_gpus(rank):
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}


def check_collectives(device_index=None):
    with open_ranks(device_type="cuda", device_index=device_index, timeout_seconds=120) as ranks:
        size, rank, device = ranks.gather.size, ranks.gather.rank, ranks.context.device
        torch.cuda.set_device(device)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for dtype, code in DTYPES.items():
            for numel in (1, 1000, 1 << 20):
                chunks = [values_of(r, size, numel, dtype) for r in range(size)]
                own = slice(rank * numel, (rank + 1) * numel)
                gathered, whole = chunks[rank].to(device), chunks[rank].to(device)
                scratch = torch.empty_like(whole)
                torch.cuda.synchronize()
                with torch.cuda.stream(streams[0]):
                    ranks.gather.all_gather(gathered.data_ptr(), numel * dtype.itemsize)
                with torch.cuda.stream(streams[1]):
                    pointers = (whole.data_ptr(), whole[own].data_ptr(), scratch.data_ptr())
                    ranks.scatter.reduce_scatter_mean(*pointers, numel, code)
                torch.cuda.synchronize()
                expected = torch.cat([chunks[r][r * numel : (r + 1) * numel] for r in range(size)])
                assert_same_bits(gathered.cpu(), expected, f"all_gather of {numel} {dtype}")
                mean = reference(torch.cat([chunk[own] for chunk in chunks]), size) if size > 1 else chunks[0]
                assert_same_bits(whole[own].cpu(), mean, f"mean of {numel} {dtype}")
        assert ranks.gather.oldest_pending_seconds() == 0.0


def test_collectives_have_the_hosts_bits():
    run_ranks(NUM_RANKS, check_collectives, timeout_seconds=300, environment=see_gpus)


def lose_the_last_rank(device_index=None):
    with open_ranks(device_type="cuda", device_index=device_index, timeout_seconds=TIMEOUT_SECONDS) as ranks:
        torch.cuda.set_device(ranks.context.device)
        whole = torch.zeros(ranks.gather.size * 1000, device=ranks.context.device)
        for index in range(1000):
            with ranks.guard(f"round {index}"):
                if index == 10 and ranks.context.rank == ranks.gather.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                ranks.gather.all_gather(whole.data_ptr(), 4000)
                torch.cuda.synchronize()
                ranks.gather.check()


def test_a_killed_rank():
    outcomes = rank_outcomes(NUM_RANKS, lose_the_last_rank, timeout_seconds=180, environment=see_gpus)
    assert outcomes[-1].returncode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ") and f"rank {NUM_RANKS - 1}" in outcome.error

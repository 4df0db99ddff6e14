import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import DTYPES, random_values

pytestmark = pytest.mark.gpu


def test_one_rank():
    print(f"NCCL {_C.collective.nccl_version()}")
    communicator = _C.collective.make_nccl_communicator(_C.collective.make_nccl_id(), rank=0, size=1, device=0)
    assert (communicator.rank, communicator.size) == (0, 1)
    values = torch.randn(1000, device="cuda").bfloat16()
    whole, shard, scratch = values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    communicator.all_gather(whole.data_ptr(), 2000)
    communicator.reduce_scatter_mean(whole.data_ptr(), shard.data_ptr(), scratch.data_ptr(), 1000, _C.DType.BFLOAT16)
    torch.cuda.synchronize()
    assert torch.equal(whole, values) and torch.equal(shard, values)
    communicator.check()
    assert communicator.oldest_pending_seconds() == 0.0


def test_an_aborted_communicator_says_so():
    communicator = _C.collective.make_nccl_communicator(_C.collective.make_nccl_id(), rank=0, size=1, device=0)
    communicator.abort()
    with pytest.raises(_C.RankFailure, match="aborted"):
        communicator.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_mean_has_the_hosts_bits(dtype, num_ranks):
    for numel in (1, 8, 1000, 4096, 100_003):
        generator = torch.Generator().manual_seed(numel + num_ranks)
        shards = random_values(num_ranks * numel, dtype, generator, True)
        expected = torch.empty(numel, dtype=dtype)
        tail = (DTYPES[dtype], numel)
        _C.collective.mean_of_ranks(shards.data_ptr(), num_ranks, expected.data_ptr(), *tail)
        on_device = shards.cuda()
        out = on_device[numel : 2 * numel]  # in the place of a shard
        stream = torch.cuda.current_stream().cuda_stream
        _C.collective.cuda_mean_of_ranks(on_device.data_ptr(), num_ranks, out.data_ptr(), *tail, stream)
        assert_same_bits(out.cpu(), expected, f"{num_ranks} x {numel} {dtype}")

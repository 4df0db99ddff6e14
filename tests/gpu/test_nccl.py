"""NCCL in the extension: a communicator of one rank."""

from __future__ import annotations

import pytest
import torch

from patrickstar import _C

pytestmark = pytest.mark.gpu


def test_one_rank():
    print(f"NCCL {_C.nccl.version()}")
    communicator = _C.nccl.Communicator(_C.nccl.make_id(), rank=0, size=1, device=0)
    assert (communicator.rank, communicator.size) == (0, 1)
    shard = torch.randn(1000, device="cuda").bfloat16()
    whole = torch.zeros_like(shard)
    stream = torch.cuda.current_stream().cuda_stream
    communicator.all_gather(shard.data_ptr(), whole.data_ptr(), 1000, _C.DType.BFLOAT16, stream)
    back = torch.zeros_like(shard)
    communicator.reduce_scatter(whole.data_ptr(), back.data_ptr(), 1000, _C.DType.BFLOAT16, stream)
    torch.cuda.synchronize()
    assert torch.equal(shard, whole) and torch.equal(shard, back)

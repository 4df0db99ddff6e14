import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from patrickstar.runtime import initialize_engine


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_columns(module):
    return parallelize_module(module, init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})


def wrapped(module):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize(
    ("divide", "message"),
    [
        (lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (1,))), "parameter 0.weight is a DTensor"),
        (by_columns, "parameter 1.weight is a DTensor"),
        (wrapped, "module FullyShardedDataParallel is a FullyShardedDataParallel"),
    ],
)
def test_a_model_that_others_have_divided_is_refused(one_rank, divide, message):
    module = divide(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=f"{message}.*give the whole model"):
        initialize_engine(module)

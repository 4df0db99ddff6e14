import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmark.common import SHAPES
from benchmark.systems.weights import build_meta_model, fill_parameters
from patrickstar.module.materialize import DeferredInit
from tests.bits import assert_same_bits

SHAPE = SHAPES["tiny"]


@pytest.fixture(scope="module")
def whole():
    model = build_meta_model(SHAPE).to_empty(device="cpu")
    fill_parameters(model)
    return dict(model.named_parameters())


def test_values_are_those_of_gpt2(whole):
    assert whole["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    end_of_branch = whole["transformer.h.1.mlp.c_proj.weight"]
    assert end_of_branch.std().item() == pytest.approx(0.02 / (2 * SHAPE.layers) ** 0.5, rel=0.02)
    assert torch.equal(whole["transformer.h.0.ln_1.weight"], torch.ones(SHAPE.hidden))
    assert torch.equal(whole["transformer.h.0.ln_1.bias"], torch.zeros(SHAPE.hidden))
    assert not torch.equal(whole["transformer.h.0.mlp.c_fc.weight"], whole["transformer.h.1.mlp.c_fc.weight"])
    for name, param in whole.items():
        assert param.dtype == torch.float32 and torch.equal(param, param.bfloat16().float()), name


@pytest.mark.parametrize("max_bytes", [1, 2**20, 2**40], ids=["pieces", "blocks", "whole"])
def test_a_deferred_initialisation_gives_the_same(whole, max_bytes):
    model = build_meta_model(SHAPE)
    for _ in DeferredInit(model).units(torch.device("cpu"), max_bytes):
        pass
    params = dict(model.named_parameters())
    assert params.keys() == whole.keys()
    assert_same_bits(params, whole)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_gets_its_rows(whole, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        model = build_meta_model(SHAPE)
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        fill_parameters(model)
        params = dict(model.named_parameters())
        assert params.keys() == whole.keys()
        for name, param in params.items():
            assert_same_bits(param.to_local(), whole[name].chunk(3)[rank], name)
    finally:
        dist.destroy_process_group()

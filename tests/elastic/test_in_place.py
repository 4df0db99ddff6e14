import pytest
import torch
from torch import nn

from patrickstar import torch_scope
from patrickstar.runtime import initialize_engine
from tests.elastic.runs import state_of
from tests.elastic.test_resize import assert_same
from tests.training import make_config


def build():
    torch.manual_seed(0)
    with torch_scope():
        managed = nn.Linear(16, 16)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    unfrozen = nn.Linear(16, 16).requires_grad_(False)
    last = nn.Linear(8, 16)
    last.weight = nn.Parameter(torch.randn(8, 16).T)  # another memory order
    first = nn.Sequential(managed, frozen, nn.BatchNorm1d(16), unfrozen, nn.Linear(16, 8), last)
    first.register_buffer("seen", torch.zeros(3))
    return first


@pytest.mark.parametrize("options", [("fp32", {}), ("fp16", {}), ("bf16", {"speculation": "commit"})], ids=str)
def test_a_run_with_resizes_is_one_without(options, tmp_path):
    precision, optimizer_options = options

    def train(resizes):
        config = make_config(precision, default_chunk_size=16384)
        config["optimizer"] |= optimizer_options
        engine, optimizer = initialize_engine(build, 0, config)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        params = list(engine.module.parameters())
        generator = torch.Generator().manual_seed(1)
        with engine:
            for step in range(6):
                optimizer.zero_grad()
                engine.backward(engine(torch.randn(8, 16, generator=generator)).float().square().mean())
                optimizer.step()
                schedule.step()
                if step == 1:
                    engine.module[3].requires_grad_(True)
                if step in resizes:
                    before = state_of(engine, optimizer)
                    engine.resize(1, folder=str(tmp_path))
                    assert_same(before, state_of(engine, optimizer))
                    assert all(one is other for one, other in zip(params, engine.module.parameters(), strict=True))
            found = state_of(engine, optimizer)
        return found, dict(engine.module.state_dict())

    straight, resized = train(()), train((1, 3))
    assert_same(straight[0], resized[0])
    assert_same(straight[1], resized[1])

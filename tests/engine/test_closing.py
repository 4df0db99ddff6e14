import pytest
import torch

from patrickstar import _C
from patrickstar.engine import closing
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.models import MODELS
from tests.ranks.runs import rank_and_size, rows
from tests.training import make_config

CASE = MODELS["gpt2"]


def step(engine, optimizer, seed, take=lambda batch: batch):
    loss = CASE.loss(engine(**take(CASE.batch(torch.Generator().manual_seed(seed)))))
    engine.backward(loss)
    optimizer.step()
    return loss.item()


def test_an_engine_that_cannot_close_stays_open(monkeypatch):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1)
    room = 4 * sum(param.numel() for param in engine.module.parameters()) - engine.report()["host_bytes"]
    assert room > 0  # all states are on the device
    monkeypatch.setattr(closing, "available_bytes", lambda: closing._RESERVE_BYTES + room - 1)
    with pytest.raises(_C.MemoryBudgetError, match=r"own parameters take .*engine\.discard\(\)"):
        engine.close()
    step(engine, optimizer, 2)
    expected = engine.state_dict()
    monkeypatch.setattr(closing, "available_bytes", lambda: closing._RESERVE_BYTES + room)
    engine.close()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, expected[name])


def test_it_can_be_discarded(monkeypatch):
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1)
    monkeypatch.setattr(closing, "available_bytes", lambda: 0)
    engine.discard()
    assert all(param.numel() == 0 for param in engine.module.parameters())


def close_with_less_room_on_rank_1():
    rank, _ = rank_and_size()
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1, rows)
    params = engine._session.params
    if rank == 1:
        params.host_bytes_when_released = lambda: 2**60
    try:
        engine.close()
        text = ""
    except _C.MemoryBudgetError as error:
        text = str(error)
    loss = step(engine, optimizer, 2, rows)
    vars(params).pop("host_bytes_when_released", None)
    engine.close()
    return text, loss


def test_ranks_stay_open_together():
    (first, loss), (second, same) = run_ranks(2, close_with_less_room_on_rank_1, timeout_seconds=100)
    assert "rank 1: MemoryBudgetError: the module's own parameters take" in first
    assert second.startswith("the module's own parameters take")
    assert loss > 0
    assert same > 0

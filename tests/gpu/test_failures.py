import threading

import pytest
import torch
from torch import nn

from patrickstar import MemoryBudgetError
from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes
from tests.gpu.test_ranks import see_gpus

pytestmark = pytest.mark.gpu


def assert_on_the_device():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "use_hybrid_adam": False}}, "bf16": {}}
    config["default_chunk_size"] = 2**16
    engine, optimizer = initialize_engine(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), 0, config)
    try:
        for step in range(4):
            x = torch.randn(32, 256)
            loss = engine(x).float().square().mean()
            if step == 2:
                torch._assert_async(torch.zeros((), device="cuda").bool())
            engine.backward(loss)
            optimizer.step()
            loss.item()
    finally:
        with pytest.raises(Exception, match="device-side assert|CUDA error"):
            engine.close()
        assert engine._session.runtime.closed


def test_a_device_side_assertion():
    (outcome,) = rank_outcomes(1, assert_on_the_device, timeout_seconds=60, environment=see_gpus)
    print(outcome.error)
    assert outcome.returncode == 1, outcome.output
    assert "device-side assert" in outcome.error


def test_an_engine_that_cannot_be_opened_leaves_pytorch_its_memory():
    module = nn.Linear(4096, 4096)
    with pytest.raises(MemoryBudgetError, match="largest module"):
        initialize_engine(lambda: module, 0, {"device_memory": "64MiB"})
    assert torch.ones(2**28, dtype=torch.uint8, device="cuda").sum() == 2**28


def test_a_fresh_thread_reads_an_engine_on_the_last_gpu():
    device = torch.cuda.device_count() - 1
    module = nn.Linear(64, 64)
    expected = module.weight.detach().clone()
    engine, _ = initialize_engine(lambda: module, device, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    states = []
    with engine:
        engine.backward(engine(torch.ones(2, 64)).sum())
        thread = threading.Thread(target=lambda: states.append(engine.state_dict()["weight"]))
        thread.start()
        thread.join()
    torch.cuda.set_device(0)
    assert states[0].equal(expected)

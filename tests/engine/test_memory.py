import json
import subprocess
import sys

import pytest
import torch

from patrickstar import MemoryBudgetError
from patrickstar.machine.host_memory import usable_bytes
from patrickstar.runtime import initialize_engine
from tests.models import Mlp, token_batch
from tests.training import make_config

_INIT_SCRIPT = """
import json, resource, sys
import torch
from torch import nn
import patrickstar
from patrickstar.runtime import initialize_engine

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(2)
weight = nn.Parameter(torch.zeros(4, 4))  # what PyTorch loads at first use is not ours
(torch.zeros(1, 4).bfloat16() @ weight.bfloat16()).sum().backward()
torch.optim.AdamW([weight]).step()
width, depth = 1024, 48
config = {"bf16": {"enabled": True}, "default_chunk_size": 4 * 1024 * 1024, "device_memory": "64MiB"}
before = peak()
model_func = lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
engine, optimizer = initialize_engine(model_func, 0, config)
after_init = peak() - before
loss = engine(torch.randn(4, width)).float().square().mean()
engine.backward(loss)
optimizer.step()
report = engine.report()
figures = {"num_parameters": report["num_parameters"], "init": after_init, "step": peak() - before}
figures |= {"host": report["host_peak_bytes"], "device": report["device_peak_bytes"]}
print(json.dumps(figures))
"""


def test_the_model_is_never_held_twice():
    """50 M parameters: 4 bytes each while the model is built, and one chunk; 14 in training, and the device's
    buffers.
    """
    output = subprocess.run([sys.executable, "-c", _INIT_SCRIPT], text=True, capture_output=True, check=True).stdout
    figures = json.loads(output.splitlines()[-1])
    count = figures["num_parameters"]
    per_param = {key: figures[key] / count for key in ("init", "step", "host")}
    print(f"{count} parameters; bytes per parameter: {per_param}")
    chunk_bytes = 4 * 4 * 1024 * 1024
    slack = 32 * 1024 * 1024
    assert figures["init"] <= 4 * count + 2 * chunk_bytes + slack
    assert figures["step"] <= 14 * count + figures["device"] + chunk_bytes + slack
    assert figures["host"] <= 14.2 * count


def test_host_budget_is_kept():
    config = make_config("bf16", default_chunk_size=2048, device_memory="200KB")
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    count = sum(p.numel() for p in Mlp().parameters())
    budget = 14 * count + 64 * 1024
    engine, optimizer = initialize_engine(Mlp, 0, {**config, "host_memory": budget})
    with engine:
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            engine.backward(engine(**token_batch(generator))["loss"])
            optimizer.step()
        report = engine.report()
        print(f"{report['host_peak_bytes'] / count:.2f} bytes per parameter of {budget / count:.2f}")
        assert report["host_peak_bytes"] <= budget == report["host_budget_bytes"]
        engine.backward(engine(**token_batch(generator))["loss"])
        with pytest.raises(MemoryBudgetError, match="raise host_memory"):
            engine.backward(engine(**token_batch(generator))["loss"])


def test_states_go_to_the_device_when_the_host_is_full():
    def run(**budgets):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(Mlp, 0, make_config("bf16", default_chunk_size=2048, **budgets))
        losses = []
        with engine:
            generator = torch.Generator().manual_seed(0)
            for _ in range(4):
                optimizer.zero_grad()
                loss = engine(**token_batch(generator))["loss"]
                engine.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            return losses, engine.report()

    losses, report = run(device_memory="600KB", host_memory="150KB")
    print(f"{report['num_device_state_chunks']} of {report['num_chunks']} chunks have their states on the device")
    assert report["num_device_state_chunks"] > 0
    assert report["host_peak_bytes"] <= 150_000
    assert report["device_peak_bytes"] <= 600_000
    assert losses == run()[0]


def test_available_host_memory():
    assert 2**28 < usable_bytes() < 2**50

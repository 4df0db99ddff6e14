"""What the meta device says of a step, against really trained models."""

from __future__ import annotations

import pytest
import torch

from patrickstar.planning.machines import H200
from patrickstar.planning.timeline import make_timeline
from patrickstar.planning.uses import trace_uses
from patrickstar.preprocess import make_layout, plan_params
from patrickstar.runtime import initialize_engine
from tests.models import MODELS
from tests.training import make_config

CHUNK_NUMEL = 4096
NAMES = ["gpt2", "bert", "llama", "mlp", "t5", "albert", "lora", "shared", "frozen", "attention"]


def real_moments(case, checkpointing, states_on_device):
    """The timeline of the third step of a real run."""
    torch.manual_seed(0)
    config = make_config(default_chunk_size=CHUNK_NUMEL, device_memory=2**40)
    config["optimizer"]["params"]["use_hybrid_adam"] = states_on_device
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        if checkpointing:
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            loss = case.loss(engine(**case.batch(generator)))
            engine.backward(loss)
            del loss
            optimizer.step()
        return engine.plan().timeline


def meta_moments(case, checkpointing, states_on_device):
    with torch.device("meta"):
        module = case.build()
    if checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    layout = make_layout(params, CHUNK_NUMEL)
    batch = case.batch(torch.Generator().manual_seed(1))
    uses = trace_uses(module, params, torch.float32, batch, H200.gpu, case.loss)
    timed = make_timeline(uses, layout, [states_on_device] * layout.num_chunks)
    assert len(timed.seconds) == len(timed.moments)
    assert min(timed.seconds) >= 0 < sum(timed.seconds)
    return timed.moments


def structure(moments):
    return [(moment["phase"].name, [(c, k.name, m.name) for c, k, m in moment["accesses"]]) for moment in moments]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("states_on_device", [False, True], ids=["states-on-host", "states-on-device"])
def test_same_moments_as_a_real_run(name, states_on_device):
    real = real_moments(MODELS[name], False, states_on_device)
    assert structure(meta_moments(MODELS[name], False, states_on_device)) == structure(real)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_same_moments_with_recomputation(name):
    real = real_moments(MODELS[name], True, False)
    assert structure(meta_moments(MODELS[name], True, False)) == structure(real)

import pytest
import torch
from torch import nn

import patrickstar as deepspeed
from patrickstar.engine.optim import HybridLion, HybridSGD
from patrickstar.optimizer.lion import Lion
from patrickstar.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

OPTIONS = {
    "Lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}, HybridLion, "exp_avg"),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, HybridSGD, "momentum_buffer"),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("from_config", [True, False])
def test_both_ways_in(name, from_config):
    kind, options, own, state = OPTIONS[name]
    plain, model = net(), net()
    theirs = kind(plain.parameters(), **options)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0}
    if from_config:
        config["optimizer"] = {"type": name, "params": options}
    given = None if from_config else kind(model.parameters(), **options)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    with engine:
        assert isinstance(optimizer, own)
        assert engine.get_mom() == [options.get("betas", options.get("momentum"))]
        for step in range(3):
            theirs.zero_grad()
            plain(batch(step)).square().mean().backward()
            theirs.step()
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
        for ours, their in zip(engine.module.parameters(), plain.parameters(), strict=True):
            access = safe_get_full_optimizer_state(ours, state)
            torch.testing.assert_close(access, theirs.state[their][state], rtol=1e-6, atol=1e-8)
            safe_set_full_optimizer_state(ours, 2 * access, state)
            assert torch.equal(safe_get_full_optimizer_state(ours, state), 2 * access)
            with pytest.raises(ValueError, match=f"optim_state_key is 'exp_avg_sq'; {name} has {state}"):
                safe_get_full_optimizer_state(ours, "exp_avg_sq")

"""``torch.set_default_device("cuda")`` and a default dtype of the user change nothing in an engine.

Here they are another device and dtype than those of any tensor of the engine.
"""

import contextlib

import pytest
import torch
from torch import nn

from patrickstar import torch_scope, utils
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        with torch_scope():
            self.managed = nn.Linear(8, 8)

    def forward(self, x):
        return self.managed(self.layers(x)).float().square().mean()


def use_everything(precision, optimizer_type, folder, around):
    """Values that an engine returns, between steps and after them."""
    config = make_config(precision, gradient_clipping=1.0)
    config["optimizer"] = {"type": optimizer_type, "params": {"lr": 1e-2}}
    engine, optimizer = initialize_engine(Model, 0, config)
    x, found = torch.ones(2, 8), {}
    weight = engine.module.layers[0].weight
    with engine, around():
        for step in range(3):
            engine.backward(engine(x))
            engine.backward(engine(x))
            if step == 1:
                found["gradient"] = weight.grad.clone()
                utils.safe_set_full_grad(weight, utils.safe_get_full_grad(weight) * 0.5)
                utils.safe_set_local_grad(weight, utils.safe_get_local_grad(weight) * 0.5)
            optimizer.step()
            if step == 0:
                engine.save_checkpoint(folder)
                states = optimizer.state_dict()
                found |= {f"state {index}": entry for index, entry in states["state"].items()}
                optimizer.load_state_dict(states)
            elif step == 1:
                engine.load_checkpoint(folder)
                with torch.no_grad():
                    weight.mul_(0.5)
                    nn.init.zeros_(engine.module.managed.bias)
                engine.module.load_state_dict(engine.module.state_dict())
                engine.load_state_dict(engine.state_dict())
        with torch.no_grad():
            found["loss"] = engine(x)
        name = "momentum_buffer" if optimizer_type == "SGD" else "exp_avg"
        found["momentum"] = utils.safe_get_full_optimizer_state(weight, name)
        found["own momentum"] = utils.safe_get_local_optimizer_state(weight, name)
        engine.export_weights(folder / "weights")
        found |= engine.state_dict()
    found |= {f"closed {name}": value.clone() for name, value in engine.module.state_dict().items()}
    entries = [
        (f"{key} {name}", value) for key in list(found) if "state " in key for name, value in found.pop(key).items()
    ]
    return found | {
        name: value for name, value in entries if not name.endswith("step")
    }  # torch's has the default dtype


@contextlib.contextmanager
def other_defaults():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("optimizer_type", ["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_depends_on_them(precision, optimizer_type, tmp_path):
    expected = use_everything(precision, optimizer_type, tmp_path / "expected", contextlib.nullcontext)
    found = use_everything(precision, optimizer_type, tmp_path / "found", other_defaults)
    assert_same_bits(found, expected)

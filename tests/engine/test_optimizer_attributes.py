"""Changes of ``optimizer.param_groups`` act as in plain PyTorch, or are refused."""

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def two_groups(model):
    return [{"params": list(model[0].parameters()), "lr": 1e-2}, {"params": list(model[2].parameters()), "lr": 1e-3}]


def train(engine, optimizer):
    loss = engine(torch.ones(2, 8)).square().mean()
    engine.backward(loss)
    optimizer.step()


def move(optimizer):
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


def remove_a_parameter(optimizer):
    del optimizer.param_groups[0]["params"][0]


def remove_a_group(optimizer):
    del optimizer.param_groups[1]


def change_the_order(optimizer):
    optimizer.param_groups.reverse()


def maximize(optimizer):
    optimizer.param_groups[1]["maximize"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (move, "group 1 were removed or moved"),
        (remove_a_parameter, "group 0 were removed or moved"),
        (remove_a_group, "group 1 were removed or moved"),
        (change_the_order, "group 0 were removed or moved"),
        (maximize, "parameter group 1 has maximize=True"),
    ],
)
def test_what_would_have_no_effect_is_refused(change, message):
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32"), model_parameters=two_groups)
    with engine:
        train(engine, optimizer)
        before = engine.state_dict()
        with pytest.raises((ValueError, RuntimeError), match=message):
            change(optimizer)
            train(engine, optimizer)
        assert_same_bits(engine.state_dict(), before)


def test_states_are_reset_by_loading_none():
    plain = make_model()
    torch_optimizer = torch.optim.AdamW(two_groups(plain))
    config = make_config("fp32")
    config["optimizer"]["params"] = {"weight_decay": 0.01}
    engine, optimizer = initialize_engine(make_model, 0, config, model_parameters=two_groups)
    with engine:
        for step in range(4):
            for each in (torch_optimizer, optimizer):
                if step == 2:
                    each.load_state_dict({**each.state_dict(), "state": {}})
            train(engine, optimizer)
            torch_optimizer.zero_grad()
            plain(torch.ones(2, 8)).square().mean().backward()
            torch_optimizer.step()
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_layer_that_is_new_to_the_engine_is_refused():
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32"))
    with engine:
        engine.module[2] = nn.Linear(16, 8)
        with pytest.raises(ValueError, match="2.weight was put into the module when its engine was open"):
            optimizer.add_param_group({"params": engine.module[2].parameters()})
        assert len(optimizer.param_groups) == 1

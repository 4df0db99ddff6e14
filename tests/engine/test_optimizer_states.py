"""``optimizer.state``, as scripts read and reset it."""

import copy
from collections import defaultdict

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.module.test_gradient_reads import INPUTS, build
from tests.training import ADAM, make_config


def set_one(optimizer, params):
    zeros = torch.zeros_like(params[0].detach())
    optimizer.state[params[0]] = {"step": torch.tensor(7.0), "exp_avg": zeros, "exp_avg_sq": zeros + 1}


def delete_some(optimizer, params):
    for param in list(optimizer.state)[:2]:
        del optimizer.state[param]


def replace(optimizer, params):
    optimizer.state = defaultdict(dict)


def nothing(optimizer, params):
    assert not list(optimizer.state)[6:]


CHANGES = {
    "nothing": nothing,
    "set": set_one,
    "delete": delete_some,
    "clear": lambda optimizer, params: optimizer.state.clear(),
    "replace": replace,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_those_of_torch(change):
    plain = build()
    reference = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = initialize_engine(build, 0, make_config())
    with engine:
        params = list(engine.module.parameters())
        assert len(optimizer.state) == 0
        assert optimizer.state[params[0]] == {}
        for step in range(4):
            reference.zero_grad()
            plain(INPUTS).square().mean().backward()
            reference.step()
            engine.backward(engine(INPUTS).square().mean())
            optimizer.step()
            if step == 1:
                CHANGES[change](reference, list(plain.parameters()))
                CHANGES[change](optimizer, params)
            for param, expected in zip(params, plain.parameters(), strict=True):
                state = optimizer.state[param]
                assert state.keys() == reference.state.get(expected, {}).keys()
                assert (param in optimizer.state) == bool(state)
                for key, value in state.items():
                    torch.testing.assert_close(torch.as_tensor(value), reference.state[expected][key])
    for param, expected in zip(params, plain.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    assert list(optimizer.state) == []


def test_writes_that_would_be_lost_are_refused():
    engine, optimizer = initialize_engine(build, 0, make_config())
    with engine:
        engine.backward(engine(INPUTS).square().mean())
        optimizer.step()
        param = next(engine.module.parameters())
        with pytest.raises(RuntimeError, match=r"cannot be changed in place. Set .*optimizer.state\[param\] ="):
            optimizer.state[param]["exp_avg"].zero_()
        for change in (
            lambda state: state.__setitem__("step", 0),
            lambda state: state.setdefault("average", param.detach().clone()),
        ):
            with pytest.raises(TypeError, match="Keep values of your own in a dictionary"):
                change(optimizer.state[param])
        assert type(copy.deepcopy(optimizer.state[param])) is dict
        with pytest.raises(ValueError, match="the given state has 'average'"):
            optimizer.state[param] = {**optimizer.state[param], "average": param.detach().clone()}
        with pytest.raises(ValueError, match="the given state: exp_avg has shape"):
            optimizer.state[param] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        assert optimizer.state[param]["step"] == 1

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import rank_and_size
from tests.training import make_config

GatheredParameters = patrickstar.zero.GatheredParameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).float().square().mean()


def reshape(net):
    net.first.weight.data = net.first.weight.data.view(8, 16)


def cast(net):
    net.first.weight.data = net.first.weight.data.double()


def shrink(net):
    net.first.weight.data = torch.zeros(0)


def replace(net):
    net.first.weight = nn.Parameter(torch.ones(16, 8, dtype=net.first.weight.dtype))


def stumble(net):
    net.first.bias.fill_(3.0)
    raise KeyError("the user's")


def take_out(net):
    del net.first.weight


WRONG = {reshape: ValueError, cast: ValueError, shrink: ValueError, stumble: KeyError}
REPLACED = {replace: ValueError, take_out: ValueError}


def check_alike(engine, optimizer, plain_state, param):
    assert_same_bits(engine.state_dict(), plain_state)
    assert type(param) is not nn.Parameter
    assert param.shape == (16, 8)
    optimizer.zero_grad()
    loss = engine(torch.ones(2, 8))
    engine.backward(loss)
    optimizer.zero_grad()
    return loss.item()


def go_wrong():
    results = []
    engine, optimizer = initialize_engine(
        Net, 0, make_config("bf16", default_chunk_size=65536, rank_timeout_seconds=60)
    )
    _, size = rank_and_size()
    with engine:
        param = engine.module.first.weight
        before = engine.state_dict()
        loss = check_alike(engine, optimizer, before, param)
        for wrong_rank in (size, -1, 7):
            entered = False
            refused = pytest.raises(ValueError, match=r"modifier_rank is .*; give one of ranks")
            with refused, GatheredParameters([param], modifier_rank=wrong_rank):
                entered = True
            assert not entered
            assert type(param) is not nn.Parameter
        if size == 1:
            for wrong, error in (WRONG | REPLACED).items():
                for counts in (0, None) if wrong in REPLACED else (0,):
                    gathered = GatheredParameters(list(engine.module.parameters()), counts)
                    with pytest.raises(error) as raised, gathered, torch.no_grad():
                        wrong(engine.module)
                    assert engine.module.first.weight is param
                    assert check_alike(engine, optimizer, before, param) == loss
                results.append(f"{wrong.__name__}: {raised.value}")
        for wrong in WRONG:  # changes that do not count
            try:
                with GatheredParameters(list(engine.module.parameters())), torch.no_grad():
                    wrong(engine.module)
            except KeyError:
                pass
            assert check_alike(engine, optimizer, before, param) == loss
        with GatheredParameters([param, engine.module.last.bias], modifier_rank=size - 1), torch.no_grad():
            param[2, 3] = 7.5
        expected = dict(before)
        expected["first.weight"] = before["first.weight"].clone()
        expected["first.weight"][2, 3] = 7.5
        assert check_alike(engine, optimizer, expected, param) != loss
    return results


def test_one_rank():
    messages = go_wrong()
    print("\n".join(messages))
    assert sum("first.weight" in message for message in messages) == 5


def test_two_ranks():
    run_ranks(2, go_wrong)

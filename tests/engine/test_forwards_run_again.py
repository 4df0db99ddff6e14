import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config

INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    fails = False

    def __init__(self, act):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 4), act
        self.calls = 0
        self.scales = [1.0]
        self.by_name = collections.defaultdict(list)
        self.rng, self.numpy_rng = random.Random(0), np.random.default_rng(0)
        self.torch_rng = torch.Generator().manual_seed(0)
        self.memory = torch.ones(16)

    def forward(self, x):
        hidden = self.act(self, self.up(x))
        if Model.fails:
            Model.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return self.down(hidden.relu())


def numpy_mask(_, hidden):
    return hidden * torch.from_numpy(np.random.rand(16) < 0.8).float()


def python_number(_, hidden):
    return hidden * (1 + random.random())


def own_generators(model, hidden):
    noise = torch.rand(16, generator=model.torch_rng)
    return hidden * (model.rng.random() + model.numpy_rng.random() + noise)


def counter(model, hidden):
    model.calls += 1
    model.seen_first = getattr(model, "seen_first", hidden.shape[0])
    return hidden * 0.9**model.calls


def containers(model, hidden):
    model.scales.append(model.scales[-1] * 0.9)
    model.by_name["hidden"].append(len(model.by_name["hidden"]))
    return hidden * model.scales[-1] * (1 + sum(model.by_name["hidden"]))


def recurrent(model, hidden):
    model.memory = (model.memory * 0.5 + hidden.detach().mean(0)).clone()
    return hidden + model.memory


def written_parameter(model, hidden):
    model.down.weight.data.mul_(0.9)
    return hidden


def losses_of(act, failing_step):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    engine, optimizer = initialize_engine(lambda: Model(act), 0, make_config())

    def call():
        if act is written_parameter:  # beside the module's own call, as a LightningModule's step may
            engine.module.up.weight.data.mul_(0.9)
        return engine.module(INPUTS)

    with engine:
        losses = []
        for step in range(5):
            Model.fails = step == failing_step
            loss = engine.run_forward(call).square().mean()
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, engine.state_dict()


RESTORED = [numpy_mask, python_number, own_generators, counter, containers, recurrent, written_parameter]


@pytest.mark.parametrize("act", RESTORED)
def test_numbers_are_those_of_one_forward(act, caplog):
    assert_same_bits(losses_of(act, 3), losses_of(act, None))
    assert len([message for message in caplog.messages if "the forward is run again" in message]) == 1


def changed_tensor(model, hidden):
    model.memory += 1
    return hidden + model.memory


def changed_table(model, hidden):
    return hidden + model.up.table(torch.arange(6))


def with_renormed_table():
    model = Model(changed_table)
    model.up.table = nn.Embedding(6, 16, max_norm=0.5)
    return model


REFUSED = {"memory": lambda: Model(changed_tensor), "up.table.weight": with_renormed_table}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_not_run_again(name):
    engine, _ = initialize_engine(REFUSED[name], 0, make_config())
    with engine:
        Model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 MiB") as raised:
            engine(INPUTS)
        note = "".join(getattr(raised.value, "__notes__", [name]))
        print(note)
        assert name in note
        engine(INPUTS)

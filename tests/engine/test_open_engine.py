import copy
import io
import pickle

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import StateError
from patrickstar.engine.open_session import open_sessions
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS
from tests.training import make_config


class Net(nn.Module):
    width = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.config = {"hidden": 8}
        self._private = "the module's"

    def forward(self, x):
        return self.layer(x).float().square().mean()

    def describe(self, word="hidden"):
        return self.config[word] * self.width


@pytest.mark.parametrize("open_engine", [patrickstar.initialize, initialize_engine], ids=["initialize", "runtime"])
def test_attributes_of_the_module(open_engine):
    if open_engine is patrickstar.initialize:
        engine, *_ = open_engine(model=Net(), config={"train_micro_batch_size_per_gpu": 2})
    else:
        engine, _ = open_engine(Net, 0, make_config("bf16"))
    with engine:
        module = engine.module
        assert engine.describe() == 24
        assert engine.describe.__self__ is module
        assert engine.layer is module.layer
        assert engine.width == 3
        assert engine.count is module.count
        for name in ("nothing", "_private"):
            with pytest.raises(AttributeError, match=name):
                getattr(engine, name)
            assert not hasattr(engine, name)


def test_hugging_face_names(tmp_path):
    torch.manual_seed(0)
    plain = MODELS["gpt2"].build().eval()
    tokens = torch.tensor([[1, 2, 3]])
    expected = plain.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    engine, _ = initialize_engine(lambda: plain, 0, make_config("fp32"))
    with engine:
        assert engine.config is engine.module.config
        generated = engine.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert_same_bits(generated, expected)
        engine.save_pretrained(tmp_path)
        state = engine.state_dict()
    saved = type(plain).from_pretrained(tmp_path).state_dict()
    assert_same_bits(saved["transformer.h.0.attn.c_attn.weight"], state["transformer.h.0.attn.c_attn.weight"])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda e: torch.save(e, io.BytesIO())])
def test_an_engine_is_not_copied(copied):
    engine, _ = initialize_engine(Net, 0, make_config("bf16"))
    with engine:
        with pytest.raises(TypeError) as raised:
            copied(engine)
        assert str(raised.value) == (
            "an engine cannot be copied or pickled; copy engine.module, save engine.state_dict(), or call "
            "engine.save_checkpoint(folder)"
        )
        copied_module = copy.deepcopy(engine.module)
        assert type(copied_module.layer.weight) is nn.Parameter
        engine.backward(engine(torch.ones(2, 8)))


def test_an_engine_that_a_cell_left_open():
    def cell():
        engine, _ = initialize_engine(lambda: module, 0, make_config("bf16"))
        engine(torch.ones(2, 8))
        raise KeyError("of the cell")

    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    patrickstar.close_open_engine()  # there is none
    try:
        cell()
    except KeyError as error:
        kept = error
    with pytest.raises(ValueError, match=r"patrickstar.close_open_engine\(\)"):
        initialize_engine(lambda: module, 0, make_config("bf16"))
    patrickstar.close_open_engine()
    assert open_sessions() == []
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert_same_bits(module.state_dict(), {**before, "frozen.weight": before["frozen.weight"].bfloat16().double(),
                                           "frozen.bias": before["frozen.bias"].bfloat16().double()})  # fmt: skip
    patrickstar.close_open_engine()
    train_once(module)
    assert kept.args == ("of the cell",)


def train_once(module):
    engine, optimizer = initialize_engine(lambda: module, 0, make_config("bf16"))
    with engine:
        engine.backward(engine(torch.ones(2, 8)))
        optimizer.step()


def test_a_teardown_that_fails_half_way():
    num_parts = close_with_failures(set())
    for failing in [{part} for part in range(num_parts)] + [{0, num_parts - 1}, {1, 4, 5}, set(range(num_parts))]:
        close_with_failures(failing)


def close_with_failures(failing):
    module = Net()
    before = module.layer.weight.detach().clone()
    engine, _ = initialize_engine(lambda: module, 0, make_config("bf16"))
    engine(torch.ones(2, 8))
    parts = engine._session.closing.teardown._parts
    num_parts = len(parts)
    done = []

    def failing_part(index, part):
        def run():
            done.append(index)
            part()
            if index in failing:
                raise OSError(index)

        return run

    parts[:] = [failing_part(index, part) for index, part in enumerate(parts)]
    if failing:
        with pytest.raises(OSError) as raised:
            engine.close()
        assert raised.value.args == (max(failing),)  # the last is undone first
    else:
        engine.close()
    with pytest.raises(StateError, match="this engine is closed"):
        engine.report()
    assert done == list(reversed(range(num_parts)))
    assert open_sessions() == []
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert_same_bits(module.layer.weight.detach(), before)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    engine.close()
    train_once(module)
    return num_parts

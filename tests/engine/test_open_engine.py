import copy
import gc
import io
import pickle
import sys

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine
from patrickstar.session import closing
from patrickstar.session.registry import close_open_engine, open_sessions
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import MODELS
from tests.ranks.runs import rank_and_size, rows
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
    patrickstar.close_open_engine()  # no engine is open
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
    parts = engine._session.teardown._parts
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


CASE = MODELS["gpt2"]


def step(engine, optimizer, seed, take=lambda batch: batch):
    loss = CASE.loss(engine(**take(CASE.batch(torch.Generator().manual_seed(seed)))))
    engine.backward(loss)
    optimizer.step()
    return loss.item()


def test_an_engine_that_cannot_close_stays_open(monkeypatch):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1)
    room = 4 * sum(param.numel() for param in engine.module.parameters()) - engine.report()["host_bytes"]
    assert room > 0  # all states are on the device
    monkeypatch.setattr(closing, "available_bytes", lambda: closing._RESERVE_BYTES + room - 1)
    with pytest.raises(_C.MemoryBudgetError, match=r"own parameters take .*engine\.discard\(\)"):
        engine.close()
    step(engine, optimizer, 2)
    expected = engine.state_dict()
    monkeypatch.setattr(closing, "available_bytes", lambda: closing._RESERVE_BYTES + room)
    engine.close()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, expected[name])


def test_it_can_be_discarded(monkeypatch):
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1)
    monkeypatch.setattr(closing, "available_bytes", lambda: 0)
    engine.discard()
    assert all(param.numel() == 0 for param in engine.module.parameters())


def close_with_less_room_on_rank_1():
    rank, _ = rank_and_size()
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16"))
    step(engine, optimizer, 1, rows)
    params = engine._session.params
    if rank == 1:
        params.host_bytes_when_released = lambda: 2**60
    try:
        engine.close()
        text = ""
    except _C.MemoryBudgetError as error:
        text = str(error)
    loss = step(engine, optimizer, 2, rows)
    vars(params).pop("host_bytes_when_released", None)
    engine.close()
    return text, loss


def test_ranks_stay_open_together():
    (first, loss), (second, same) = run_ranks(2, close_with_less_room_on_rank_1, timeout_seconds=100)
    assert "rank 1: MemoryBudgetError: the module's own parameters take" in first
    assert second.startswith("the module's own parameters take")
    assert loss > 0
    assert same > 0


SETUP = """
import torch
import patrickstar
from patrickstar.runtime import initialize_engine
from tests.engine.test_open_engine import Net
config = {"bf16": {"enabled": True}, "default_chunk_size": 1024, "device_memory": "1MiB"}
model = Net()
engines = []
"""
STEP = """
loss = engine(torch.ones(2, 8))
engine.backward(loss)
optimizer.step()
"""


@pytest.fixture
def run():
    from IPython.core.interactiveshell import InteractiveShell  # takes a while to load

    main = sys.modules["__main__"]  # the shell replaces it
    shell = InteractiveShell.instance()

    def run_cell(source):
        result = shell.run_cell(source, store_history=True)
        if result.error_in_exec is not None:
            raise result.error_in_exec
        return shell.user_ns

    run_cell(SETUP)
    yield run_cell
    shell.reset()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main
    gc.collect()
    close_open_engine()


CELLS = {
    "a function": "engine, optimizer = initialize_engine(Net, 0, config)",
    "a function of the notebook": "def build():\n    return initialize_engine(Net, 0, config)\n"
    "engine, optimizer = build()",
    "initialize": "engine, optimizer, *_ = patrickstar.initialize(model=Net(), config="
    '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})',
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_cell_that_is_run_again(cell, run):
    for _ in range(3):
        run(cell)
        assert len(open_sessions()) <= 2
        names = run(STEP)
    gc.collect()
    (session,) = open_sessions()
    assert session.owner.face() is names["engine"]


ERRORS = {
    "another budget": ("initialize_engine(Net, 0, {**config, 'device_memory': '2MiB'})", "share one budget"),
    "the same module": ("initialize_engine(lambda: model, 0, config)", "close_open_engine"),
}


@pytest.mark.parametrize(("cell", "message"), ERRORS.values(), ids=ERRORS)
def test_an_engine_in_the_way_is_named(cell, message, run):
    run("engine, optimizer = initialize_engine(lambda: model, 0, config)")
    with pytest.raises(ValueError, match=message) as raised:
        run(f"engine, optimizer = {cell}")
    said = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "patrickstar.close_open_engine()" in said or not hasattr(raised.value, "__notes__")
    run("patrickstar.close_open_engine()")
    run(f"engine, optimizer = {cell}")
    run(STEP)
    assert len(open_sessions()) == 1


TWO_ENGINES = {
    "a loop": [
        "for _ in range(2):\n    engine, optimizer = initialize_engine(Net, 0, config)\n    engines.append(engine)"
    ],
    "other statements": [
        "teacher, _ = initialize_engine(Net, 0, config)",
        "engine, _ = initialize_engine(Net, 0, config)",
    ],
    "a list": ["engines.append(initialize_engine(Net, 0, config)[0])"] * 2,
}


@pytest.mark.parametrize("cells", TWO_ENGINES.values(), ids=TWO_ENGINES)
def test_two_engines_that_are_wanted(cells, run):
    for cell in cells:
        run(cell)
    assert len(open_sessions()) == 2

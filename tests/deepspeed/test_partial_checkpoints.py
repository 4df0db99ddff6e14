import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import patrickstar as deepspeed
from patrickstar import CheckpointError, utils
from patrickstar.checkpoint import latest_tag
from tests.deepspeed.test_initialize import config, data
from tests.distributed import run_ranks

BATCHES = list(DataLoader(data(), batch_size=4))
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}}}


class Net(nn.Module):
    def __init__(self, with_last=True):
        super().__init__()
        self.base, self.middle = nn.Linear(16, 24).requires_grad_(False), nn.Linear(24, 10)
        if with_last:
            self.last = nn.Linear(10, 10)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, y):
        if self.training:
            self.count += 1
        x = self.middle(torch.tanh(self.base(x)))
        return nn.functional.cross_entropy((self.last(x) if hasattr(self, "last") else x).float(), y)


def net(seed, with_last=True):
    torch.manual_seed(seed)
    return Net(with_last)


def engine_of(seed, with_last=True, **more):
    options = config(gradient_accumulation_steps=1, device_memory=260_000, **{**WARMUP, **more})
    return deepspeed.initialize(model=net(seed, with_last), config=options)[0]


def train(engine, batches):
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()


def seen(engine):
    values = {name: value.clone() for name, value in engine.state_dict().items()}
    trained = [(name, param) for name, param in engine.named_parameters() if param.requires_grad]
    states = {
        (name, key): utils.safe_get_full_optimizer_state(param, key)
        for name, param in trained
        for key in ("exp_avg", "exp_avg_sq")
    }
    counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
    return {"values": values, "states": states, "rates": engine.get_lr(), "counts": counts}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
    return one == other


@pytest.fixture
def saved(tmp_path):
    with engine_of(0) as engine:
        train(engine, BATCHES[:3])
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        return tmp_path, seen(engine)


def loaded(folder, **options):
    with engine_of(1) as engine:
        train(engine, BATCHES[3:4])
        before = seen(engine)
        _, client_state = engine.load_checkpoint(folder, **options)
        assert client_state == {"epoch": 3}
        after = seen(engine)
        train(engine, BATCHES[4:5])  # and it trains
        return before, after


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, ("values", "states", "rates", "counts")),
        ({"load_module_only": True}, ("values",)),
        ({"load_module_only": True, "load_optimizer_states": False}, ("values",)),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, ("values", "counts")),
        ({"load_optimizer_states": False}, ("values", "counts", "rates")),
        ({"load_lr_scheduler_states": False}, ("values", "states", "rates", "counts")),
    ],
)
def test_what_is_taken_and_what_stays(saved, options, taken):
    folder, state = saved
    before, after = loaded(folder, **options)
    for what in state:
        assert not same(state[what], before[what]), what
        assert same(after[what], state[what] if what in taken else before[what]), what


def test_the_schedule_stays_where_it_is(saved):
    folder, _ = saved
    with engine_of(1) as engine:
        train(engine, BATCHES[3:4])
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.last_batch_iteration == 0
        engine.load_checkpoint(folder)
        assert engine.lr_scheduler.last_batch_iteration == 2


def test_other_models(saved, caplog):
    folder, state = saved
    with engine_of(1, with_last=False) as engine:
        own = seen(engine)
        with pytest.raises(CheckpointError, match=r"not in this model: last\.weight, last\.bias"):
            engine.load_checkpoint(folder, load_module_only=True)
        assert same(seen(engine)["values"], own["values"])
        with caplog.at_level(logging.INFO, logger="patrickstar"):
            engine.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
        assert "2 tensors are not in this model (last.bias, last.weight, ...)" in caplog.text
        for name, value in seen(engine)["values"].items():
            assert torch.equal(value, state["values"][name])
        with pytest.raises(CheckpointError, match="build the engine with the same model_parameters"):
            engine.load_checkpoint(folder, load_module_strict=False)  # with the optimizer of another model
        engine.save_checkpoint(folder, tag="small")
    with engine_of(2) as engine:
        own = seen(engine)
        engine.load_checkpoint(folder, tag="small", load_module_only=True, load_module_strict=False)
        for name, value in seen(engine)["values"].items():
            assert torch.equal(value, (own if name.startswith("last") else state)["values"][name])
    with pytest.raises(ValueError, match="custom_load_fn"), engine_of(0) as engine:
        engine.load_checkpoint(folder, custom_load_fn=print)


def save_without_frozen(folder):
    deepspeed.init_distributed()
    with engine_of(0) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(folder, tag="whole")
        engine.save_checkpoint(folder, tag="trained", save_latest=False, exclude_frozen_parameters=True)
        return seen(engine)


def load_without_frozen(folder):
    deepspeed.init_distributed()
    with engine_of(0) as engine:
        engine.load_checkpoint(folder, tag="trained", load_module_strict=False)
        return seen(engine)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_frozen_parameters(tmp_path, num_ranks):
    state = run_ranks(num_ranks, save_without_frozen, str(tmp_path))[0]
    assert latest_tag(tmp_path) == "whole"
    size = {tag: sum(file.stat().st_size for file in (tmp_path / tag).iterdir()) for tag in ("whole", "trained")}
    assert size["trained"] < size["whole"]
    for found in run_ranks(3 - num_ranks, load_without_frozen, str(tmp_path)):
        assert all(same(found[what], state[what]) for what in state)
    with (
        engine_of(0) as engine,
        pytest.raises(CheckpointError, match=r"not in the checkpoint: base\.weight, base\.bias"),
    ):
        engine.load_checkpoint(tmp_path, tag="trained")


def test_weights_for_accelerate():
    with engine_of(0, bf16={"enabled": True}) as engine:
        assert engine.zero_gather_16bit_weights_on_model_save()
        weights = engine._zero3_consolidated_16bit_state_dict()
        for name, value in engine.state_dict().items():
            expected = value if name == "count" else value.bfloat16()
            assert torch.equal(weights[name], expected)
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert weights.keys() - trained.keys() == {"base.weight", "base.bias"}
        assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == trained.keys()

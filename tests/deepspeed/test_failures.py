import contextlib
import importlib
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import patrickstar
from patrickstar import torch_scope
from patrickstar.ranks import failures as rank_failures
from patrickstar.runtime import initialize_engine
from patrickstar.session.registry import open_sessions
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import rank_and_size

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "bf16": {"enabled": True},
    "default_chunk_size": 8192,
    "rank_timeout_seconds": 60,
}
OWN_CONFIG = {key: value for key, value in CONFIG.items() if not key.startswith("train_")}
# Places where an exception is thrown: a function, and which of its calls.
BEFORE_CHUNKS = {
    "groups": ("patrickstar.engine.start.make_groups", 0),
    "budgets": ("patrickstar.engine.start.make_budgets", 0),
    "core": ("patrickstar.session.lifecycle.build_core", 0),
}
INTO_CHUNKS = {
    "first parameter": ("patrickstar.module.adoption.become_chunked", 0),
    "fourth parameter": ("patrickstar.module.adoption.become_chunked", 3),
    "check of models": ("patrickstar.engine.start.check_same_model", 0),
    "rest": ("patrickstar.session.session_parts.MovedRest", 0),
    "buffers": ("patrickstar.session.session_parts.share_rest", 0),
    "managed": ("patrickstar.session.session_parts.ManagedParams", 0),
    "hooks": ("patrickstar.session.session_parts.ModuleHooks", 0),
    "compiled": ("patrickstar.session.session_parts.CompiledUnits", 0),
    "module": ("patrickstar.session.session_parts.ConvertedModule", 0),
    "third gradient hook": ("patrickstar.session.trained_params.make_gradient_hook", 2),
    "trained": ("patrickstar.session.session_parts.TrainedParams", 0),
    "profiler": ("patrickstar.session.session_parts.make_profiler", 0),
}
WHEN_OPEN = {"optimizer": ("patrickstar.{}.make_optimizer", 0), "engine": ("patrickstar.{}.{}Engine", 0)}


class InjectedError(Exception):
    pass


class Net(nn.Module):
    """Parameters that are trained, frozen, tied, not dense, or left to PyTorch; a buffer of each kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.narrow = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.frozen = nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False)
        with torch_scope():
            self.own = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(16, 8).t())
        self.register_buffer("running", torch.randn(16, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.tensor(3), persistent=False)

    def forward(self, tokens):
        hidden = self.own(self.embedding(tokens)).to(self.narrow.weight.dtype)
        return self.head((self.frozen(self.narrow(hidden))).to(self.head.weight.dtype)).float().square().mean()


def build():
    torch.manual_seed(0)
    return Net()


def seen(module):
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {
        name: (
            type(tensor).__name__,
            tensor.dtype,
            str(tensor.device),
            tensor.requires_grad,
            tuple(tensor.shape),
            tensor.stride(),
            None if tensor.is_meta else tensor.detach().clone(),
        )
        for name, tensor in tensors.items()
    } | {"hooks": [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]}


def open_by_initialize(module):
    return patrickstar.initialize(model=module, config=CONFIG)[:2]


def open_by_runtime(module):
    return initialize_engine(lambda: module, 0, OWN_CONFIG)


def open_by_accelerate(module):
    from patrickstar.integrations.accelerate import PatrickStarAccelerator

    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16", patrickstar_config=OWN_CONFIG)
    _, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    return accelerator.engine, optimizer


ENTRIES = {
    "initialize": (open_by_initialize, ("deepspeed.initialize", "Training")),
    "runtime": (open_by_runtime, ("runtime", "")),
    "accelerate": (open_by_accelerate, ("runtime", "")),
}


@contextlib.contextmanager
def failing(place, on_this_rank=True):
    path, index = place
    owner, name = path.rsplit(".", 1)
    owner = importlib.import_module(owner)
    real, calls = getattr(owner, name), []

    def called(*args, **kwargs):
        calls.append(None)
        if on_this_rank and len(calls) == index + 1:
            raise InjectedError(path)
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, called):
        yield
    assert not on_this_rank or len(calls) > index, path


def places_of(entry):
    module, prefix = ENTRIES[entry][1]
    places = {"optimizer's state": ("patrickstar.integrations.accelerate.move_state", 0)}
    return (
        (places if entry == "accelerate" else {})
        | BEFORE_CHUNKS
        | INTO_CHUNKS
        | {k: (path.format(module, prefix), i) for k, (path, i) in WHEN_OPEN.items()}
    )


def one_step(entry, module):
    engine, optimizer = ENTRIES[entry][0](module)
    with engine:
        loss = engine(torch.arange(4).view(2, 2))
        engine.backward(loss)
        if entry == "initialize":
            engine.step()
        else:
            optimizer.step()
        return loss.item(), engine.state_dict()


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_rank(entry):
    expected = one_step(entry, build())
    for name, place in places_of(entry).items():
        module = build()
        before, objects = seen(module), list(module.parameters())
        with failing(place), pytest.raises(InjectedError):
            ENTRIES[entry][0](module)
        assert open_sessions() == [], name
        assert_same_bits(seen(module), before, name)
        assert all(one is other for one, other in zip(module.parameters(), objects, strict=True)), name
        assert_same_bits(one_step(entry, module), expected, name)


def test_a_model_that_was_prepared_before_its_optimizer():
    from patrickstar.integrations.accelerate import PatrickStarAccelerator

    module = build()
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=OWN_CONFIG)
    accelerator.prepare(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with failing(places_of("accelerate")["optimizer's state"]), pytest.raises(InjectedError):
        accelerator.prepare(optimizer)
    assert not accelerator.has_engine
    accelerator.prepare(optimizer)
    assert accelerator.engine.module is module
    accelerator.engine.close()


def test_frozen_values_that_come_back_rounded_are_named(caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))
    trained, frozen = module[0].weight.detach().clone(), module[1].weight.detach().clone()
    with failing(INTO_CHUNKS["hooks"]), pytest.raises(InjectedError):
        open_by_runtime(module)
    assert_same_bits(module[0].weight.detach(), trained)
    assert_same_bits(module[1].weight.detach(), frozen.bfloat16().float())
    (line,) = [message for message in caplog.messages if "rounded" in message]
    assert "2 frozen parameters (1.weight, ...)" in line and "bfloat16" in line


def test_what_a_user_gets_wrong():
    module = build()
    before = seen(module)
    wrong = [
        {"optimizer": torch.optim.Adagrad(module.parameters(), lr=0.1)},
        {"optimizer": torch.optim.AdamW(module.parameters(), amsgrad=True)},
        {"model_parameters": [{"params": ["nothing.*"]}]},
        {"model_parameters": [nn.Parameter(torch.ones(3))]},
        {"config": {**CONFIG, "device_memory": 1000}},
        {"config": {**CONFIG, "host_memory": 1000, "device_memory": 8000}},
        {"config": {**CONFIG, "plan": "/there/is/none"}},
        {"lr_scheduler": lambda optimizer: 1 / 0},
        {"training_data": 3},
    ]
    for arguments in wrong:
        error = None
        try:
            patrickstar.initialize(model=module, **{"config": CONFIG, **arguments})
        except (ValueError, TypeError, ArithmeticError, MemoryError, RuntimeError) as raised:
            error = raised
        assert error is not None, arguments
        print(list(arguments), error)
        assert open_sessions() == []
        assert_same_bits(seen(module), before, str(arguments))
    assert_same_bits(one_step("initialize", module), one_step("initialize", build()))


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))

    def forward(self, x):
        return self.layers(x).float().square().mean()


def initialised(module):
    torch.manual_seed(1)
    engine, _ = open_by_runtime(module)
    with engine:
        return engine.state_dict()


def test_a_model_on_the_meta_device():
    expected = initialised(Meta())
    for name, place in places_of("runtime").items():
        module = Meta()
        before, objects = seen(module), list(module.parameters())
        with failing(place), pytest.raises(InjectedError):
            open_by_runtime(module)
        assert open_sessions() == [], name
        assert_same_bits(seen(module), before, name)
        assert all(one is other for one, other in zip(module.parameters(), objects, strict=True)), name
        assert_same_bits(initialised(module), expected, name)


def fail_on_ranks():
    rank, size = rank_and_size()
    dist.init_process_group("gloo")
    rank_failures._LINGER_SECONDS = 0.3  # the store's server stays
    rank_failures._BEAT_SECONDS = 0.1
    errors = {}
    expected = one_step("initialize", build())
    for name, place in places_of("initialize").items():
        for at_fault in range(size):
            module = build()
            before = seen(module)
            try:
                with failing(place, rank == at_fault):
                    patrickstar.initialize(model=module, config=CONFIG)
            except Exception as error:
                errors[name, at_fault] = f"{type(error).__name__}: {error}"
            assert open_sessions() == [], name
            if name in BEFORE_CHUNKS or name in WHEN_OPEN:
                assert_same_bits(seen(module), before, name)
            else:  # other ranks' parts cannot come from a failing rank
                tensors = dict(module.named_parameters())
                assert all(type(param) is nn.Parameter for param in tensors.values()), name
                for key, values in seen(module).items():
                    if key == "hooks" or tensors.get(key, values[-1]).numel() > 0:
                        assert_same_bits(values, before[key], f"{name}: {key}")
    assert_same_bits(one_step("initialize", build()), expected)
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_two_ranks():
    by_rank = run_ranks(2, fail_on_ranks)
    for name, (path, _) in places_of("initialize").items():
        for at_fault in range(2):
            own = by_rank[at_fault][name, at_fault]
            other = by_rank[1 - at_fault][name, at_fault]
            print(name, at_fault, own, "|", other)
            assert own == f"InjectedError: {path}"
            assert other.startswith("RankFailure: ") and "InjectedError" in other and path in other

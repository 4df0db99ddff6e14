import ctypes
import functools

import pytest
import torch

from patrickstar import _C, MemoryBudgetError
from patrickstar.runtime import initialize_engine
from patrickstar.session import core_setup
from tests.engine.test_equality import WIDE
from tests.models import MODELS, Case
from tests.training import Run, assert_same, least_device_memory, make_config, train

DTYPES = {_C.DType.FLOAT32: (torch.float32, ctypes.c_uint32), _C.DType.BFLOAT16: (torch.bfloat16, ctypes.c_uint16)}
SGD = {"lr": 0.01, "momentum": 0.9}
STEPS = 6


def eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/127 of the largest magnitude. Rounding twice gives other values than rounding once."""
    scale = weight.abs().max() / 127
    return (weight / scale).round() * scale * 0.875


def round_matrices(shape, dtype, values):
    if len(shape) == 2:
        torch_dtype, element = DTYPES[dtype]
        weight = torch.frombuffer((element * (shape[0] * shape[1])).from_address(values), dtype=torch_dtype)
        weight.copy_(eight_bits(weight))


def plainly(case: Case, num_ranks: int = 1) -> Run:
    torch.manual_seed(0)
    module = case.build()
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        masters = {param: param.data for param in module.parameters() if param.dim() == 2}
        for param, master in masters.items():
            param.data = eight_bits(master)
        batch = case.batch(generator)
        for rank in range(num_ranks):
            part = {key: value.chunk(num_ranks)[rank] for key, value in batch.items()}
            loss = case.loss(module(**part))
            (loss / num_ranks).backward()
        for param, master in masters.items():
            param.data = master
        losses.append(loss.item())
        optimizer.step()
    return Run(losses, {name: value.detach() for name, value in module.state_dict().items()}, {})


def config_of(precision="bf16", *, on_device=True, speculation="never", **more):
    config = make_config(precision, **more)
    config["optimizer"] = {"type": "SGD", "params": {**SGD, "use_hybrid_adam": on_device}, "speculation": speculation}
    return config


@pytest.fixture(autouse=True)
def compute_format(monkeypatch):
    install(monkeypatch.setattr)


def install(set_attribute):
    make = core_setup.make_engine_options

    def make_with_format(*args):
        options = make(*args)
        options.set_compute_format(round_matrices)
        return options

    set_attribute(core_setup, "make_engine_options", make_with_format)


@functools.cache
def expected() -> Run:
    return train(WIDE, config_of(), steps=STEPS)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no fma below AVX2")
@pytest.mark.parametrize("on_device", [True, False])
def test_the_bits_of_plain_pytorch(on_device):
    plain = plainly(WIDE)
    run = train(WIDE, config_of("fp32", on_device=on_device), steps=STEPS)
    assert run.losses == plain.losses
    for key, value in run.state.items():
        assert torch.equal(value, plain.state[key]), key


def test_budgets_chunk_sizes_and_sides():
    """Values are rounded once, however often they leave the device and come back."""
    least = least_device_memory(WIDE, config_of())
    for config in (
        config_of(device_memory=least),
        config_of(device_memory=2 * least, speculation="always"),
        config_of(on_device=False, default_chunk_size=4096),
    ):
        assert_same(train(WIDE, config, steps=STEPS), expected())


def test_accumulation():
    runs = [train(WIDE, config_of(on_device=side), steps=3, accumulate=2) for side in (True, False)]
    assert_same(*runs)


def test_values_that_a_forward_writes_are_rounded_once():
    case = MODELS["gpt2"]
    engine, _ = initialize_engine(case.build, 0, config_of("fp32"))
    with engine:
        weight = engine.module.transformer.h[0].attn.c_attn.weight
        generator = torch.Generator().manual_seed(0)
        new = torch.randn(weight.shape, generator=generator)
        seen = []

        def write(*_):
            weight.data.copy_(new)
            seen.append(torch.zeros(weight.shape) + weight.detach().clone())

        engine.module.transformer.h[0].attn.c_attn.register_forward_pre_hook(write)
        engine.eval()
        engine(**case.batch(generator))
        assert torch.equal(seen[0], eight_bits(new))
        assert torch.equal(engine.state_dict()["transformer.h.0.attn.c_attn.weight"], new)


def test_values_without_a_master_are_refused():
    with pytest.raises(ValueError, match=r"no float32 master apart from its compute value, which the format would"):
        train(WIDE, config_of(speculation="commit"), steps=1)


def test_frozen_values_stay_as_they_are_and_frozen():
    case = MODELS["lora"]
    engine, _ = initialize_engine(case.build, 0, config_of("fp32"))
    with engine:
        frozen = next(param for param in engine.module.parameters() if not param.requires_grad)
        frozen.requires_grad_(True)
        with pytest.raises(MemoryBudgetError, match=r"is frozen and cannot be trained from now on"):
            engine(**case.batch(torch.Generator().manual_seed(0)))

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from patrickstar.deepspeed.gathered_parameters import GatheredParameters
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits, first_difference
from tests.training import make_config


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))


def build_bf16():
    return build().bfloat16()


def averages(module):
    return [param * 0.99 for param in module.parameters()]


def copies(module):
    return [param.detach().clone() for param in module.parameters()]


def by_copy(module):
    params, kept, other = list(module.parameters()), copies(module), averages(module)
    for values in (other, kept):
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def by_data(module):
    params, kept, other = list(module.parameters()), copies(module), averages(module)
    for param, value in zip(params, other, strict=True):
        param.data = value
    for param, value in zip(params, kept, strict=True):
        param.data.copy_(value)


def by_state_dict(module):
    kept = {name: param.detach().clone() for name, param in module.named_parameters()}
    module.load_state_dict({name: value.float() * 0.99 for name, value in kept.items()})
    module.load_state_dict(kept)


def by_its_own_state_dict(module):
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict({name: value * 0.99 for name, value in kept.items()})
    module.load_state_dict(kept)


def by_foreach(module):
    params, kept = list(module.parameters()), [value.float() for value in copies(module)]
    torch._foreach_copy_(params, averages(module))
    torch._foreach_copy_(params, kept)


def by_rows(module):
    weight = module[0].weight
    first, second = weight[:32].clone(), weight[32:].clone()
    weight.zero_()
    weight[:32] = first
    weight[torch.arange(32, 64)] = second


def by_perturbation(module):
    kept = copies(module)
    for param in module.parameters():
        param.add_(0.01)
        param.add_(0.02)
    for param, value in zip(module.parameters(), kept, strict=True):
        param.data = value


def by_gathering(module):
    params = list(module.parameters())
    with GatheredParameters(params, modifier_rank=0):
        kept = [param.detach().clone() for param in params]
        for param in params:
            param.data.mul_(0.99)
    with GatheredParameters(params, modifier_rank=0):
        for param, value in zip(params, kept, strict=True):
            param.data.copy_(value)


def by_exchange(module):
    average = [param.float() * 0.99 for param in copies(module)]
    for _ in range(2):
        for mine, param in zip(average, module.parameters(), strict=True):
            theirs = mine.data.clone()
            mine.data.copy_(param.data)
            param.data.copy_(theirs)


def by_references(module):
    params, other = list(module.parameters()), averages(module)
    kept, row = [param.data for param in params], params[0][0]
    for param, value in zip(params, other, strict=True):
        param.data = value
    assert torch.equal(row, kept[0][0])
    for param, value, average in zip(params, kept, other, strict=True):
        assert torch.equal(param, average)
        assert not torch.equal(value, average)
        param.data = value


def unchanged(module):
    for param in module.parameters():
        param.data = param.data.clamp(-10.0, 10.0)


WAYS = [
    by_copy,
    by_data,
    by_state_dict,
    by_its_own_state_dict,
    by_foreach,
    by_rows,
    by_perturbation,
    by_gathering,
    by_exchange,
    by_references,
    unchanged,
]


def scheme(precision, **optimizer):
    config = make_config(precision)
    config["optimizer"]["params"]["lr"] = 2e-5  # most updates are less than a 16-bit step
    config["optimizer"] |= optimizer
    return config


SCHEMES = {
    "bf16": scheme("bf16"),
    "fp16": scheme("fp16"),
    "split masters": scheme("bf16", speculation="commit"),
    "no masters": scheme("bf16", master="stochastic"),
}


def states(config, ways, make=build):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    engine, optimizer = initialize_engine(make, 0, config)
    found = []
    with engine:
        for way in ways:
            found.append(engine.state_dict())
            engine.backward(engine(x).float().square().mean())
            if way is by_perturbation and config["optimizer"].get("speculation") != "commit":
                with torch.no_grad():
                    by_perturbation(engine.module)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if way is not None:
                    way(engine.module)
        found.append(engine.state_dict())
    return found


@pytest.mark.parametrize(("name", "make"), [*((name, build) for name in SCHEMES), ("bf16", build_bf16)])
def test_masters_are_kept(name, make):
    expected = states(SCHEMES[name], [None] * len(WAYS), make)
    for way, found, wanted in zip([None, *WAYS], states(SCHEMES[name], WAYS, make), expected, strict=True):
        assert_same_bits(found, wanted, getattr(way, "__name__", "start"))
    if name == "bf16":
        assert first_difference(expected[-1], {key: value.bfloat16().float() for key, value in expected[-1].items()})


@torch.enable_grad()
def trained_engine():
    engine, optimizer = initialize_engine(build, 0, SCHEMES["bf16"])
    engine.backward(engine(torch.ones(2, 8)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return engine, optimizer


@torch.no_grad()
def test_what_was_not_read_is_written_as_it_is():
    engine, optimizer = trained_engine()
    with engine:
        weight = engine.module[0].weight
        rounded = {name: value.bfloat16().float() for name, value in engine.state_dict().items()}
        copies(engine.module)
        engine.load_state_dict(rounded)
        assert_same_bits(engine.state_dict(), rounded, "float32 values of a state dict are masters")

        masters = torch.full((64, 8), 0.3)
        engine.load_state_dict({**rounded, "0.weight": masters})
        read = weight.clone()
        with torch.enable_grad():
            engine.backward(engine(torch.ones(2, 8)).float().square().mean())
        optimizer.step()
        weight.copy_(read)
        assert_same_bits(engine.state_dict()["0.weight"], masters.bfloat16().float(), "read before the update")

        engine.load_state_dict({**rounded, "0.weight": masters})
        weight.fill_(float(masters.bfloat16()[0, 0]))
        assert_same_bits(engine.state_dict()["0.weight"], masters.bfloat16().float(), "a number")


@torch.no_grad()
def test_averages_are_made_of_float32_values():
    engine, _ = trained_engine()
    with engine:
        weight, master = engine.module[0].weight, engine.state_dict()["0.weight"]
        average = torch.zeros(64, 8)
        average.copy_(weight)
        assert_same_bits(average, master)
        average.zero_().lerp_(weight.data, 0.25)
        assert_same_bits(average, torch.zeros(64, 8).lerp_(master, 0.25))
        rounded = torch.zeros(64, 8, dtype=torch.bfloat16)
        rounded.copy_(weight)
        assert_same_bits(rounded, master.bfloat16())
        for options in ({}, {"avg_fn": get_ema_avg_fn(0.5)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}):
            averaged = AveragedModel(build(), **options)
            averaged.update_parameters(engine.module)
            assert_same_bits(averaged.module[0].weight.detach(), master, str(options))
            averaged.update_parameters(engine.module)
            torch.testing.assert_close(averaged.module[0].weight, master, rtol=2**-8, atol=2**-8)

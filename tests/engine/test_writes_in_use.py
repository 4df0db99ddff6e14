import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import Case
from tests.training import assert_same, make_config, make_host_config, train, train_plain


class Block(nn.Module):
    def __init__(self, clamps):
        super().__init__()
        self.clamps = clamps
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def clamp(self):
        for weight in (self.up.weight, self.down.weight, self.frozen.weight):
            weight.data.clamp_(-0.1, 0.1)

    def forward(self, x):
        if self.clamps:
            self.clamp()
        return x + self.down(torch.tanh(self.up(self.frozen(x))))  # down is held when this is computed again


class Tower(nn.Module):
    def __init__(self, clamps):
        super().__init__()
        self.blocks = nn.ModuleList(Block(clamps) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return {"loss": x.float().square().mean()}


def case_of(clamps):
    return Case(lambda: Tower(clamps), lambda generator: {"x": torch.randn(4, 32, generator=generator)})


@torch.no_grad()
def clamp_all(engine, _step):
    for block in engine.module.blocks:
        block.clamp()


SCHEMES = {
    "float32": make_config(default_chunk_size=4096),
    "bfloat16": make_host_config("bf16", default_chunk_size=4096, device_memory="256KiB"),
    "split masters": make_host_config("bf16", default_chunk_size=4096, device_memory="256KiB"),
    "no masters": make_config("bf16", default_chunk_size=4096),
}
SCHEMES["split masters"]["optimizer"]["speculation"] = "commit"
SCHEMES["no masters"]["optimizer"]["master"] = "stochastic"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_are_written_while_their_chunk_is_in_use(scheme):
    run = train(case_of(clamps=True), SCHEMES[scheme], steps=4)
    assert_same(run, train(case_of(clamps=False), SCHEMES[scheme], steps=4, before_step=clamp_all))
    if scheme == "float32":
        plain = train_plain(case_of(clamps=True), steps=4)
        assert run.losses == pytest.approx(plain.losses, rel=1e-6)
        assert max(weight.abs().max() for name, weight in run.state.items() if "frozen.weight" in name) <= 0.1


class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.rand(32) + 1), nn.Parameter(torch.rand(32) + 1)
        self.frozen = nn.Parameter(torch.rand(32) + 1, requires_grad=False)

    def forward(self, x):
        y = x * self.a * self.frozen
        for param in (self.a, self.b, self.frozen):
            param.data.mul_(0.75)
        return y * self.b + self.frozen


class WithHalving(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.halving = nn.Linear(32, 32), Halving()

    def forward(self, x):
        return {"loss": self.halving(self.up(x)).square().mean()}


def test_what_is_written_in_use_is_seen_by_all_that_follows():
    case = Case(WithHalving, lambda generator: {"x": torch.randn(4, 32, generator=generator)})
    run, plain = train(case, make_config(), steps=4), train_plain(case, steps=4)
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.state.items():
        torch.testing.assert_close(run.state[name], value, rtol=1e-6, atol=1e-7)

import pytest
import torch
from torch import nn

from patrickstar.optimizer.uncorrected_adam import UncorrectedAdamW
from patrickstar.runtime import initialize_engine
from patrickstar.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.bits import assert_same_bits
from tests.training import ADAM, make_config

CLIPPING = 0.05


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.drop = nn.Linear(8, 16), nn.Linear(16, 4)
        self.modes = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x):
        return self.drop(torch.fft.irfft(torch.fft.rfft(self.lift(x)) * self.modes, n=16))


INPUTS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def opened(kind, **params):
    config = make_config(optimizer=kind, gradient_clipping=CLIPPING)
    options = {key: value for key, value in config["optimizer"]["params"].items() if key in ("lr", "weight_decay")}
    config["optimizer"]["params"] = {**(ADAM if "Adam" in kind else options), **params}
    return initialize_engine(Fourier, 0, config)


def run_steps(engine, optimizer, inputs):
    found = []
    for x in inputs:
        optimizer.zero_grad()
        loss = engine(x).square().mean()
        engine.backward(loss)
        optimizer.step()
        found.append((loss.item(), engine.report()["grad_norm"]))
    return found


PLAIN = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "AdamW without correction": (UncorrectedAdamW, {"bias_correction": False}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_they_are_trained_as_in_plain_pytorch(name):
    make, params = PLAIN[name]
    plain = Fourier()
    options = ADAM if "Adam" in name else {key: ADAM[key] for key in ("lr", "weight_decay")}
    plain_optimizer = make(plain.parameters(), **options)
    expected = []
    for x in INPUTS:
        plain_optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        expected.append((loss.item(), float(nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING))))
        plain_optimizer.step()
    engine, optimizer = opened(name.split()[0], **params)
    with engine:
        for found, wanted in zip(run_steps(engine, optimizer, INPUTS), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
        for key, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_they_are_saved_and_loaded(kind, tmp_path):
    engine, optimizer = opened(kind)
    with engine:
        run_steps(engine, optimizer, INPUTS[:2])
        modes = engine.module.modes
        assert_same_bits(safe_get_full_fp32_param(modes), modes.detach())
        momentum = safe_get_full_optimizer_state(modes, "exp_avg")
        assert momentum.is_complex() and bool(momentum.imag.any())
        engine.save_checkpoint(tmp_path)
        expected = run_steps(engine, optimizer, INPUTS[2:]), engine.state_dict(), optimizer.state_dict()["state"]
    engine, optimizer = opened(kind)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert_same_bits(
            (run_steps(engine, optimizer, INPUTS[2:]), engine.state_dict(), optimizer.state_dict()["state"]), expected
        )
        engine.backward(engine(INPUTS[0]).square().mean())
        assert_same_bits(safe_get_full_grad(engine.module.modes), engine.module.modes.grad)

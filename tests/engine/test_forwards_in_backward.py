import pytest
import torch
from torch import nn

from patrickstar import StateError, torch_scope
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import ADAM, make_config, make_host_config

STEPS, PARTS = 4, 3
INPUTS = torch.randn(STEPS, 6, 8, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def cached_loss(model, x):
    with torch.no_grad():
        found = [model(part).float().requires_grad_() for part in x.chunk(PARTS)]
    rows = torch.cat(found)
    loss = nn.functional.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))
    loss.backward()
    loss = loss.detach().requires_grad_()

    def run_again(grad):
        with torch.enable_grad():
            for part, kept in zip(x.chunk(PARTS), found, strict=True):
                torch.dot(model(part).float().flatten(), kept.grad.flatten()).mul(grad).backward()

    loss.register_hook(run_again)
    return loss


def train(model, optimizer, backward, accumulate):
    losses = []
    for x in INPUTS:
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = cached_loss(model, x)
            backward(loss / accumulate)
            losses.append(loss.item())
        optimizer.step()
    return losses


def train_in_engine(config, accumulate=1):
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        return train(engine, optimizer, engine.backward, accumulate), engine.state_dict()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_as_in_plain_pytorch(accumulate):
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), torch.Tensor.backward, accumulate)
    losses, state = train_in_engine(make_config(), accumulate)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_in_any_budget():
    for precision in ("fp32", "bf16"):
        expected = train_in_engine(make_config(precision))
        small = {"default_chunk_size": 1024, "device_memory": "64KiB"}
        for config in (make_config(precision, **small), make_host_config(precision, **small)):
            assert_same_bits(train_in_engine(config), expected, precision)


def test_other_losses_than_these_are_refused():
    engine, optimizer = initialize_engine(build, 0, make_config())
    with engine:
        loss = torch.ones((), requires_grad=True)
        with pytest.raises(StateError, match="backward before forward"):
            engine.backward(loss)
        loss.register_hook(lambda grad: None)
        with pytest.raises(StateError, match="the loss gave no parameter a gradient; backward before forward"):
            engine.backward(loss)
        late = engine(INPUTS[0]).square().mean() * loss
        engine.backward(late, retain_graph=True)
        optimizer.step()
        with pytest.raises(StateError, match="backward before forward"):  # of parameters that have changed since
            engine.backward(late)
        engine.backward(cached_loss(engine, INPUTS[0]))
        optimizer.step()


def build_kept():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 64), nn.Tanh()).requires_grad_(False)
    with torch_scope():
        return nn.Sequential(body, nn.Linear(64, 4))


def test_parameters_that_stay_with_pytorch_alone():
    plain = build_kept()
    train(
        plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM), torch.Tensor.backward, 1
    )
    engine, optimizer = initialize_engine(build_kept, 0, make_config())
    with engine:
        train(engine, optimizer, engine.backward, 1)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-4, atol=1e-6)

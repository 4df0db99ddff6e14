import copy
import math

import pytest
import torch
from torch import nn

from patrickstar import torch_scope
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config

CLIPPING = 0.05
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    with torch_scope():
        last = nn.Linear(64, 4)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), last)


def opened():
    return initialize_engine(build, 0, make_config(gradient_clipping=CLIPPING))


def run_backward(engine):
    engine.backward(engine(INPUTS).square().mean())


def plain_gradients():
    plain = build()
    plain(INPUTS).square().mean().backward()
    gradients = [param.grad.clone() for param in plain.parameters()]
    nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING)
    return gradients, [param.grad for param in plain.parameters()]


WRITES = {
    "mul_": lambda grad: grad.mul_(2),
    "of a view": lambda grad: grad.view(-1)[:2].zero_(),
    "of data": lambda grad: grad.data.add_(1),
    "operator": lambda grad: grad.__imul__(2),
    "item": lambda grad: grad.__setitem__(0, 0.0),
    "out": lambda grad: torch.mul(grad, 2, out=grad),
    "foreach": lambda grad: torch._foreach_mul_([grad], 2),
}


def test_between_backward_and_step():
    engine, optimizer = opened()
    with engine:
        params = list(engine.module.parameters())
        assert all(param.grad is None for param in params)
        run_backward(engine)
        for param, expected in zip(params, plain_gradients()[0], strict=True):
            assert (param.grad.dtype, param.grad.device) == (param.dtype, param.device)
            torch.testing.assert_close(param.grad.as_subclass(torch.Tensor), expected)
            assert float(param.grad.data.norm()) == pytest.approx(float(expected.norm()), rel=1e-5)
            for product in (param * param.grad, param.grad * param):
                assert type(product) is torch.Tensor
                torch.testing.assert_close(product, param.detach() * expected)
        before = [param.grad.clone() for param in params[:4]]
        for name, write in WRITES.items():
            with pytest.raises(RuntimeError, match="cannot be changed in place. Clip by"):
                write(params[0].grad)
            print(name)
        with pytest.raises(RuntimeError, match="engine.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(params[:4], 1.0)
        with pytest.raises(RuntimeError, match="safe_set_full_grad"):
            params[0].grad = torch.zeros(64, 8)
        assert_same_bits([param.grad.clone() for param in params[:4]], before)
        assert type(copy.deepcopy(params[0].grad)) is torch.Tensor
        engine.module[0].zero_grad()
        assert params[0].grad is None
        optimizer.step()


def test_after_clipping():
    engine, optimizer = initialize_engine(build, 0, make_config())
    with engine:
        run_backward(engine)
        engine.clip_grad_norm_(CLIPPING)
        in_chunks = list(engine.module.parameters())[:4]
        for param, expected in zip(in_chunks, plain_gradients()[1], strict=False):
            torch.testing.assert_close(param.grad.as_subclass(torch.Tensor), expected)
        optimizer.step()
        run_backward(engine)
        assert math.hypot(*(param.grad.norm() for param in in_chunks)) > CLIPPING


def test_after_a_step():
    engine, optimizer = opened()
    with engine:
        params = list(engine.module.parameters())
        params[0].retain_grad()
        for forget in (optimizer.zero_grad, engine.module.zero_grad, lambda: engine(INPUTS)):
            expected = engine.state_dict()
            run_backward(engine)
            gradient, norm = params[0].grad.clone(), engine.grad_norm()
            optimizer.step()
            assert_same_bits(params[0].grad, gradient.mul_(CLIPPING / (norm + 1e-6)))
            assert params[4].grad is not None  # it stays with PyTorch
            with torch.no_grad():
                engine(INPUTS)
            with pytest.raises(RuntimeError, match=r"2.weight is in PatrickStar's chunks.*param.retain_grad\(\) once"):
                _ = params[2].grad
            params[2].grad = None
            engine.module[2].zero_grad()
            assert params[2].grad is params[3].grad is None
            assert params[0].grad is not None
            forget()
            assert all(param.grad is None for param in params)
            engine.load_state_dict(expected)
            optimizer.zero_grad()


def test_reads_change_no_number():
    states = []
    for reads in (False, True):
        engine, optimizer = opened()
        with engine:
            for _ in range(3):
                for _ in range(2):
                    run_backward(engine)
                    if reads:
                        assert all(param.grad is not None for param in engine.module.parameters())
                optimizer.step()
            states.append(engine.state_dict())
    assert_same_bits(*states)


def test_gradients_that_backward_uses_up():
    config = make_config()
    config["optimizer"]["speculation"] = "commit"
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        weight = engine.module[0].weight
        with pytest.raises(RuntimeError, match='optimizer.speculation is "commit"'):
            weight.retain_grad()
        run_backward(engine)
        for _ in range(2):
            with pytest.raises(RuntimeError, match='optimizer.speculation is "commit"'):
                _ = weight.grad
            optimizer.step()

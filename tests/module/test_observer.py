import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.models import Case
from tests.training import least_device_memory, make_config

WIDTH = 64
STEPS = 5
ROOM_BYTES = 112 * 1024  # beyond what the first step needs
LEARNED = 2  # calls after which the surprises begin


class Surprising(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.surprise(x) if self.calls > LEARNED else F.linear(x, self.weight, self.bias)


class SeveralNodes(Surprising):
    def surprise(self, x):
        return torch.relu(x @ self.weight) @ self.weight.t() + self.bias


class Ignored(Surprising):
    def surprise(self, x):
        return x * 2


class KeptView(Surprising):
    """A view is kept in an attribute; the model's head multiplies with it."""

    def surprise(self, x):
        self.kept = self.weight.t()
        return x + self.bias


class SeveralViews(Surprising):
    def surprise(self, x):
        half = x @ self.weight.split(WIDTH // 2)[0].t()
        return torch.cat([half, half], dim=-1) + self.weight.unbind()[3]


class Dictionary(Surprising):
    def surprise(self, x):
        return {"result": [F.linear(x, self.weight)], "bias": self.bias}


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.square()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.square().t(), 2 * weight * (x.flatten(0, -2).t() @ grad.flatten(0, -2))


class CustomFunction(Surprising):
    def surprise(self, x):
        return _Squared.apply(x, self.weight) + self.bias


class InPlace(Surprising):
    def surprise(self, x):
        return F.linear(x, self.weight, self.bias).mul_(2).relu_()


class Recomputed(Surprising):
    def surprise(self, x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: F.linear(y, self.weight, self.bias).tanh(), x, use_reentrant=False
        )


class OutOfSight(Surprising):
    """Switched off gradients hide one use; autocast casts the other."""

    def surprise(self, x):
        with torch.no_grad():
            scale = self.weight.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.linear(x, self.weight, self.bias)
        return hidden.float() * scale


SURPRISES = [SeveralNodes, Ignored, KeptView, SeveralViews, Dictionary, CustomFunction, InPlace, Recomputed, OutOfSight]


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(8))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
            if isinstance(hidden, dict):
                hidden = hidden["result"][0] + hidden["bias"]
            hidden = torch.tanh(hidden)
        for layer in self.layers[:2]:
            if hasattr(layer, "kept"):
                hidden = hidden @ layer.kept
        if self.layers[0].calls > LEARNED:
            hidden = F.linear(hidden, self.first.weight, self.layers[0].bias)  # tied, from now on
        return {"loss": self.last(hidden).square().mean()}


def batch(generator):
    return {"x": torch.randn(4, WIDTH, generator=generator)}


def watch_gradients(module, seen):
    for name, param in module.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append((name, grad.contiguous().numpy().tobytes())))


def still_config(**config):
    """Parameters stay as they are, so that every step has plain PyTorch's bits."""
    result = make_config(default_chunk_size=1024, **config)
    result["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    return result


def run_plain(build):
    torch.manual_seed(0)
    module, generator, losses, seen = build(), torch.Generator().manual_seed(1), [], []
    watch_gradients(module, seen)
    for _ in range(STEPS):
        module.zero_grad()
        loss = module(**batch(generator))["loss"]
        loss.backward()
        losses.append(loss.item())
    return losses, seen


def run_engine(build, config):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(build, 0, config)
    generator, losses, seen = torch.Generator().manual_seed(1), [], []
    with engine:
        watch_gradients(engine.module, seen)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = engine(**batch(generator))["loss"]
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            del loss
        return losses, seen, engine.report()


@pytest.mark.parametrize("layer", SURPRISES)
def test_a_late_surprise_is_served(layer):
    def build():
        return Model(layer)

    losses, gradients = run_plain(build)
    config = still_config()
    budget = least_device_memory(Case(build, batch), config) + ROOM_BYTES
    for limit in ({}, {"device_memory": budget}):
        engine_losses, engine_gradients, report = run_engine(build, {**config, **limit})
        assert engine_losses == losses
        assert sorted(engine_gradients) == sorted(gradients)
    print(f"{layer.__name__}: {report['num_evictions']} evictions within {budget} bytes")
    assert report["num_evictions"] > 0


@pytest.fixture
def engine():
    torch.manual_seed(0)
    engine, _ = initialize_engine(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0, still_config())
    with engine:
        yield engine


def test_users_hooks_are_the_only_ones_on_a_tensor(engine):
    outputs, seen = [], []
    engine.module[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = engine(torch.ones(2, 4)).sum()
    hidden = outputs[0]
    assert hidden._backward_hooks is None
    hidden.retain_grad()
    hidden.register_hook(lambda grad: seen.append("tensor"))
    hidden.grad_fn.register_prehook(lambda grads: seen.append("node"))
    hidden.register_hook(lambda grad: grad * 2).remove()
    engine.backward(loss)
    expected = engine.module[1].weight.sum(0).expand(2, 4)
    assert seen == ["tensor", "node"] and torch.equal(hidden.grad, expected)


def test_an_engine_may_go_before_its_graph(engine):
    loss = engine(torch.ones(2, 4)).sum()
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        loss.backward()


def test_hooks_of_a_copy_do_nothing(engine):
    for make in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        clone = make(engine.module)
        clone(torch.ones(2, 4)).sum().backward()
        assert clone[0].weight.grad is not None
    hook = _C.ModuleHook()
    hook.before_forward(None, ())
    hook.after_forward(None, (), None)
    assert hook.touched == []


def test_a_listener_in_python_hears_of_uses():
    class Listener(_C.UseListener):
        def __init__(self):
            super().__init__()
            self.calls = []

        def tick(self):
            self.calls.append("tick")
            return len(self.calls)

        def open_scope(self, params, until):
            self.calls.append(("open", params, until))
            return len(self.calls)

        def close_scope(self):
            self.calls.append("close")

        def enter_backward(self, begin, end, params):
            self.calls.append(("backward", begin, end, params))

    listener = Listener()
    uses = _C.UseObserver(listener, lambda value: [])
    hook = _C.ModuleHook(uses, [7, 5], _C.HoldUntil.SCOPE_END)
    x = torch.ones(1, requires_grad=True)
    hook.before_forward(None, ())
    y = x * 2
    hook.after_forward(None, (), y)
    y.backward()
    opened = ("open", [7, 5], _C.HoldUntil.SCOPE_END)
    assert listener.calls == [opened, "tick", "close", ("backward", 1, 2, [5, 7])]
    hook.before_forward(None, ())
    uses.forget_scopes()
    hook.after_forward(None, (), y)  # its call never began
    assert listener.calls[4:] == [opened]

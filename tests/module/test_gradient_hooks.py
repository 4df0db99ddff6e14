"""Hooks on nodes that accumulate gradients: a view of a parameter leads to them in one step, as in plain PyTorch."""

import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import make_config


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def hooked(module, run):
    """The names of hooks in the order of their calls."""
    called = []
    nodes = []  # the hooks live as long as these
    for name, param in module.named_parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: called.append(name))
        nodes.append(node)
    last = [module[1].weight, module[1].bias]
    torch.autograd.graph.register_multi_grad_hook(last, lambda grads: called.append(f"all {len(grads)}"))
    for _ in range(2):
        run(module)
    return called


def test_they_are_called_as_in_plain_pytorch():
    plain = hooked(make_model(), lambda model: model(torch.ones(2, 4)).sum().backward())
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32"))
    with engine:

        def step(model):
            engine.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()

        found = hooked(engine.module, step)
    assert found == plain
    assert found.count("all 2") == 2
    assert found.count("0.weight") == 2

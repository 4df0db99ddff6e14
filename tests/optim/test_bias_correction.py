"""Adam without the correction of its moments' bias, in chunks and for parameters that stay with PyTorch."""

from __future__ import annotations

import torch

from tests.models import MODELS
from tests.training import ADAM, Run, make_config, relative_error, train

STEPS = 4


def reference(name: str) -> Run:
    """PyTorch's corrected Adam in float64, with options that take the correction back.

    The corrected step is lr' / c1 * m / (sqrt(v / c2) + eps') with c1 = 1 - beta1^t and c2 = 1 - beta2^t; it is
    lr * m / (sqrt(v) + eps) for lr' = lr * c1 / sqrt(c2) and eps' = eps / sqrt(c2). Decoupled decay takes lr' * decay'.
    """
    case = MODELS["mlp"]
    torch.manual_seed(0)
    module = case.build().double()
    optimizer = getattr(torch.optim, name)(module.parameters(), **ADAM)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = case.loss(module(**case.batch(generator)))
        loss.backward()
        losses.append(loss.item())
        c1, c2 = (1 - beta**step for beta in ADAM["betas"])
        for group in optimizer.param_groups:
            group["lr"], group["eps"] = ADAM["lr"] * c1 / c2**0.5, ADAM["eps"] / c2**0.5
            if name == "AdamW":
                group["weight_decay"] = ADAM["weight_decay"] * ADAM["lr"] / group["lr"]
        optimizer.step()
    return Run(losses, {name: value.detach().clone() for name, value in module.state_dict().items()}, {})


def test_without_bias_correction():
    """The embedding stays with PyTorch, the rest is in chunks."""
    for name in ("AdamW", "Adam"):
        expected = reference(name)
        config = make_config(optimizer=name, use_cpu_embedding=True)
        config["optimizer"]["params"]["bias_correction"] = False
        error = relative_error(train(MODELS["mlp"], config, steps=STEPS), expected)
        print(f"{name}: relative error {error:.1e}")
        assert error <= 1e-6
    config["optimizer"]["params"]["bias_correction"] = True
    assert relative_error(train(MODELS["mlp"], config, steps=STEPS), expected) > 1e-3

"""Which optimizer updates the parameters that stay with PyTorch: PyTorch's own, or where moments are not corrected, one
with the same formulas but for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from patrickstar.config import OptimizerConfig, OptimizerType


def managed_optimizer(config: OptimizerConfig) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """What makes the optimizer that ``config`` asks for of parameter groups."""
    if not config.params.bias_correction:
        return functools.partial(UncorrectedAdam, kind=config.type)
    return torch.optim.AdamW if config.type is OptimizerType.ADAMW else torch.optim.Adam


class UncorrectedAdam(torch.optim.Optimizer):
    """Adam or AdamW (Kingma & Ba, 2015, algorithm 1; Loshchilov & Hutter, 2019, algorithm 2) with the moments m and v
    in place of m / (1 - beta1^t) and v / (1 - beta2^t). Its states are named as PyTorch's.
    """

    def __init__(self, groups: list[dict[str, Any]], kind: OptimizerType):
        super().__init__(groups, {})
        self._kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        if self._kind is OptimizerType.ADAMW:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])

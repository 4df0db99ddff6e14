"""Adam without bias correction, which PyTorch lacks: for parameters outside chunks, and for scripts that build their
own optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.optimizer.param_steps import ParamSteps


class _WithoutCorrection(ParamSteps):
    """Replaces ``step`` of a PyTorch optimizer that follows in the bases; the states are the same."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)
        self.defaults["bias_correction"] = False  # DeepSpeed's name
        for group in self.param_groups:
            group["bias_correction"] = False

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        if param.is_complex():  # pairs of real numbers, as in PyTorch's optimizers
            param, grad, momentum, variance = (
                torch.view_as_real(tensor) for tensor in (param, grad, momentum, variance)
            )
        if isinstance(self, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
            param.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad.add(param, alpha=group["weight_decay"])
        momentum.lerp_(grad, 1 - beta1)
        variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.addcdiv_(momentum, variance.sqrt().add_(group["eps"]), value=-group["lr"])


class UncorrectedAdam(_WithoutCorrection, torch.optim.Adam):
    """Adam (Kingma & Ba, 2015, algorithm 1) with momentum m and variance v instead of m / (1 - beta1^t) and v / (1 -
    beta2^t).
    """


class UncorrectedAdamW(_WithoutCorrection, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, 2019, algorithm 2) without bias correction."""

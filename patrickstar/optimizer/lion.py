"""Lion, which PyTorch lacks: for parameters outside chunks, and for scripts that build their own optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from patrickstar.optimizer.param_steps import ParamSteps


class Lion(ParamSteps):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), with gradient g and
    momentum m:

        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    In float32 it gives the bits of an engine of type ``"Lion"`` (csrc/optim/kernels.h, ``MomentumRule``).

    Args:
        params: parameters, or groups of them with their own options.
        lr: the learning rate; a third to a tenth of AdamW's is usual.
        betas: decay rates of the update direction and of the momentum.
        weight_decay: decoupled; three to ten times AdamW's is usual, since ``lr`` multiplies it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        if param.is_complex():  # pairs of real numbers, as in PyTorch's optimizers
            param, grad, momentum = (torch.view_as_real(tensor) for tensor in (param, grad, momentum))
        update = torch.lerp(momentum, grad, 1 - beta1).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)

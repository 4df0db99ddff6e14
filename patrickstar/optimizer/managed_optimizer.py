"""Selects the optimizer of parameters outside chunks: PyTorch's, or PatrickStar's if PyTorch lacks the formula. Each
counts a parameter's updates in ``step`` of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patrickstar.config import OptimizerConfig, OptimizerType
from patrickstar.optimizer.lion import Lion
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW


class CountedSGD(torch.optim.SGD):
    """``torch.optim.SGD`` with a step count, and with a momentum of zeros if the momentum factor is 0."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Updates the parameters that have a gradient."""
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._count(param, self.state[param])
        return loss

    @staticmethod
    def _count(param: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", torch.tensor(0.0, dtype=torch.float32, device="cpu")) + 1
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)


def managed_optimizer(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Returns the optimizer class for ``config``."""
    corrects = config.params.bias_correction
    return {
        OptimizerType.ADAM: torch.optim.Adam if corrects else UncorrectedAdam,
        OptimizerType.ADAMW: torch.optim.AdamW if corrects else UncorrectedAdamW,
        OptimizerType.LION: Lion,
        OptimizerType.SGD: CountedSGD,
    }[config.type]

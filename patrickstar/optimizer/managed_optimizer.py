"""Which optimizer updates the parameters that stay with PyTorch: PyTorch's own, or one of PatrickStar's where it has
none of the formula. Each counts a parameter's updates in its state's ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patrickstar.config import OptimizerConfig, OptimizerType
from patrickstar.optimizer.lion import Lion
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW


class CountedSGD(torch.optim.SGD):
    """``torch.optim.SGD``, which itself does not count; and a momentum, of zeros, also where its factor is 0."""

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
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)


def managed_optimizer(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class of optimizer that ``config`` asks for."""
    corrects = config.params.bias_correction
    return {
        OptimizerType.ADAM: torch.optim.Adam if corrects else UncorrectedAdam,
        OptimizerType.ADAMW: torch.optim.AdamW if corrects else UncorrectedAdamW,
        OptimizerType.LION: Lion,
        OptimizerType.SGD: CountedSGD,
    }[config.type]

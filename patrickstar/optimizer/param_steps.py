"""The step of optimizers that PyTorch lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ParamSteps(torch.optim.Optimizer):
    """Base of optimizers that update one parameter at a time: a subclass updates a parameter and its state in
    ``_update``, with the options of its group.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Updates the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

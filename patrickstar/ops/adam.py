"""``FusedAdam`` and ``DeepSpeedCPUAdam``: what a DeepSpeed script builds and gives to ``patrickstar.initialize``.

Both are PyTorch's Adam or AdamW with DeepSpeed's defaults, or without bias correction subclasses of these;
``initialize`` takes their groups over, and the engine updates on the GPU or the CPU wherever a chunk's states are.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW


class FusedAdam(torch.optim.Optimizer):
    """Makes a ``torch.optim.AdamW``, or an Adam with ``adam_w_mode=False``."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        """Raises ValueError where ``amsgrad`` is not at its default."""
        _check(amsgrad=amsgrad)
        if bias_correction:
            kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        else:
            kind = UncorrectedAdamW if adam_w_mode else UncorrectedAdam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """The same with the arguments of DeepSpeed's."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        """Raises ValueError where ``amsgrad`` or ``fp32_optimizer_states`` is not the default."""
        _check(amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)


def _check(**given: bool) -> None:
    expected = {"amsgrad": False, "fp32_optimizer_states": True}
    for name, value in given.items():
        if value != expected[name]:
            raise ValueError(f"{name}={value}: PatrickStar's Adam has {name}={expected[name]}; leave it out")

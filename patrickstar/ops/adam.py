"""``FusedAdam`` and ``DeepSpeedCPUAdam``, which a DeepSpeed script passes to ``patrickstar.initialize``.

Both are PyTorch's Adam or AdamW (or subclasses without bias correction) with DeepSpeed's defaults. ``initialize`` takes
over their groups; the engine updates each chunk where its states are, on the GPU or the CPU.
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
        """Raises ValueError if ``amsgrad`` is set."""
        _check(amsgrad=amsgrad)
        if bias_correction:
            kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        else:
            kind = UncorrectedAdamW if adam_w_mode else UncorrectedAdam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """:class:`FusedAdam` with the arguments of DeepSpeed's ``DeepSpeedCPUAdam``."""

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
        """Raises ValueError if ``amsgrad`` is set or ``fp32_optimizer_states`` is not."""
        _check(amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)


def _check(**given: bool) -> None:
    expected = {"amsgrad": False, "fp32_optimizer_states": True}
    for name, value in given.items():
        if value != expected[name]:
            raise ValueError(f"{name}={value}: PatrickStar's Adam has {name}={expected[name]}; leave it out")

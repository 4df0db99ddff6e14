"""``FusedAdam`` and ``DeepSpeedCPUAdam``: what a DeepSpeed script builds and gives to ``patrickstar.initialize``.

Both are PyTorch's Adam or AdamW with DeepSpeed's defaults; ``initialize`` takes their groups over, and the engine
updates on the GPU or the CPU wherever a chunk's states are.
"""

from __future__ import annotations

from typing import Any

import torch


def FusedAdam(  # noqa: N802
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``, or Adam with ``adam_w_mode=False``.

    Raises:
        ValueError: ``bias_correction`` or ``amsgrad`` is not at its default.
    """
    _check(bias_correction=bias_correction, amsgrad=amsgrad)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPUAdam(  # noqa: N802
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """The same with the arguments of DeepSpeed's.

    Raises:
        ValueError: ``bias_correction``, ``amsgrad`` or ``fp32_optimizer_states`` is not at its default.
    """
    _check(bias_correction=bias_correction, amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
    return FusedAdam(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam_w_mode=adamw_mode)


def _check(**given: bool) -> None:
    expected = {"bias_correction": True, "amsgrad": False, "fp32_optimizer_states": True}
    for name, value in given.items():
        if value != expected[name]:
            raise ValueError(f"{name}={value}: PatrickStar's Adam has {name}={expected[name]}; leave it out")

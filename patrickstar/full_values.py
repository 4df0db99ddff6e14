"""Whole values of one parameter of the open engine: float32 value, gradient, optimizer state; read and set.

Names are DeepSpeed's (``deepspeed.utils.safe_get_full_fp32_param`` and so on). With several ranks all call each, in the
same order, and set the same tensor. All work on whole tensors of the parameter's shape.
"""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.open_session import open_session

_STATES = ("exp_avg", "exp_avg_sq")


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The float32 value, a new CPU tensor."""
    return open_session().states.value(param).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the float32 value, and with it the compute value. Between two steps.

    Raises:
        ValueError: ``value`` has another shape.
    """
    _check_shape(param, value)
    open_session().states.set_value(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that the coming step will use: float32, on the CPU, the ranks' mean and the sum of micro-batches,
    without the loss scale, before clipping. None where there is none. Between the last backward and the step.

    Raises:
        StateError: there are no gradients.
    """
    session = open_session()
    session.grad_norm()
    return session.states.gradient(param, session.loss_scale)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets that gradient.

    Raises:
        StateError: the parameter has none.
        ValueError: ``value`` has another shape.
    """
    _check_shape(param, value)
    session = open_session()
    session.grad_norm()
    session.states.set_gradient(param, value, session.loss_scale)
    session.gradients.note_change()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """``exp_avg`` or ``exp_avg_sq``: float32, on the CPU, zeros before the first update.

    Raises:
        ValueError: there is no such state.
    """
    _check_state(optim_state_key)
    state = open_session().states.optimizer_state(param)
    return state[optim_state_key].float().cpu() if state else torch.zeros(param.shape)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets it, between two steps; the count of updates stays.

    Raises:
        ValueError: there is no such state, or ``value`` has another shape.
    """
    _check_state(optim_state_key)
    _check_shape(param, value)
    states = open_session().states
    state = states.optimizer_state(param) or {"step": torch.tensor(0.0)}
    zeros = {key: torch.zeros(param.shape) for key in _STATES if key not in state}
    states.set_optimizer_state(param, {**zeros, **state, optim_state_key: value})


def _check_state(key: str) -> None:
    if key not in _STATES:
        raise ValueError(f"optim_state_key is {key!r}; Adam has {' and '.join(_STATES)}")


def _check_shape(param: nn.Parameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(param.shape):
        raise ValueError(
            f"the value has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}; they must agree"
        )

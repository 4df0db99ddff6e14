"""Reads and sets whole values of one parameter of an open engine: float32 value, gradient, optimizer state.

Names are DeepSpeed's (``deepspeed.utils.safe_get_full_fp32_param`` and so on). With several ranks all must make the
same calls in the same order, and set the same tensor. Tensors are whole, of the parameter's shape. Results are float32
(complex64 for a complex parameter) and on the CPU. They are None for a parameter that the optimizer does not have
(frozen, or in no group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from patrickstar.module.managed import wide_dtype
from patrickstar.session.registry import session_of
from patrickstar.session.session import Session


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The value that the optimizer updates, whole and in float32."""
    states = session_of(param).states
    return states.value(param).to(wide_dtype(param)) if states.is_trained(param) else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the float32 value, and with it the compute value. Not within a forward or a backward.

    Raises:
        ValueError: ``value`` has another shape.
    """
    _check_shape(param, value)
    session_of(param).states.set_value(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that the coming step will use: the ranks' mean (or sum, by ``gradient_allreduce_op``) and the sum of
    micro-batches, without the loss scale, before clipping. None if there is none. Call it between the last backward and
    the step.

    Raises:
        StateError: there are no gradients.
    """
    session = session_of(param)
    session.grad_norm()
    return session.states.gradient(param, session.gradients.scale) if session.states.is_trained(param) else None


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the gradient of :func:`safe_get_full_grad`.

    Raises:
        StateError: the parameter has none.
        ValueError: ``value`` has another shape.
    """
    _check_shape(param, value)
    session = session_of(param)
    session.grad_norm()
    session.states.set_gradient(param, value, session.gradients.scale)
    session.gradients.note_change()


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Sets the gradients of those of ``param_list`` that have one to ``update_func(gradient, param)``.

    Raises:
        StateError: there are no gradients.
        ValueError: ``update_func`` returned a tensor of another shape.
    """
    params = list(param_list)
    sessions = {param: session_of(param) for param in params}
    for session in dict.fromkeys(sessions.values()):
        session.grad_norm()
    for param, session in sessions.items():
        gradient = session.states.gradient(param, session.gradients.scale) if session.states.is_trained(param) else None
        if gradient is not None:
            value = update_func(gradient, param)
            _check_shape(param, value)
            session.states.set_gradient(param, value, session.gradients.scale)
    for session in dict.fromkeys(sessions.values()):
        session.gradients.note_change()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """``exp_avg`` or ``exp_avg_sq`` (for SGD ``momentum_buffer``); zeros before the first update.

    Raises:
        ValueError: there is no such state.
    """
    session = session_of(param)
    check_state(session, optim_state_key)
    states = session.states
    return states.moment(param, optim_state_key) if states.is_trained(param) else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets an optimizer state, between two steps; the step count is unchanged.

    Raises:
        ValueError: there is no such state, the optimizer does not have the parameter, or ``value`` has another shape.
    """
    session = session_of(param)
    check_state(session, optim_state_key)
    _check_shape(param, value)
    states = session.states
    if not states.is_trained(param):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is frozen or in no group: it has no {optim_state_key}"
        )
    states.set_moment(param, optim_state_key, value)


def check_state(session: Session, key: str) -> None:
    """Raises ValueError if the session's optimizer has no state of that name."""
    if key not in session.states.arrays:
        kind, names = session.config.optimizer.type.value, " and ".join(session.states.arrays)
        raise ValueError(f"optim_state_key is {key!r}; {kind} has {names}")


def _check_shape(param: nn.Parameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(param.shape):
        raise ValueError(
            f"the value has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}; they must agree"
        )

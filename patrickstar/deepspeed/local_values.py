"""Reads and sets this rank's part of one parameter of an open engine: float32 value, gradient, optimizer state.

Names are DeepSpeed's (``deepspeed.utils.safe_get_local_fp32_param`` and so on). A rank's part is a range of the
parameter's elements, in memory order, which may be empty; together the ranks' parts are the parameter. With several
ranks all must make the same calls in the same order, each with its own part. Parts are flat, float32 and on the CPU.
They are None for a parameter that the optimizer does not have (frozen, or in no group). For a parameter that stays with
PyTorch every rank has the whole.
"""

from __future__ import annotations

import torch
from torch import nn

from patrickstar import _C
from patrickstar.deepspeed.full_values import (
    check_state,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.session.registry import session_of
from patrickstar.session.session import Session


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the value that the optimizer updates, in float32."""
    if not isinstance(param, ChunkedParameter):
        return _flat(safe_get_full_fp32_param(param))
    return _read(session_of(param), param, _C.ArrayKind.MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's float32 values, and with them the compute values. Not within a forward or a backward.

    Raises:
        ValueError: ``value`` has another number of elements.
    """
    if isinstance(param, ChunkedParameter):
        _write(session_of(param), param, _C.ArrayKind.MASTER, value)
    else:
        safe_set_full_fp32_param(param, value.view(param.shape))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of :func:`patrickstar.deepspeed.full_values.safe_get_full_grad`."""
    gradient = safe_get_full_grad(param)
    if gradient is None or not isinstance(param, ChunkedParameter):
        return _flat(gradient)
    begin, numel, _ = session_of(param).layout.shard_of(param._patrickstar.id)
    return gradient.as_strided((numel,), (1,), param._patrickstar.whole_begin + begin).clone()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient.

    Raises:
        StateError: the parameter has none.
        ValueError: ``value`` has another number of elements.
    """
    if not isinstance(param, ChunkedParameter):
        safe_set_full_grad(param, value.view(param.shape))
        return
    handle = param._patrickstar
    begin, numel, _ = session_of(param).layout.shard_of(handle.id)
    _check_numel(param, value, numel)
    with _C.HostAllocations():
        whole = torch.zeros(handle.whole_shape.numel(), dtype=torch.float32, device="cpu").as_strided(
            handle.whole_shape, handle.stride
        )
        whole.as_strided((numel,), (1,), handle.whole_begin + begin).copy_(value.detach().view(-1))
    safe_set_full_grad(param, whole)  # each rank takes its own part


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """``exp_avg`` or ``exp_avg_sq`` (for SGD ``momentum_buffer``); zeros before the first update.

    Raises:
        ValueError: there is no such state.
    """
    session = session_of(param)
    check_state(session, optim_state_key)
    if not isinstance(param, ChunkedParameter):
        return _flat(safe_get_full_optimizer_state(param, optim_state_key))
    return _read(session, param, session.states.arrays[optim_state_key])


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a state, between two steps; the step count is unchanged.

    Raises:
        ValueError: there is no such state, the optimizer does not have the parameter, or ``value`` has another number
            of elements.
    """
    session = session_of(param)
    check_state(session, optim_state_key)
    if isinstance(param, ChunkedParameter):
        _write(session, param, session.states.arrays[optim_state_key], value)
    else:
        safe_set_full_optimizer_state(param, value.view(param.shape), optim_state_key)


def _read(session: Session, param: ChunkedParameter, kind: _C.ArrayKind) -> torch.Tensor | None:
    handle = param._patrickstar
    if not handle.trainable:
        return None
    with _C.HostAllocations():
        values = torch.empty(session.layout.shard_of(handle.id)[1], dtype=torch.float32, device="cpu")
    session.runtime.read_own_values(handle.id, kind, values.data_ptr())
    return values


def _write(session: Session, param: ChunkedParameter, kind: _C.ArrayKind, value: torch.Tensor) -> None:
    handle = param._patrickstar
    if not handle.trainable:
        raise ValueError(f"{handle.name} is frozen or in no group: the optimizer does not have it")
    begin, numel, _ = session.layout.shard_of(handle.id)
    _check_numel(param, value, numel)
    with _C.HostAllocations():
        values = value.detach().to("cpu", torch.float32).contiguous()
    # The core takes the whole parameter's address and reads this rank's part of it, which may be empty.
    address = values.data_ptr() - begin * values.itemsize if numel > 0 else 0
    session.runtime.write_values(handle.id, kind, address, _C.Tier.HOST)


def _check_numel(param: ChunkedParameter, value: torch.Tensor, numel: int) -> None:
    if value.numel() != numel:
        raise ValueError(
            f"the value has {value.numel()} elements, this rank's part of {param._patrickstar.name} {numel}; they must "
            "agree"
        )


def _flat(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.reshape(-1)

"""Access to a parameter's float32 value, gradient and optimizer state.

Tensors are whole, for any device budget and number of ranks, also if each rank has a part of the parameter. With
several ranks all must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.managed import ManagedParams, wide_dtype
from patrickstar.module.observer import Observer
from patrickstar.module.param_handle import ParamHandle

_STATE_ARRAYS = {
    "exp_avg": _C.ArrayKind.MOMENTUM,
    "exp_avg_sq": _C.ArrayKind.VARIANCE,
    "momentum_buffer": _C.ArrayKind.MOMENTUM,
}
"""By the names that PyTorch's optimizers use."""


class ParamStates:
    """Reads and writes the states of one engine's parameters."""

    def __init__(
        self,
        runtime: _C.Runtime,
        observer: Observer,
        managed: ManagedParams,
        guard: Callable[[str], contextlib.AbstractContextManager[None]],
        chunk_factor: float,
        names: Sequence[str],
    ):
        """``chunk_factor`` multiplies gradients in chunks (``StepGradients.chunk_factor``). ``names`` are the
        optimizer's states (``UpdateRule.states``).
        """
        self.arrays = {name: _STATE_ARRAYS[name] for name in names}
        """Maps PyTorch's state names to arrays of a chunk."""
        self._runtime = runtime
        self._observer = observer
        self._managed = managed
        self._guard = guard
        self._chunk_factor = chunk_factor

    def value(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's value as a new CPU tensor: float32 for a chunked parameter, else the parameter's dtype."""
        if isinstance(param, ChunkedParameter):
            with self._guard("reading a parameter"):
                return self._read(param._patrickstar, _C.ArrayKind.MASTER)
        return param.detach().cpu().clone()

    def user_value(self, param: nn.Parameter) -> torch.Tensor:
        """:meth:`value` in the dtype of the user's module."""
        value = self.value(param)
        if not isinstance(param, ChunkedParameter):
            return value
        handle = param._patrickstar
        if handle.original_dtype.itemsize < value.itemsize:
            handle.uses.note_read([handle.id])
        with _C.HostAllocations(), torch.no_grad():
            return value.to(handle.original_dtype)

    def set_value(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Sets the value from a tensor of the same shape, of any float dtype and device."""
        if isinstance(param, ChunkedParameter):
            self._write(param._patrickstar, _C.ArrayKind.MASTER, value)
        else:
            with torch.no_grad():
                param.copy_(value)

    def gradient(self, param: nn.Parameter, loss_scale: float) -> torch.Tensor | None:
        """The whole of :meth:`own_gradient`."""
        own = self.own_gradient(param, loss_scale)
        return param._patrickstar.whole(own) if own is not None and isinstance(param, ChunkedParameter) else own

    def own_gradient(self, param: nn.Parameter, loss_scale: float) -> torch.Tensor | None:
        """The gradient that the step will use, before clipping, on the CPU; None if there is none. It has the present
        shape of the parameter, of which this rank may have a part.

        Its dtype is float32; for a parameter that stays with PyTorch, :func:`patrickstar.module.managed.wide_dtype`.
        Call it once the norm of all gradients is known (:class:`patrickstar.session.step_gradients.StepGradients`).
        """
        if not isinstance(param, ChunkedParameter):
            return None if param.grad is None else param.grad.detach().to("cpu", wide_dtype(param)) / loss_scale
        handle = param._patrickstar
        if not handle.trainable or not self._observer.has_gradient(handle):
            return None
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32, device="cpu")
            with self._guard("reading a gradient"):
                self._runtime.read_gradient(handle.id, values.data_ptr())
            return values.div_(loss_scale / self._chunk_factor)

    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor, loss_scale: float) -> None:
        """Sets the gradient from a tensor of the parameter's shape, equal on all ranks.

        Raises:
            StateError: the parameter has no gradient.
        """
        if not isinstance(param, ChunkedParameter):
            param.grad = gradient.detach().to(param.device, param.dtype) * loss_scale
            return
        handle = param._patrickstar
        if not handle.trainable or not self._observer.has_gradient(handle):
            raise _C.StateError(f"{handle.name} has no gradient that could be set; call backward first")
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32, device="cpu")
            values.copy_(handle.own(gradient.detach())).mul_(loss_scale / self._chunk_factor)
        self._runtime.write_gradient(handle.id, values.data_ptr(), _C.Tier.HOST)

    def is_trained(self, param: nn.Parameter) -> bool:
        """Tests whether the optimizer updates the parameter."""
        if isinstance(param, ChunkedParameter):
            return param._patrickstar.trainable
        return self._managed.is_trained(param)

    def moment(self, param: nn.Parameter, key: str) -> torch.Tensor:
        """One optimizer state of a trained parameter, by a name in :attr:`arrays`: on the CPU, in :meth:`gradient`'s
        dtype. Zeros if it was never updated or set.
        """
        if isinstance(param, ChunkedParameter):
            with self._guard("reading an optimizer state"):
                return self._read(param._patrickstar, self.arrays[key])
        values = self._managed.state_of(param).get(key)
        if values is None:
            return torch.zeros(param.shape, dtype=wide_dtype(param), device="cpu")
        return values.detach().to("cpu", wide_dtype(param), copy=True)

    def set_moment(self, param: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Sets one optimizer state; the step count is unchanged."""
        if isinstance(param, ChunkedParameter):
            self._write(param._patrickstar, self.arrays[key], value)
            return
        none = {
            "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
            **{name: torch.zeros_like(param) for name in self.arrays},
        }
        self._managed.set_state_of(param, {**none, **self._managed.state_of(param), key: value.detach()})

    def has_optimizer_state(self, param: nn.Parameter) -> bool:
        """Tests whether the optimizer has updated the parameter."""
        if not isinstance(param, ChunkedParameter):
            return bool(self._managed.state_of(param))
        handle = param._patrickstar
        return handle.trainable and self._runtime.step_count(handle.id) > 0

    def optimizer_state(self, param: nn.Parameter) -> dict[str, Any]:
        """``step`` and the optimizer states of a parameter; empty before its first update."""
        if not isinstance(param, ChunkedParameter):
            return self._managed.state_of(param)
        if not self.has_optimizer_state(param):
            return {}
        handle = param._patrickstar
        with self._guard("reading an optimizer state"):
            return {
                "step": torch.tensor(float(self._runtime.step_count(handle.id)), dtype=torch.float32, device="cpu"),
                **{key: self._read(handle, kind) for key, kind in self.arrays.items()},
            }

    def set_optimizer_state(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """Sets the result of :meth:`optimizer_state`; an empty state means never updated."""
        if not isinstance(param, ChunkedParameter):
            self._managed.set_state_of(param, state)
            return
        handle = param._patrickstar
        if not handle.trainable:
            return
        zeros = torch.zeros(handle.whole_shape, dtype=torch.float32, device="cpu")
        self._runtime.set_step_count(handle.id, int(state.get("step", 0)))
        for key, kind in self.arrays.items():
            self._write(handle, kind, state.get(key, zeros))

    def _read(self, handle: ParamHandle, kind: _C.ArrayKind) -> torch.Tensor:
        return handle.whole(self._observer.read_values(handle, kind))

    def _write(self, handle: ParamHandle, kind: _C.ArrayKind, whole: torch.Tensor) -> None:
        self._observer.write_values(handle, kind, handle.own(whole))

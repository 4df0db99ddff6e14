"""Parameters that stay with PyTorch: casts, gradients, and the torch optimizer that updates them.

They keep the user's dtype (usually float32) beside 16-bit chunks. Modules that own them therefore get casts around
their forward; embeddings in host memory also get their indices on the host and return their result to the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from patrickstar.config import ALL_OPTIONS
from patrickstar.module.preprocess import ManagedParam, is_converted


class ManagedParams:
    """The parameters of one engine that stay with PyTorch."""

    def __init__(
        self, module: nn.Module, params: Sequence[ManagedParam], compute_dtype: torch.dtype, device: torch.device
    ):
        self.params = list(params)
        self._kept: list[torch.Tensor | None] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
        self._handles: list[RemovableHandle] = []
        owned = {managed.param for managed in self.params}
        for child in module.modules():
            params = [p for p in child._parameters.values() if p is not None and p in owned]
            mine = [p for p in params if is_converted(p.dtype, compute_dtype)]
            if mine and (mine[0].dtype != compute_dtype or mine[0].device != device):
                self._add_casts(child, mine[0], compute_dtype, device)

    def _add_casts(
        self, module: nn.Module, param: nn.Parameter, compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        def to_param(value: torch.Tensor) -> torch.Tensor:
            return value.to(param.device, param.dtype) if value.is_floating_point() else value.to(param.device)

        def to_compute(value: torch.Tensor) -> torch.Tensor:
            return value.to(device, compute_dtype) if value.is_floating_point() else value.to(device)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(torch.Tensor, to_param, (args, kwargs))

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            return tree_map_only(torch.Tensor, to_compute, output)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def make_optimizer(self, groups: list[dict[str, Any]], cls: type[torch.optim.Optimizer]) -> None:
        """Makes an optimizer of ``cls`` over these parameters, with the groups' options."""
        self._optimizer_class = cls
        mine = self._own_part(groups)
        if any(group["params"] for group in mine):
            self._optimizer = cls([_torch_options(group) for group in mine])

    def _own_part(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        owned = {managed.param for managed in self.params}
        return [{**group, "params": [p for p in group["params"] if p in owned]} for group in groups]

    def _follow_groups(self, groups: list[dict[str, Any]]) -> None:
        """Adds parameter groups that were added to the engine's optimizer."""
        if self._optimizer is None:
            self.make_optimizer(groups, self._optimizer_class)
            return
        for group in self._own_part(groups[len(self._optimizer.param_groups) :]):
            self._optimizer.add_param_group(_torch_options(group))

    def train(self, params: Collection[nn.Parameter]) -> None:
        """Marks ``params`` as trained by the optimizer."""
        self.params = [
            dataclasses.replace(managed, trained=True) if managed.param in params else managed
            for managed in self.params
        ]

    @property
    def shared(self) -> list[nn.Parameter]:
        """Trained parameters whose gradients are averaged over ranks."""
        return [managed.param for managed in self.params if managed.all_reduced and managed.trained]

    def is_trained(self, param: nn.Parameter) -> bool:
        """Tests whether ``param`` is trained by this optimizer."""
        return any(managed.param is param and managed.trained for managed in self.params)

    @property
    def has_gradients(self) -> bool:
        """True if a trained parameter has a gradient."""
        return any(managed.trained and managed.param.grad is not None for managed in self.params)

    def sum_of_squares(self) -> float:
        """Sum of squares of the trained parameters' gradients: float64, in parameter order. Sparse gradients become
        dense.
        """
        total = 0.0
        for managed in self.params:
            if managed.trained and managed.param.grad is not None:
                grad = managed.param.grad
                if grad.is_sparse:
                    grad = managed.param.grad = grad.to_dense()
                total += float(real_parts(grad).double().square().sum())
        return total

    def step(self, groups: list[dict[str, Any]], grad_scale: float) -> None:
        """Multiplies gradients by ``grad_scale``, then runs one optimizer step with ``groups``' current options."""
        self._follow_groups(groups)
        if self._optimizer is None:
            return
        for own, group in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({key: value for key, value in _torch_options(group).items() if key != "params"})
        if grad_scale != 1.0:
            for managed in self.params:
                if managed.param.grad is not None:
                    managed.param.grad.mul_(grad_scale)
        self._optimizer.step()

    def keep_gradients(self) -> None:
        """Copies the gradients before a backward, for :meth:`restore_gradients`."""
        self._kept = [None if managed.param.grad is None else managed.param.grad.clone() for managed in self.params]

    def restore_gradients(self) -> None:
        """Restores the gradients of before the backward that failed."""
        for managed, kept in zip(self.params, self._kept, strict=True):
            managed.param.grad = kept

    def zero_grad(self) -> None:
        """Sets the gradients of these parameters to None."""
        for managed in self.params:
            managed.param.grad = None

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """The optimizer state of ``param``; empty before its first step."""
        return dict(self._optimizer.state.get(param, {})) if self._optimizer is not None else {}

    def set_state_of(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """Sets the optimizer state of ``param``."""
        if self._optimizer is not None:
            self._optimizer.state[param] = {
                key: value.clone().to(param.device if key != "step" else "cpu")
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state.items()
            }

    def remove(self) -> None:
        """Removes the cast hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def wide_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's accumulated gradients and reported states: float32 for parameters of up to 32 bits,
    else the parameter's own. Complex parameters get a complex dtype.
    """
    return torch.promote_types(param.dtype, torch.float32)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A real view of the same memory. A complex tensor gets a last dimension of 2, as in PyTorch's optimizers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _torch_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("params", *ALL_OPTIONS) if key in group}

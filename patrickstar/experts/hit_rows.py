"""Weights of the experts that few tokens chose, copied from the host instead of all experts' weights.

    hit_rows = HitRows(runtime, module)   # fused experts (module/fused_experts.py) ask it
    hooks = ModuleHooks(module, observer, hit_rows.conditional_hook)
    hit_rows.close()

A forward without gradients whose tokens choose few experts, as in generation, needs few rows of parameters that have
one row per expert. If they lie on the host alone, these rows are copied; other forwards acquire whole parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patrickstar import _C
from patrickstar.experts.exchanged import expert_params
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.fused_experts import HIT_ROWS, is_fused, up_name
from patrickstar.module.hooks import BeforeForward


class HitRows:
    """See the module's docstring."""

    def __init__(self, runtime: _C.Runtime, module: nn.Module):
        self._runtime = runtime
        self._experts = [child for child in module.modules() if is_fused(child) and _has_rows(child)]
        for child in self._experts:
            vars(child)[HIT_ROWS] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """None: copies and pickles of experts have whole parameters."""
        return type(None), ()

    def close(self) -> None:
        """Experts use whole parameters again."""
        for child in self._experts:
            vars(child).pop(HIT_ROWS, None)
        self._experts = []

    def conditional_hook(self, module: nn.Module, before_forward: BeforeForward) -> BeforeForward:
        """``before_forward``, skipped in calls of experts that copy rows."""
        if vars(module).get(HIT_ROWS) is not self:
            return before_forward

        def before(experts: nn.Module, inputs: tuple[Any, ...]) -> None:
            if len(inputs) < 2 or not self.copies_rows(experts, inputs[1]):
                before_forward(experts, inputs)

        return before

    def copies_rows(self, experts: nn.Module, chosen: Tensor) -> bool:
        """True if this call of ``experts`` copies rows: ``chosen`` names fewer experts than there are, and the host
        alone has weights of them.
        """
        return (
            not torch.compiler.is_compiling()
            and chosen.numel() < experts.num_experts
            and not torch.is_grad_enabled()
            and any(self._on_host(experts._parameters[name]) for name in (up_name(experts), "down_proj"))
        )

    def compact(self, experts: nn.Module, chosen: Tensor) -> tuple[Tensor, nn.Module]:
        """A module with the weights of the chosen experts alone.

        Args:
            experts: whose :meth:`copies_rows` is true for ``chosen``.
            chosen: indices of experts; those of ``num_experts`` or more belong to other ranks.

        Returns:
            the indices of ``chosen`` among them, and a module to compute with.
        """
        found, index = torch.unique(chosen, return_inverse=True)
        rows = [row for row in found.tolist() if row < experts.num_experts]
        compacted = object.__new__(type(experts))
        weights = {name: self._rows(param, rows, chosen.device) for name, param in expert_params(experts).items()}
        vars(compacted).update(
            {**vars(experts), "_parameters": {**experts._parameters, **weights}, "num_experts": len(rows)}
        )
        return index, compacted

    def _rows(self, param: nn.Parameter, rows: list[int], device: torch.device) -> Tensor:
        if not self._on_host(param):  # it may share its chunk with parameters that were used
            return param[rows]
        handle = param._patrickstar
        with torch._C.DisableTorchFunctionSubclass():
            values = torch.empty((len(rows), *handle.shape[1:]), dtype=handle.dtype, device=device)
        self._runtime.copy_rows(handle.id, rows, handle.stride[0], values.data_ptr())
        return values

    def _on_host(self, param: nn.Parameter) -> bool:
        return self._runtime.rows_are_on_host(param._patrickstar.id)


def _has_rows(experts: nn.Module) -> bool:
    """True if both projections are held by the module itself, in chunks, one expert after the other."""
    held = expert_params(experts)
    return {up_name(experts), "down_proj"} <= held.keys() and all(map(_is_dense, held.values()))


def _is_dense(param: nn.Parameter) -> bool:
    if not isinstance(param, ChunkedParameter):
        return False
    return param._patrickstar.stride == torch.empty(param.shape, device="meta").stride()

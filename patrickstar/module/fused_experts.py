"""Fused gathers, gates and weighted sums between the grouped products of transformers' experts.

    fused = fuse_experts(model)   # before it goes into an engine, or any other training
    fused.restore()

transformers' ``grouped_mm`` sorts tokens by expert and multiplies each group. Between the products it gathers, scales,
restores the order and adds up in separate passes, which take two thirds of the time. The same products are computed
here with one pass each for gathering, gating and the weighted sum. On a GPU the forward of SwiGLU without biases has
the bits of ``grouped_mm``. Biases are added within these passes, and gpt-oss's gate is computed, in float32. Gradients
of tokens, routing weights and biases are summed in float32, those of ``grouped_mm`` in the model's dtype.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.module import expert_rows, fp8_experts
from patrickstar.module.clamped_gate import clamped_gate
from patrickstar.module.expert_rows import Routing
from patrickstar.module.gated_sum import gated_sum

IMPLEMENTATION = "patrickstar"
"""Value of ``_experts_implementation`` in the configuration of fused experts."""
HIT_ROWS = "_patrickstar_hit_rows"
"""Attribute of experts whose weights may come from the host by rows (``patrickstar/experts/hit_rows.py``)."""
_NEEDED = ("ALL_EXPERTS_FUNCTIONS", "_grouped_linear", "_default_apply_gate", "grouped_mm_experts_forward")
"""Names of ``transformers.integrations.moe``."""


class ChosenImplementations:
    """Experts that compute by a function of transformers' registry which their model's configuration does not name."""

    def __init__(self, name: str, function: Callable[..., torch.Tensor]):
        """``name``: value of ``_experts_implementation`` for ``function``."""
        self._name, self._function = name, function
        self._changed: list[tuple[nn.Module, Any]] = []  # experts and their model's configuration

    @staticmethod
    def registry() -> Any:
        """``transformers.integrations.moe``; None: not imported, or another version."""
        moe = sys.modules.get("transformers.integrations.moe")
        return moe if all(hasattr(moe, name) for name in _NEEDED) else None

    def choose(self, experts: nn.Module) -> None:
        """Changes one module, which :func:`is_experts` accepts. The configuration itself, which other modules share, is
        unchanged: ``config._model_config``.
        """
        self.registry().ALL_EXPERTS_FUNCTIONS.register(self._name, self._function)
        config = experts.config
        self._changed.append((experts, config))
        experts.config = copy.copy(config)
        experts.config._experts_implementation_internal = self._name
        experts.config._model_config = config

    def restore(self) -> None:
        """Undoes all changes."""
        while self._changed:
            module, module.config = self._changed.pop()


def fuse_experts(model: nn.Module) -> FusedExperts:
    """Fuses all experts of ``model`` that transformers would compute with ``grouped_mm``.

    Returns:
        an object that undoes the change.
    """
    return FusedExperts(model)


class FusedExperts:
    """See :func:`fuse_experts`. ``names``: the modules that changed."""

    def __init__(self, model: nn.Module):
        self._chosen = ChosenImplementations(IMPLEMENTATION, experts_forward)
        self.names: list[str] = []
        for name, module in model.named_modules() if self._chosen.registry() else ():
            implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if implementation == "grouped_mm" and is_experts(module):
                self.names.append(name)
                self._chosen.choose(module)

    def restore(self) -> None:
        """Undoes the change."""
        self._chosen.restore()


def is_fused(module: nn.Module) -> bool:
    """True for experts that :func:`fuse_experts` has changed."""
    return getattr(getattr(module, "config", None), "_experts_implementation_internal", None) == IMPLEMENTATION


def is_experts(module: nn.Module) -> bool:
    """True for a module whose forward takes its implementation from transformers' registry."""
    names = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj", "_apply_gate")
    return all(hasattr(module, name) for name in names)


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implementation for transformers' registry of experts; arguments and result as of ``grouped_mm``."""
    from transformers.integrations import moe

    chosen = self.config._model_config._experts_implementation
    if chosen == "batched_mm" and top_k_index.numel() >= self.num_experts and not torch.is_grad_enabled():
        chosen = "grouped_mm"  # generate() chose the other, which would copy an expert's weights for each row
    in_8_bits = fp8_experts.multiplies_in_8_bits(self, hidden_states, top_k_index.numel(), self.num_experts)
    hit_rows = vars(self).get(HIT_ROWS)
    if hit_rows is not None and hit_rows.copies_rows(self, top_k_index):
        top_k_index, self = hit_rows.compact(self, top_k_index)
    if chosen != "grouped_mm":  # by set_experts_implementation() since
        own = type(self).forward.__wrapped__
        forward = moe.ALL_EXPERTS_FUNCTIONS.get_interface(chosen, own)
        return forward(self, hidden_states, top_k_index, top_k_weights)
    up = getattr(self, up_name(self))
    if hidden_states.dtype != up.dtype or top_k_weights.dtype not in (up.dtype, torch.float32):  # autocast
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    routing = Routing.of(top_k_index, self.num_experts)
    if in_8_bits:
        return fp8_experts.mixture(hidden_states, top_k_weights, up, self.down_proj, routing, self.fp8_recipe)
    rows = expert_rows.dispatch(hidden_states, routing.order, routing.positions)
    if is_plain_swiglu(self):
        rows = _product(self, rows, up_name(self), routing.offsets)
        return gated_sum(rows, self.down_proj, top_k_weights, routing, transposed=self.is_transposed)
    if not self.has_bias or _has_norm(self):
        rows = products(self, rows, routing.experts, routing.offsets)
        return expert_rows.combine(rows, top_k_weights, routing)
    rows = _product(self, _gated(self, rows, routing.experts, routing.offsets), "down_proj", routing.offsets)
    return expert_rows.combine(rows, top_k_weights, routing, bias=self.down_proj_bias.to(rows.dtype))


def up_name(module: nn.Module) -> str:
    """Name of the parameter of the first grouped product."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def products(module: nn.Module, rows: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of tokens through their experts.

    Args:
        module: with the parameters of ``len(offsets)`` experts.
        rows: ``[rows, hidden size]``, by expert.
        experts: by row: its expert; read for biases alone. Rows of other ranks' experts take the last bias.
        offsets: int32, by expert: end of its rows.
    """
    rows = _product(module, _gated(module, rows, experts, offsets), "down_proj", offsets, experts)
    return module.post_expert_norm(rows) if _has_norm(module) else rows


def _gated(module: nn.Module, rows: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of tokens through the first product and the activation of their experts; arguments of :func:`products`."""
    name = up_name(module)
    if is_clamped(module):
        rows, bias = _product(module, rows, name, offsets), getattr(module, f"{name}_bias")
        return clamped_gate(rows, bias.to(rows.dtype), experts, offsets, module.alpha, module.limit)
    rows = _product(module, rows, name, offsets, experts)
    if not module.has_gate:
        return module.act_fn(rows)
    return expert_rows.gate(rows) if is_swiglu(module) else module._apply_gate(rows)


def _product(
    module: nn.Module, rows: torch.Tensor, name: str, offsets: torch.Tensor, experts: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows times the weight ``name`` of their experts, with the bias if ``experts`` are given."""
    from transformers.integrations import moe

    bias = None
    if module.has_bias and experts is not None:
        bias = expert_rows.by_row(getattr(module, f"{name}_bias"), experts, offsets)
    weight = getattr(module, name)
    return moe._grouped_linear(rows, weight, offs=offsets, bias=bias, is_transposed=module.is_transposed)


def _has_norm(module: nn.Module) -> bool:
    return getattr(module, "has_post_expert_norm", False)


def is_swiglu(module: nn.Module) -> bool:
    """True for fused experts that compute SwiGLU of a gate and an up projection side by side."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    is_default = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
    return module.has_gate and is_default and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))


def is_plain_swiglu(module: nn.Module) -> bool:
    """True for fused experts that compute SwiGLU and nothing else between and after their products."""
    return is_swiglu(module) and not module.has_bias and not _has_norm(module)


def is_clamped(module: nn.Module) -> bool:
    """True for fused experts that compute gpt-oss's gate, with biases."""
    if not (module.has_gate and module.has_bias and hasattr(module, "alpha") and hasattr(module, "limit")):
        return False
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return type(module)._apply_gate is GptOssExperts._apply_gate

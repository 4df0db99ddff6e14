"""Linear layers and experts of a model that multiply in 8 bits (``fp8`` in the configuration).

layers = Fp8Layers(model, section)   # after fuse_experts()
layers.restore()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.fp8.casting import TILE
from patrickstar.fp8.grouped import MOST_GROUPS
from patrickstar.fp8.linear import RECIPES, fp8_class
from patrickstar.fp8.support import check_device
from patrickstar.module.fused_experts import is_experts, is_fused, is_plain_swiglu
from patrickstar.module.linear_layers import LinearLayer, is_named, linear_layers

LEAST_NUMEL = 2**19
"""Weights with fewer elements are faster in bfloat16, since casts and launches take longer than the product gains."""
LEAST_EXPERT = (2048, 1024)
"""Hidden and intermediate sizes of experts. Smaller ones are no faster than in bfloat16
(``benchmark/results/h200-fp8-experts.txt``).
"""
_ROUTERS = frozenset(["gate", "router", "shared_expert_gate"])
"""Parts of the names of layers that choose experts; rounding would change their choice."""
_COMPUTED = "weight that is computed from others"


def check_fp8(model: nn.Module, section: Fp8Config | None, device: torch.device) -> None:
    """Raises ValueError if :class:`Fp8Layers` cannot change ``model``, or ``device`` does not multiply in 8 bits.
    Changes nothing.
    """
    if section is not None:
        check_device(device, section.recipe)
        _Selection(model, section)


class _Selection:
    """Linear layers and experts that multiply in 8 bits, and the others."""

    def __init__(self, model: nn.Module, section: Fp8Config, experts_exclusion: str | None = None):
        self.chosen: list[nn.Module] = []
        self.experts: list[nn.Module] = []
        self.left_out: dict[str, str] = {}
        in_8_bits = others = 0.0
        for layer in linear_layers(model, section.skip_modules, "fp8.skip_modules"):
            numel, reason = math.prod(layer.shape), layer.exclusion or _exclusion(layer)
            if reason is None:
                self.chosen.append(layer.module)
                in_8_bits += numel
            else:
                self.left_out[layer.name] = reason
                others += numel
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module._parameters.get("weight") is None:
                self.left_out[name] = _COMPUTED
                others += module.in_features * module.out_features
        for name, module, numel in _experts(model):
            reason = _exclusion_of_experts(name, module, section) or experts_exclusion
            if reason is None:
                self.experts.append(module)
                in_8_bits += numel
            else:
                self.left_out[name] = reason
                others += numel
        if not self.chosen:
            reasons = "".join(f"; {name} is left out: {reason}" for name, reason in list(self.left_out.items())[:1])
            raise ValueError(
                f"fp8 is enabled, but {type(model).__name__} has no linear layer that can multiply in 8 bits{reasons}; "
                "leave fp8 out"
            )
        self.share = in_8_bits / (in_8_bits + others)


class Fp8Layers:
    """The layers of a model that multiply in 8 bits, until :meth:`restore`.

    Attributes:
        num_layers: linear layers that multiply in 8 bits.
        num_experts: modules of fused experts that do.
        share: of the FLOPs of all linear layers and experts, those of experts counted as a token uses them.
        left_out: reason by name of every other linear layer and mixture of experts.
    """

    def __init__(self, model: nn.Module, section: Fp8Config, experts_exclusion: str | None = None):
        """Changes ``model``, which passes :func:`check_fp8`.

        Args:
            experts_exclusion: reason why the device multiplies no experts in 8 bits; None: it does.
        """
        selection = _Selection(model, section, experts_exclusion)
        self.num_layers, self.num_experts = len(selection.chosen), len(selection.experts)
        self.share, self.left_out = selection.share, selection.left_out
        self._changed = [(module, type(module)) for module in (*selection.chosen, *selection.experts)]
        for module, _ in self._changed:
            module.fp8_recipe = RECIPES[section.recipe]
        for module in selection.chosen:
            module.__class__ = fp8_class(type(module))

    def restore(self) -> None:
        """Undoes the change."""
        while self._changed:
            module, base = self._changed.pop()
            module.__class__ = base
            del module.fp8_recipe

    def report(self) -> dict[str, Any]:
        """Entries of the engine's report."""
        return {
            "fp8_layers": self.num_layers,
            "fp8_experts": self.num_experts,
            "fp8_share": self.share,
            "fp8_left_out": dict(self.left_out),
        }


def _exclusion(layer: LinearLayer) -> str | None:
    """Reason why a layer multiplies in bfloat16."""
    base, numel = type(layer.module), math.prod(layer.shape)
    if base is not nn.Linear and base.__name__ != "Conv1D":
        return f"class {base.__name__}, which may compute otherwise"
    if "forward" in vars(layer.module):
        return "a forward of its own, which may compute otherwise"
    if not _ROUTERS.isdisjoint(layer.name.split(".")):
        return "router"
    if any(size % TILE for size in layer.shape):
        return f"{' x '.join(map(str, layer.shape))} is not made of blocks of {TILE} x {TILE}"
    if numel < LEAST_NUMEL:
        return f"{numel} elements, of which fewer than {LEAST_NUMEL} are faster in bfloat16"
    return None


def _exclusion_of_experts(name: str, module: nn.Module, section: Fp8Config) -> str | None:
    """Reason why experts multiply in bfloat16."""
    if any(is_named(name, text) for text in section.skip_modules):
        return "fp8.skip_modules"
    if name.rpartition(".")[2] == "base_layer":
        return "adapter"
    if section.recipe is not Fp8Recipe.ROWWISE:
        return f'experts, whose products are in 8 bits with the recipe "{Fp8Recipe.ROWWISE.value}" alone'
    if not is_fused(module):
        return "experts that are not fused"
    if not is_plain_swiglu(module) or module.is_transposed:
        return "experts that compute more than two products and SwiGLU"
    weights = [module._parameters.get(each) for each in ("gate_up_proj", "down_proj")]
    if any(weight is None for weight in weights):
        return _COMPUTED
    for weight in weights:
        if any(size % TILE for size in weight.shape[1:]):
            return f"{' x '.join(map(str, weight.shape[1:]))} is not made of blocks of {TILE} x {TILE}"
    sizes = weights[1].shape[1:]
    if any(size < least for size, least in zip(sizes, LEAST_EXPERT, strict=True)):
        least = " x ".join(map(str, LEAST_EXPERT))
        return f"experts of {' x '.join(map(str, sizes))} elements, which are faster in bfloat16 below {least}"
    if module.num_experts > MOST_GROUPS:
        return f"{module.num_experts} experts, of which PyTorch multiplies {MOST_GROUPS} together"
    return None


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Names and modules of experts, and the elements of their weights that a token meets."""
    for name, module in model.named_modules():
        weights = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
        if weights and (is_experts(module) or sum(weight.size(0) > 1 for weight in weights) > 1):
            config = getattr(module, "config", None)
            chosen = getattr(config, "num_experts_per_tok", None) or weights[0].size(0)
            per_token = min(chosen / weights[0].size(0), 1.0)
            yield name, module, per_token * math.fsum(weight.numel() for weight in weights)

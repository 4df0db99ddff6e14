"""Linear layers of a model that multiply in 8 bits (``fp8`` in the configuration).

layers = Fp8Layers(model, section)
layers.restore()
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from patrickstar.config import Fp8Config
from patrickstar.fp8.casting import TILE
from patrickstar.fp8.linear import RECIPES, fp8_class
from patrickstar.fp8.support import check_device
from patrickstar.module.linear_layers import LinearLayer, linear_layers

LEAST_NUMEL = 2**19
"""Weights with fewer elements are faster in bfloat16, since casts and launches take longer than the product gains."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last parts of the names of layers that choose experts; rounding would change their choice."""


def check_fp8(model: nn.Module, section: Fp8Config | None, device: torch.device) -> None:
    """Raises ValueError if :class:`Fp8Layers` cannot change ``model``, or ``device`` does not multiply in 8 bits.
    Changes nothing.
    """
    if section is not None:
        check_device(device, section.recipe)
        _Selection(model, section)


class _Selection:
    """Linear layers that multiply in 8 bits, and the others."""

    def __init__(self, model: nn.Module, section: Fp8Config):
        self.chosen: list[nn.Module] = []
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
        for name, numel in _experts(model):
            self.left_out[name] = "experts' grouped products"
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
        num_layers: that multiply in 8 bits.
        share: of the FLOPs of all products with weights, those of experts counted as a token uses them.
        left_out: reason by name of every other linear layer and mixture of experts.
    """

    def __init__(self, model: nn.Module, section: Fp8Config):
        """Changes ``model``, which passes :func:`check_fp8`."""
        selection = _Selection(model, section)
        self.num_layers, self.share, self.left_out = len(selection.chosen), selection.share, selection.left_out
        self._changed = [(module, type(module)) for module in selection.chosen]
        for module, base in self._changed:
            module.fp8_recipe = RECIPES[section.recipe]
            module.__class__ = fp8_class(base)

    def restore(self) -> None:
        """Gives the layers their classes back."""
        while self._changed:
            module, base = self._changed.pop()
            module.__class__ = base
            del module.fp8_recipe

    def report(self) -> dict[str, Any]:
        """Entries of the engine's report."""
        return {"fp8_layers": self.num_layers, "fp8_share": self.share, "fp8_left_out": dict(self.left_out)}


def _exclusion(layer: LinearLayer) -> str | None:
    """Reason why a layer multiplies in bfloat16."""
    base, numel = type(layer.module), math.prod(layer.shape)
    if base is not nn.Linear and base.__name__ != "Conv1D":
        return f"class {base.__name__}, which may compute otherwise"
    if layer.name.rpartition(".")[2] in _ROUTERS:
        return "router"
    if any(size % TILE for size in layer.shape):
        return f"{' x '.join(map(str, layer.shape))} is not made of blocks of {TILE} x {TILE}"
    if numel < LEAST_NUMEL:
        return f"{numel} elements, of which fewer than {LEAST_NUMEL} are faster in bfloat16"
    return None


def _experts(model: nn.Module) -> list[tuple[str, float]]:
    """Names of fused experts, and the elements of their weights that a token meets."""
    found = []
    for name, module in model.named_modules():
        weights = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
        if weights and not isinstance(module, nn.Conv1d):
            config = getattr(module, "config", None)
            chosen = getattr(config, "num_experts_per_tok", None) or weights[0].size(0)
            per_token = min(chosen / weights[0].size(0), 1.0)
            found.append((name, per_token * math.fsum(weight.numel() for weight in weights)))
    return found

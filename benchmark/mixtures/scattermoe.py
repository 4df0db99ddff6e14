"""ScatterMoE as Axolotl distributes it: products that gather and scatter (``pip install --no-deps axolotl``, 0.21.0).

Axolotl's packages import its trainer, and are passed over.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from torch.nn import functional

from benchmark.mixtures import Implementation, Layer

_MOST_ELEMENTS = 2**31 - 1
"""Its kernels of weights' gradients count elements of rows in 32 bits, and beyond would read other memory."""
_PACKAGE = "axolotl.integrations.kernels.libs.scattermoe_lora"


def _pass_over(package: str) -> None:
    """Imports ``package`` and those above it without running their files.

    Raises:
        ModuleNotFoundError: the first of them is not installed.
    """
    top, *names = package.split(".")
    found = importlib.util.find_spec(top)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{top}'")
    folder, name = found.submodule_search_locations[0], top
    for following in [None, *names]:
        if following is not None:
            folder, name = f"{folder}/{following}", f"{name}.{following}"
        sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [folder]


_pass_over(_PACKAGE)
_linear = importlib.import_module(f"{_PACKAGE}.parallel_experts").parallel_linear


def _forward(layer: Layer) -> torch.Tensor:
    module, num_chosen = layer.module, layer.chosen.size(1)
    if layer.chosen.numel() * module.gate_up_proj.size(1) > _MOST_ELEMENTS:
        raise ValueError(f"rows of more than {_MOST_ELEMENTS} elements")
    experts, order = torch.sort(layer.chosen.flatten())
    offsets = torch.bincount(experts, minlength=module.num_experts).cumsum(0)
    routing = (experts, order, offsets)
    rows = _linear(layer.hidden, module.gate_up_proj.transpose(1, 2), num_chosen, *routing, grouped_out=True)
    gate, up = rows.chunk(2, dim=-1)
    gated = functional.silu(gate) * up
    return _linear(gated, module.down_proj.transpose(1, 2), 1, *routing, gates=layer.weights, grouped_in=True)


IMPLEMENTATION = Implementation(_forward, ("_scatter2scatter", "_groupXtY"), "it is given no biases here")

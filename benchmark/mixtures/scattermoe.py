"""ScatterMoE as Axolotl distributes it: products that gather and scatter (``pip install --no-deps axolotl``, 0.21.0).

Axolotl's packages import its trainer, and are passed over.
"""

from __future__ import annotations

import importlib

import torch
from torch.nn import functional

from benchmark.mixtures import Implementation, Layer
from benchmark.mixtures.packages import pass_over

_PACKAGE = "axolotl.integrations.kernels.libs.scattermoe_lora"

pass_over(_PACKAGE)
_linear = importlib.import_module(f"{_PACKAGE}.parallel_experts").parallel_linear


def _forward(layer: Layer) -> torch.Tensor:
    module, num_chosen = layer.module, layer.chosen.size(1)
    experts, order = torch.sort(layer.chosen.flatten())
    offsets = torch.bincount(experts, minlength=module.num_experts).cumsum(0)
    routing = (experts, order, offsets)
    rows = _linear(layer.hidden, module.gate_up_proj.transpose(1, 2), num_chosen, *routing, grouped_out=True)
    gate, up = rows.chunk(2, dim=-1)
    gated = functional.silu(gate) * up
    return _linear(gated, module.down_proj.transpose(1, 2), 1, *routing, gates=layer.weights, grouped_in=True)


IMPLEMENTATION = Implementation(
    _forward, ("_scatter2scatter", "_groupXtY"), "it is given no biases here", most_elements=2**31 - 1
)

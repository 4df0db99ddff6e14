"""Unsloth's products, which gather and scatter (``pip install --no-deps unsloth==2026.2.1``); SwiGLU is PyTorch's.

Its packages import its trainer, and are passed over.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from torch.nn import functional

from benchmark.mixtures import Implementation, Layer
from benchmark.mixtures.packages import pass_over

_PACKAGE = "unsloth.kernels.moe"


def _grouped_gemm() -> Any:
    pass_over(_PACKAGE)
    has_pandas = importlib.util.find_spec("pandas") is not None
    if not has_pandas:  # imported beside, for tables of tuning
        sys.modules["pandas"] = types.ModuleType("pandas")
    try:
        return importlib.import_module(f"{_PACKAGE}.grouped_gemm.interface").grouped_gemm
    finally:
        if not has_pandas:
            del sys.modules["pandas"]


_multiply = _grouped_gemm()


def _forward(layer: Layer) -> torch.Tensor:
    module = layer.module
    num_tokens, num_chosen = layer.chosen.shape
    chosen = layer.chosen.flatten()
    counts, order = torch.bincount(chosen, minlength=module.num_experts), torch.argsort(chosen, stable=True)
    routing = {"m_sizes": counts, "topk": num_chosen, "gather_indices": order, "autotune": True}
    gate, up = _multiply(layer.hidden, module.gate_up_proj, permute_x=True, **routing).chunk(2, dim=-1)
    gated = functional.silu(gate) * up
    rows = _multiply(gated, module.down_proj, permute_y=True, is_first_gemm=False, **routing)
    return (rows.view(num_tokens, num_chosen, -1) * layer.weights.unsqueeze(-1)).sum(dim=1)


def _preferred(config: Any) -> bool:
    blocks = config.kwargs
    is_wide = blocks["BLOCK_SIZE_M"] == 128 and blocks["BLOCK_SIZE_N"] >= 128 and blocks["BLOCK_SIZE_K"] == 64
    return is_wide and config.num_warps == 8 and config.num_stages in (3, 4)


IMPLEMENTATION = Implementation(
    _forward, ("_grouped_gemm",), "it is given no biases here", most_elements=2**31 - 1, preferred=_preferred
)

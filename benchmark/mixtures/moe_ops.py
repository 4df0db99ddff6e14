"""Triton's products with TMA, and kernels that permute rows (``pip install moe-ops``, 0.1.0); SwiGLU is PyTorch's."""

from __future__ import annotations

from typing import Any

import moe_ops
import torch
from torch.nn import functional

from benchmark.mixtures import Implementation, Layer


def _forward(layer: Layer) -> torch.Tensor:
    module = layer.module
    num_tokens, num_chosen = layer.chosen.shape
    rows, row_ids, offsets = moe_ops.permute(layer.hidden, layer.chosen, 0, module.num_experts)
    gate, up = moe_ops.grouped_gemm(rows, module.gate_up_proj, offsets).chunk(2, dim=-1)
    rows = moe_ops.grouped_gemm(functional.silu(gate) * up, module.down_proj, offsets)
    return moe_ops.unpermute(rows, row_ids, layer.weights, num_tokens, num_chosen)


def _preferred(config: Any) -> bool:
    blocks = config.kwargs
    if "BLOCK_C" in blocks:  # rows
        return blocks["BLOCK_C"] >= 1024
    if blocks["BLOCK_SIZE_K"] == 64:  # products with TMA
        return True
    return blocks["BLOCK_SIZE_M"] in (64, 256) and blocks["BLOCK_SIZE_K"] == blocks["BLOCK_SIZE_N"] == 128


IMPLEMENTATION = Implementation(
    _forward, ("grouped_matmul", "gmm_"), "it has no kernel for biases", preferred=_preferred
)

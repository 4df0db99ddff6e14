"""Liger's fused experts: gathers and SwiGLU inside Triton's products (``pip install liger-kernel``, 0.8.5)."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops import LigerFusedMoEFunction

from benchmark.mixtures import Implementation, Layer


def _forward(layer: Layer) -> torch.Tensor:
    module = layer.module
    chosen = layer.chosen.to(torch.int32)
    return LigerFusedMoEFunction.apply(layer.hidden, module.gate_up_proj, module.down_proj, chosen, layer.weights)


def _preferred(config: Any) -> bool:
    blocks = config.kwargs
    if "BLOCK_H" in blocks:  # the weighted sum
        return blocks["BLOCK_H"] >= 256 and blocks["BLOCK_K"] == 4
    if "BLOCK_M" in blocks:  # gradients of weights
        return blocks["BLOCK_M"] == blocks["BLOCK_N"] == 128
    return blocks["BLOCK_N"] == 128 and blocks["BLOCK_K"] == 64 and config.num_stages in (3, 4)


IMPLEMENTATION = Implementation(_forward, ("_proj", "_moe_bwd_d"), "SwiGLU without biases alone", preferred=_preferred)

"""PatrickStar's experts: the products of ``grouped_mm``, with one pass each between them."""

from __future__ import annotations

import copy

import torch

from benchmark.mixtures import Implementation, Layer
from benchmark.mixtures.grouped_mm import PRODUCTS
from patrickstar.module.fused_experts import fuse_experts, is_fused


def _forward(layer: Layer) -> torch.Tensor:
    module = copy.copy(layer.module)  # the parameters are shared
    fuse_experts(module)
    if not is_fused(module):
        raise RuntimeError("transformers' experts of this version are not fused")
    return module(*layer.given)


IMPLEMENTATION = Implementation(_forward, PRODUCTS)

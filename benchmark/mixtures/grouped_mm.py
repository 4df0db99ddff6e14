"""transformers' own ``grouped_mm``."""

from __future__ import annotations

import torch

from benchmark.mixtures import Implementation, Layer

PRODUCTS = ("gemm", "cutlass")


def _forward(layer: Layer) -> torch.Tensor:
    return layer.module(*layer.given)


IMPLEMENTATION = Implementation(_forward, PRODUCTS)

"""Learning rates and weight decay, as pre-training and fine-tuning use them."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn


def decay_groups(weight_decay: float) -> Callable[[nn.Module], list[dict]]:
    """Two parameter groups: matrices decay, biases and norms (they have one dimension) do not."""

    def groups(module: nn.Module) -> list[dict]:
        matrices = [param for param in module.parameters() if param.dim() >= 2]
        vectors = [param for param in module.parameters() if param.dim() < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]

    return groups


def warmup_then_cosine(warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """The learning rate's factor by step, for ``LambdaLR``: up in a line, down along a cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return 0.5 + 0.5 * math.cos(math.pi * progress)

    return factor

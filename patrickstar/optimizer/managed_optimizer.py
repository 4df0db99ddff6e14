"""Which optimizer updates the parameters that stay with PyTorch: PyTorch's own, or where their bias is not corrected,
one with the same formulas but for that.
"""

from __future__ import annotations

import torch

from patrickstar.config import OptimizerConfig, OptimizerType
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW


def managed_optimizer(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class of optimizer that ``config`` asks for."""
    corrects = config.params.bias_correction
    if config.type is OptimizerType.ADAMW:
        return torch.optim.AdamW if corrects else UncorrectedAdamW
    return torch.optim.Adam if corrects else UncorrectedAdam

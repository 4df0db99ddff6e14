"""Changes of a run to a module, beside the engine's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def frozen(module: nn.Module, compute_dtype: torch.dtype) -> Iterator[None]:
    """Context in which no parameter requires grad, so that chunks hold only parameters: for evaluation.

    If parameters have another dtype than ``compute_dtype`` they stay trainable: their float32 masters are kept, and
    restored.
    """
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    params = dict(module.named_parameters())
    if any(param.dtype != compute_dtype for param in params.values()):
        names = []
    for name in names:
        params[name].requires_grad_(False)
    try:
        yield
    finally:
        params = dict(module.named_parameters())  # parameters on the meta device were replaced
        for name in names:
            params[name].requires_grad_(True)


def move_metrics(module: nn.Module, device: torch.device) -> None:
    """Moves torchmetrics' metrics to the device; their tensors are no buffers and do not move with the module. A metric
    with parameters (a network that judges images) is left alone: its parameters are in chunks.
    """
    for child in module.modules():
        if _is_metric(type(child)) and next(child.parameters(), None) is None:
            child.to(device)


def _is_metric(kind: type) -> bool:
    return any(f"{base.__module__}.".startswith("torchmetrics.") for base in kind.__mro__)

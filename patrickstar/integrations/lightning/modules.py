"""What a run changes on a module beside what the engine does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def frozen(module: nn.Module, compute_dtype: torch.dtype) -> Iterator[None]:
    """The module without parameters that require grad, so that its chunks hold nothing but parameters: for evaluation.

    Where parameters have another dtype than ``compute_dtype`` they stay trainable: their float32 values are held beside
    the rounded ones, and the module gets them back.
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
        params = dict(module.named_parameters())  # those on the meta device were replaced
        for name in names:
            params[name].requires_grad_(True)


def move_metrics(module: nn.Module, device: torch.device) -> None:
    """Metrics of torchmetrics keep tensors that are no buffers, and so do not go to the device with the module.

    One with parameters (a network that judges images) stays where it is: its parameters are in chunks.
    """
    for child in module.modules():
        if _is_metric(type(child)) and next(child.parameters(), None) is None:
            child.to(device)


def _is_metric(kind: type) -> bool:
    return any(f"{base.__module__}.".startswith("torchmetrics.") for base in kind.__mro__)

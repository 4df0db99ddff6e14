"""Number of samples and tokens in a batch, from the tensors that the model is called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """Size of one rank's micro-batch."""

    num_samples: int = 0
    """The first dimension of the first tensor that has one; 0 without such a tensor."""
    num_tokens: int = 0
    """Elements of ``input_ids``, else of the first integer tensor with two or more dimensions (one dimension would be
    labels); 0 without such a tensor.
    """


def size_of_batch(batch: Any) -> BatchSize:
    """The size of a tensor, or of any nesting of mappings, lists and tuples. Padding counts, since it is computed."""
    tensors = list(_tensors(batch, ""))
    samples = next((tensor.size(0) for _, tensor in tensors if tensor.dim() > 0), 0)
    tokens = next((tensor for name, tensor in tensors if name == "input_ids"), None)
    if tokens is None:
        tokens = next((tensor for _, tensor in tensors if tensor.dim() >= 2 and _is_integer(tensor)), None)
    return BatchSize(samples, 0 if tokens is None else tokens.numel())


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)

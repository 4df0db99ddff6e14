"""Attention over a sequence that ranks share, where PyTorch's context parallelism has no kernel, which is without a
GPU: it takes the place of that in runs that are tried on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "benchmark_gathered"
# context_parallel() replaces the attribute of torch.nn.functional; this one stays.
_attention = scaled_dot_product_attention


def use_gathered_attention(model: nn.Module) -> None:
    """Has a model of Hugging Face attend to the keys and values of all ranks, by their positions."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _gathered_attention)
    model.config._attn_implementation = _NAME


def _gathered_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    key, value = (_of_all_ranks(part.contiguous(), 2) for part in (key, value))
    visible = position_ids[0][:, None] >= _of_all_ranks(position_ids.contiguous(), 1)[0][None, :]
    out = _attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _of_all_ranks(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return all_gather_tensor_autograd(tensor, gather_dim=dim, group=dist.group.WORLD)

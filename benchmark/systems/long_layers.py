"""Changes to a model's layers that users of plain PyTorch make for long sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PIECE_BYTES = 64 * 2**20
_NAME = "benchmark_gathered"
# context_parallel() replaces the attribute of torch.nn.functional; this reference stays.
_attention = scaled_dot_product_attention


def fast_attention() -> contextlib.AbstractContextManager[None]:
    """Prefers cuDNN's attention to flash attention, which takes 1.7 times as long on H100s and H200s."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


class HostInputs(torch.autograd.graph.saved_tensors_hooks):
    """``torch.autograd.graph.save_on_cpu(pin_memory=True)`` in pieces of 64 MiB.

    PyTorch rounds a piece of pinned memory up to a power of two: a tensor of 1.5 GiB would take 2 GiB of the host.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _to_device)


def _to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns the function that copies it back. Copies run in the computation's stream, so no wait is needed."""
    device, shape, dtype = tensor.device, tensor.shape, tensor.dtype
    numel = max(1, _PIECE_BYTES // dtype.itemsize)
    pieces = [
        torch.empty(piece.shape, dtype=dtype, pin_memory=device.type == "cuda").copy_(piece, non_blocking=True)
        for piece in tensor.detach().reshape(-1).split(numel)
    ]

    def back() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device=device)
        for target, piece in zip(whole.view(-1).split(numel), pieces, strict=True):
            target.copy_(piece, non_blocking=True)
        return whole

    return back


def _to_device(back: Callable[[], torch.Tensor]) -> torch.Tensor:
    return back()


def checkpoint_layer(layer: nn.Module, *, inputs_on_host: bool) -> None:
    """Recomputes a layer in backward from its input. The layer's hooks, such as FSDP's, run around the checkpoint."""
    forward = layer.forward

    def checkpointed(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with HostInputs() if inputs_on_host else contextlib.nullcontext():
            return checkpoint(forward, hidden, use_reentrant=False, **kwargs)

    layer.forward = checkpointed  # type: ignore[method-assign]


def tile_mlp(mlp: nn.Module, tile_tokens: int) -> None:
    """Computes an MLP in tiles of tokens, each recomputed in backward."""
    forward = mlp.forward

    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        tiles = hidden.split(tile_tokens, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)

    mlp.forward = tiled  # type: ignore[method-assign]


def use_gathered_attention(model: nn.Module) -> None:
    """Replaces PyTorch's context parallelism, which has no kernel for CPUs, in runs without a GPU.

    The model attends to the all-gathered keys and values of all ranks, by their positions.
    """
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

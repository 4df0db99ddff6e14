"""What a user of plain PyTorch does to the layers of a model for long sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

_PIECE_BYTES = 64 * 2**20


def fast_attention() -> contextlib.AbstractContextManager[None]:
    """cuDNN's attention before flash attention, which takes 1.7 times as long on these GPUs."""
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
    """What brings it back. Copies are in the stream of the computation, so nobody has to wait for them."""
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
    """Computes a layer again in backward, from its input. Its hooks, such as FSDP's, run around that, not in it."""
    forward = layer.forward

    def checkpointed(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with HostInputs() if inputs_on_host else contextlib.nullcontext():
            return checkpoint(forward, hidden, use_reentrant=False, **kwargs)

    layer.forward = checkpointed  # type: ignore[method-assign]


def tile_mlp(mlp: nn.Module, tile_tokens: int) -> None:
    """Computes an MLP some tokens at a time, each tile again in backward."""
    forward = mlp.forward

    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        tiles = hidden.split(tile_tokens, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)

    mlp.forward = tiled  # type: ignore[method-assign]

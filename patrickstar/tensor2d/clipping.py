"""Gradient norm and clipping over a mesh."""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.panels import sum_dtype


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, group: MeshGroup) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the whole model; replicated and tied parameters count once. All ranks of
    the mesh must call it at the same point.

    Args:
        model: all its parameters are sharded over the mesh.
        max_norm: gradients are scaled so that their norm is at most this.
        group: the mesh.

    Returns:
        the L2 norm before clipping, with the same bits on all ranks: float32 (float64 for such gradients).

    Raises:
        ValueError: a parameter is not sharded over the mesh, so its replicas are unknown.
    """
    placements = {
        id(parameter): module.placements[name]
        for module in model.modules()
        if isinstance(module, Layer2D)
        for name, parameter in module.sharded_parameters().items()
    }
    grads = []
    total: torch.Tensor | float = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if id(parameter) not in placements:
            raise ValueError(f"{name} is not sharded over the mesh; clip it by itself")
        grads.append(parameter.grad)
        if placements[id(parameter)].is_first_at(group.place):
            total = total + parameter.grad.to(sum_dtype(parameter.grad.dtype)).square().sum()
    if not grads:
        raise ValueError("no parameter has a gradient; call it after backward")
    wide = sum_dtype(grads[0].dtype)
    norm = group.world_group.sum(torch.as_tensor(total, dtype=wide, device=grads[0].device)).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm

"""Functions allowed on tensors that have a shape and no memory."""

from __future__ import annotations

import torch

ASKED_FREELY = {
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.layout.__get__,
    torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__, torch.Tensor.is_leaf.__get__,
    torch.Tensor.ndim.__get__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.grad.__get__, torch.Tensor.is_cuda.__get__,
    torch.Tensor.is_meta.__get__, torch.Tensor.itemsize.__get__, torch.Tensor.nbytes.__get__,
    torch.Tensor._base.__get__,
}  # fmt: skip
"""Functions that need only shape, dtype and similar metadata."""

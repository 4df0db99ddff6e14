"""Norms of activations whose features are divided over the columns of a mesh.

Statistics are sums over the columns, in float32 for 16-bit activations. The variance is the mean of squares of what is
left without the mean, in a second pass: mean(x²) - mean(x)², which takes one exchange less, loses all digits where the
mean is large. Backward takes one exchange for both of its sums.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import check_divides, sum_dtype
from patrickstar.tensor2d.sums import replicated


class _Norm2D(Layer2D):
    def __init__(
        self, features: int, group: MeshGroup, eps: float, bias: bool, dtype: torch.dtype | None, device: object
    ):
        super().__init__(group)
        check_divides(f"{type(self).__name__}({features}): features", features, group.place, "columns")
        self.features, self.eps = features, eps
        shape, placement = (features // group.place.columns,), Placement(Split.COLUMNS)
        self.add_parameter("weight", shape, placement, dtype, device)
        if bias:
            self.add_parameter("bias", shape, placement, dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Ones, and zeros for the bias."""
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        """Size of the whole layer."""
        return f"{self.features}, eps={self.eps}"


class LayerNorm2D(_Norm2D):
    """``torch.nn.LayerNorm`` over ``features``, of activations [b/r, ..., features/c]; weight and bias [features/c] are
    the same in all rows.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        features: int,
        group: MeshGroup,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(features, group, eps, bias, dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype stay."""
        weight = replicated(self.weight, self.group.along_rows)
        bias = None if self.bias is None else replicated(self.bias, self.group.along_rows)
        return _LayerNorm.apply(hidden, weight, bias, self.group.along_columns, self.features, self.eps)


class RMSNorm2D(_Norm2D):
    """``torch.nn.RMSNorm`` over ``features``, of activations [b/r, ..., features/c]; the weight [features/c] is the
    same in all rows. 16-bit activations are rounded before they are multiplied with the weight, as in Llama.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        features: int,
        group: MeshGroup,
        *,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(features, group, eps, False, dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype stay."""
        normed = _RMSNorm.apply(hidden, self.group.along_columns, self.features, self.eps)
        return normed * replicated(self.weight, self.group.along_rows)


class _LayerNorm(torch.autograd.Function):
    """x̂ w + b, rounded once. With g the gradient times w: dx = rstd (g - mean(g) - x̂ mean(g x̂))."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        line: Line,
        features: int,
        eps: float,
    ) -> torch.Tensor:
        wide = hidden.to(sum_dtype(hidden.dtype))
        mean = line.sum(wide.sum(-1, keepdim=True)) / features
        centred = wide - mean
        rstd = torch.rsqrt(line.sum(centred.square().sum(-1, keepdim=True)) / features + eps)
        ctx.save_for_backward(hidden, weight, mean, rstd)
        ctx.line, ctx.features, ctx.has_bias = line, features, bias is not None
        out = centred * rstd * weight
        return (out if bias is None else out + bias).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight, mean, rstd = ctx.saved_tensors
        wide, x = grad.to(rstd.dtype), (hidden.to(rstd.dtype) - mean) * rstd
        tokens = list(range(wide.dim() - 1))
        grad_weight = (wide * x).sum(tokens).to(weight.dtype)
        grad_bias = wide.sum(tokens).to(weight.dtype) if ctx.has_bias else None
        wide = wide * weight
        sums = torch.stack([wide.sum(-1, keepdim=True), (wide * x).sum(-1, keepdim=True)])
        of_grad, along = ctx.line.sum(sums) / ctx.features
        grad_hidden = (rstd * (wide - of_grad - x * along)).to(grad.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Without weight. dx = r (g - x̂ mean(g x̂))."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, line: Line, features: int, eps: float) -> torch.Tensor:
        wide = hidden.to(sum_dtype(hidden.dtype))
        scale = torch.rsqrt(line.sum(wide.square().sum(-1, keepdim=True)) / features + eps)
        normed = (wide * scale).to(hidden.dtype)
        ctx.save_for_backward(normed, scale)
        ctx.line, ctx.features = line, features
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        normed, scale = ctx.saved_tensors
        wide, x = grad.to(scale.dtype), normed.to(scale.dtype)
        along = ctx.line.sum((wide * x).sum(-1, keepdim=True)) / ctx.features
        return (scale * (wide - x * along)).to(grad.dtype), None, None, None

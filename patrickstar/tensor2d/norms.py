"""Norms of activations whose features are sharded over a mesh's columns.

With one column each rank has whole features and uses PyTorch's norms (on the CPU only for 32 bits and more). Otherwise
statistics are over all columns, in float32 for 16-bit activations. Each rank computes the mean of its own features, and
in a second pass the squares of deviations from it: mean(x²) - mean(x)² loses all digits if the mean is large. One
exchange combines both (Chan, Golub and LeVeque, *Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances*, 1979). Backward also takes one exchange for its two sums.

On a GPU backward uses the kernels of PyTorch's synchronised batch norm, with tokens as channels. They read activations
and gradients once each; elementwise operations would write float32 intermediates. The kernels take the gradient times
the weight, rounded to the activations' dtype, as if norm and weight were two layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from patrickstar.differentiation import differentiable_once
from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import Cut, check_divides, sum_dtype
from patrickstar.tensor2d.sums import replicated, replicated_together

_NO_SECOND_DERIVATIVE = ("sharded norms", "leave tensor_parallel out")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Ranks that share a norm.

    Attributes:
        over: the features of activations and parameters are sharded over them.
        copies: have the same features of other tokens, samples or heads; gradients of parameters are summed over them.
        split: placement of the parameters.
    """

    over: Line
    copies: Line
    split: Split

    @classmethod
    def of_tokens(cls, group: MeshGroup) -> Spread:
        """A norm of activations [b/r, ..., h/c]."""
        return cls(group.along_columns, group.along_rows, Split.COLUMNS)

    @classmethod
    def of_all_heads(cls, group: MeshGroup, by: Cut) -> Spread:
        """A norm of all heads' features, which are sharded over rows or columns (``by``)."""
        if by == "columns":
            return cls.of_tokens(group)
        return cls(group.along_rows, group.along_columns, Split.ROWS)

    @classmethod
    def of_each_head(cls, group: MeshGroup) -> Spread:
        """A norm of each head's features, which a rank has whole."""
        return cls(Line(), group.world_group, Split.WHOLE)


class _Norm2D(Layer2D):
    def __init__(
        self,
        features: int,
        group: MeshGroup,
        eps: float,
        has: tuple[str, ...],
        offset: float,
        spread: Spread | None,
        dtype: torch.dtype | None,
        device: object,
    ):
        super().__init__(group)
        self.features, self.eps, self.offset = features, eps, offset
        self.spread = Spread.of_tokens(group) if spread is None else spread
        if self.spread.split is not Split.WHOLE:
            by: Cut = "rows" if self.spread.split is Split.ROWS else "columns"
            check_divides(f"{type(self).__name__}({features}): features", features, group.place, by)
        for name in ("weight", "bias"):
            if name in has:
                here = features // self.spread.over.size
                self.add_parameter(name, (here,), Placement(self.spread.split), dtype, device)
            else:
                self.register_parameter(name, None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Factors of one, that is ones less :attr:`offset` for the weight; zeros for the bias."""
        if self.weight is not None:
            self.weight.fill_(1.0 - self.offset)
        if self.bias is not None:
            self.bias.zero_()

    def is_whole(self, hidden: torch.Tensor) -> bool:
        """True if PyTorch's own norm can be used for ``hidden``. Its CPU backward has 16-bit statistics for 16-bit
        activations.
        """
        has_wide_statistics = hidden.device.type != "cpu" or hidden.dtype == sum_dtype(hidden.dtype)
        return self.spread.over.size == 1 and has_wide_statistics

    def extra_repr(self) -> str:
        """Size of the whole layer."""
        return f"{self.features}, eps={self.eps}"


class LayerNorm2D(_Norm2D):
    """``torch.nn.LayerNorm`` over ``features``, of activations [b/r, ..., features/c]. Weight and bias [features/c] are
    replicated over rows.

    Args:
        features: of the whole layer; columns divide it.
        group: the mesh.
        eps: added to the variance.
        bias: the layer has one.
        elementwise_affine: the layer has parameters.
        offset: added to the weight.
        spread: other ranks that share features; None: :meth:`Spread.of_tokens`.
        dtype: of the parameters.
        device: of the parameters.

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
        elementwise_affine: bool = True,
        offset: float = 0.0,
        spread: Spread | None = None,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        has = (*(("weight",) if elementwise_affine else ()), *(("bias",) if elementwise_affine and bias else ()))
        super().__init__(features, group, eps, has, offset, spread, dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype are unchanged."""
        weight, bias = self.weight, self.bias
        if weight is None:
            weight = hidden.new_ones(hidden.shape[-1])
        else:
            weight, bias = replicated_together((weight, bias), self.spread.copies)
            weight = weight + self.offset if self.offset else weight
        if self.is_whole(hidden) and weight.dtype == hidden.dtype:
            return nn.functional.layer_norm(hidden, (self.features,), weight, bias, self.eps)
        return _LayerNorm.apply(hidden, weight, bias, self.spread.over, self.eps)


class RMSNorm2D(_Norm2D):
    """``torch.nn.RMSNorm`` over ``features``, of activations [b/r, ..., features/c]. The weight [features/c] is
    replicated over rows. 16-bit activations are rounded before the product with the weight, as in Llama; with an offset
    after it, as in Gemma. Arguments are those of :class:`LayerNorm2D`.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        features: int,
        group: MeshGroup,
        *,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        offset: float = 0.0,
        spread: Spread | None = None,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        has = ("weight",) if elementwise_affine else ()
        super().__init__(features, group, eps, has, offset, spread, dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype are unchanged."""
        wide = hidden.to(sum_dtype(hidden.dtype)) if self.offset else hidden
        if self.is_whole(wide):
            normed = nn.functional.rms_norm(wide, (self.features,), eps=self.eps)
        else:
            normed = _RMSNorm.apply(wide, self.spread.over, self.features, self.eps)
        if self.weight is None:
            return normed.to(hidden.dtype)
        weight = replicated(self.weight, self.spread.copies)
        return (normed * (weight.to(wide.dtype) + self.offset)).to(hidden.dtype) if self.offset else normed * weight


class _LayerNorm(torch.autograd.Function):
    """x̂ w + b, rounded once. With g the gradient times w: dx = rstd (g - mean(g) - x̂ mean(g x̂))."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, line: Line, eps: float
    ) -> torch.Tensor:
        tokens = _rows(hidden)
        mean, rstd = _statistics(tokens, line, eps)
        ctx.save_for_backward(hidden, weight, mean, rstd)
        ctx.line, ctx.has_bias = line, bias is not None
        normed = (tokens - mean[:, None]).mul_(rstd[:, None])
        out = torch.empty_like(tokens)
        if bias is None:
            torch.mul(normed, weight, out=out)
        else:
            torch.addcmul(bias, normed, weight, out=out)
        return out.view(hidden.shape)

    @staticmethod
    @differentiable_once(*_NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight, mean, rstd = ctx.saved_tensors
        grad, tokens = _rows(grad), _rows(hidden)
        of_norm = (grad * weight).to(tokens.dtype)
        of_grad, along = ctx.line.sum(torch.stack(_sums_of_gradient(of_norm, tokens, mean, rstd)))
        grad_hidden = _gradient(of_norm, tokens, mean, rstd, (of_grad, along), tokens.shape[1] * ctx.line.size)
        grad_weight, grad_bias = _gradients_of_parameters(grad, tokens, mean, rstd, weight, ctx.has_bias)
        return grad_hidden.view(hidden.shape), grad_weight, grad_bias, None, None


class _RMSNorm(torch.autograd.Function):
    """RMS norm without weight. dx = r (g - x̂ mean(g x̂))."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, line: Line, features: int, eps: float) -> torch.Tensor:
        wide = sum_dtype(hidden.dtype)
        squares = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide).square_()
        scale = torch.rsqrt(line.sum(squares) / features + eps)
        normed = torch.mul(hidden, scale, out=torch.empty_like(hidden))
        ctx.save_for_backward(normed, scale)
        ctx.line, ctx.features = line, features
        return normed

    @staticmethod
    @differentiable_once(*_NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        normed, scale = ctx.saved_tensors
        mine, tokens, scale = _rows(grad), _rows(normed), scale.flatten()
        _, along = _sums_of_gradient(mine, tokens, torch.zeros_like(scale), scale)
        # Passed as a norm's sums, with mean 0; tokens are normed already.
        sums = torch.zeros_like(along), ctx.line.sum(along) / scale.square()
        grad_hidden = _gradient(mine, tokens, sums[0], scale, sums, ctx.features)
        return grad_hidden.view(grad.shape), None, None, None


def _rows(activations: torch.Tensor) -> torch.Tensor:
    """[..., h/c] as [t, h/c], contiguous."""
    return activations.reshape(-1, activations.shape[-1]).contiguous()


def _statistics(tokens: torch.Tensor, line: Line, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and reciprocal deviations [t] over all columns' features, from [t, h/c]. On the CPU tokens are widened
    first, since PyTorch's statistics have the activations' dtype.
    """
    here = tokens.shape[1]
    wide = tokens if tokens.is_cuda else tokens.to(sum_dtype(tokens.dtype))
    _, mean, rstd = torch.native_layer_norm(wide, (here,), None, None, eps)
    squares = here * (rstd.flatten().square().reciprocal() - eps)
    means, all_squares = torch.stack(line.gather(torch.stack([mean.flatten(), squares]))).unbind(1)
    mean = means.mean(0)
    total = all_squares.sum(0) + here * (means - mean).square().sum(0)
    return mean, torch.rsqrt(total / (here * line.size) + eps)


def _sums_of_gradient(
    grad: torch.Tensor, tokens: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token, the sums [t] of g and of g (x - mean) over the local features."""
    if grad.is_cuda:
        return torch.batch_norm_backward_reduce(grad[None], tokens[None], mean, rstd, None, True, False, False)[:2]
    wide = grad.to(mean.dtype)
    return wide.sum(1), (wide * (tokens - mean[:, None])).sum(1)


def _gradient(
    grad: torch.Tensor,
    tokens: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    features: int,
) -> torch.Tensor:
    """rstd (g - mean(g) - (x - mean) rstd² mean(g (x - mean))), from sums over all features."""
    if grad.is_cuda:
        count = torch.full((1,), features, dtype=torch.int32, device=grad.device)
        return torch.batch_norm_backward_elemt(grad[None], tokens[None], mean, rstd, None, *sums, count)[0]
    of_grad, along = sums[0] / features, sums[1] * rstd.square() / features
    found = grad - of_grad[:, None] - (tokens - mean[:, None]) * along[:, None]
    return (found * rstd[:, None]).to(grad.dtype)


def _gradients_of_parameters(
    grad: torch.Tensor,
    tokens: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums over tokens of g x̂ and g."""
    if grad.is_cuda and weight.dtype == grad.dtype:
        wanted, shape = [False, True, has_bias], [tokens.shape[1]]
        by_token = mean[:, None], rstd[:, None]
        found = torch.ops.aten.native_layer_norm_backward(grad, tokens, shape, *by_token, weight, weight, wanted)
        return found[1], found[2] if has_bias else None
    normed = (tokens - mean[:, None]) * rstd[:, None]
    of_bias = grad.to(mean.dtype).sum(0).to(weight.dtype) if has_bias else None
    return (grad * normed).sum(0).to(weight.dtype), of_bias

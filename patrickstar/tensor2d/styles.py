"""Styles: how each kind of module is sharded over a mesh, for plans (plans.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from patrickstar.tensor2d.adapters import base_name, base_of, is_adapted, with_adapters
from patrickstar.tensor2d.embedding import Embedding2D, SmallEmbedding2D
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.linear import Linear2D
from patrickstar.tensor2d.losses import LMHead2D, whole_logits
from patrickstar.tensor2d.norms import LayerNorm2D, RMSNorm2D
from patrickstar.tensor2d.panels import Cut


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Classes for pairs of linear layers, such as a feed-forward layer's two, and for the head.

    Attributes:
        first: the layer whose output the second takes, with only feature-wise operations between them.
        second: the second layer.
        head: computes logits.
        heads_by: the mesh dimension that shards attention heads.
    """

    first: type[Layer2D]
    second: type[Layer2D]
    head: type[Layer2D]
    heads_by: Cut


@dataclasses.dataclass(frozen=True)
class Spot:
    """The place at which a style replaces a module.

    Attributes:
        name: the module's name in the model.
        group: the mesh.
        tables: embeddings replaced so far, by the id of their parameter.
        pairs: the classes of linear layers.
    """

    name: str
    group: MeshGroup
    tables: Mapping[int, Embedding2D]
    pairs: Pairs

    def refused(self, module: nn.Module, why: str) -> ValueError:
        """An error about ``module``."""
        return ValueError(f"{self.name} ({type(module).__name__}) cannot be sharded over a mesh: {why}")


class Style(Protocol):
    """Interface: shards one kind of module over a mesh."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:
        """The replacement of ``module``, with its values.

        Raises:
            ValueError: the module cannot be sharded so.
        """
        ...


class Summa2D:
    """Linear layers, norms and embeddings of PyTorch and Hugging Face (``Conv1D``, ``…RMSNorm``), by their class."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if _is_linear(module):
            return _linear([module], [spot.name], spot, Linear2D)
        if isinstance(module, nn.Embedding):
            return _embedding(module, spot, Embedding2D)
        if isinstance(module, nn.LayerNorm):
            return _norm(module, spot, module.eps)
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            return _norm(module, spot, module.variance_epsilon)  # type: ignore[arg-type]
        raise spot.refused(module, "Summa2D divides linear layers, norms and embeddings; give another style")


class First:
    """The first linear layer of a pair."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        return first_linear([module], [spot.name], spot)


class Second:
    """The second linear layer of a pair."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        return second_linear(module, spot.name, spot)


class Slices2D:
    """Small embeddings: features are sharded over columns, rows replicate."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if not isinstance(module, nn.Embedding):
            raise spot.refused(module, "Slices2D divides embeddings")
        return _embedding(module, spot, SmallEmbedding2D)


class Head2D:
    """The linear layer that computes logits; it shares its table with the embedding that it was tied to."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if is_adapted(module):
            raise spot.refused(module, "the output layer cannot have an adapter there; leave it out of target_modules")
        if not isinstance(module, nn.Linear):
            raise spot.refused(module, "Head2D divides linear layers")
        tied = spot.tables.get(id(module.weight))
        weight, has_bias = module.weight, module.bias is not None
        options = {"bias": True} if has_bias else {}
        made = spot.pairs.head(
            module.in_features,
            module.out_features,
            spot.group,
            tied=tied,
            dtype=weight.dtype,
            device=weight.device,
            **options,
        )
        if tied is None:
            made.take("weight", {f"{spot.name}.weight": weight})
        if has_bias:
            made.take("bias", {f"{spot.name}.bias": module.bias})
        return made


class Head(LMHead2D):
    """Returns this rank's logits [b/r, ..., v/c] with autograd on. With autograd off, as in ``generate``, logits have
    the whole vocabulary: [b/r, ..., vocabulary].
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits = super().forward(hidden)
        return logits if torch.is_grad_enabled() else whole_logits(logits, self.vocabulary, self.group)


TWO_DIMENSIONS = Pairs(Linear2D, Linear2D, Head, "columns")


def first_linear(modules: list[nn.Module], names: list[str], spot: Spot, parts: list[int] | None = None) -> nn.Module:
    """The first layer of a pair, from one layer or several with the same input.

    Args:
        modules: linear layers, with or without adapters.
        names: their names in the model.
        spot: the place of replacement.
        parts: parts of the output of which each rank gets some; None: the output of each module.

    Raises:
        ValueError: some have a bias and others do not.
    """
    return _linear(modules, names, spot, spot.pairs.first, parts)


def second_linear(module: nn.Module, name: str, spot: Spot) -> nn.Module:
    """The second layer of a pair."""
    return _linear([module], [name], spot, spot.pairs.second)


def _linear(
    modules: list[nn.Module], names: list[str], spot: Spot, kind: type[Layer2D], parts: list[int] | None = None
) -> nn.Module:
    for module in modules:
        if not _is_linear(module):
            raise spot.refused(module, "it is no linear layer")
    bases = {base_name(module, name): base_of(module) for name, module in zip(names, modules, strict=True)}
    parts = [_features(base)[1] for base in bases.values()] if parts is None else parts
    biases = {f"{name}.bias": base.bias for name, base in bases.items()}
    has_bias = {bias is not None for bias in biases.values()}
    if len(has_bias) > 1:
        raise spot.refused(modules[0], f"some of {', '.join(names)} have a bias, and some have none")
    first = base_of(modules[0])
    made = kind(
        _features(first)[0],
        sum(parts),
        spot.group,
        bias=has_bias == {True},
        dtype=first.weight.dtype,
        device=first.weight.device,
        **({"parts": parts} if len(parts) > 1 else {}),
    )
    weights = {f"{name}.weight": base.weight for name, base in bases.items()}
    made.take("weight", weights, is_transposed=_is_conv1d(first))
    if made.bias is not None:
        made.take("bias", biases)
    made.train(first.training)
    return with_adapters(made, modules, names, parts)


def _is_linear(module: nn.Module) -> bool:
    """Includes layers with adapters."""
    base = base_of(module)
    return isinstance(base, nn.Linear) or _is_conv1d(base)


def _features(module: nn.Module) -> tuple[int, int]:
    """(in, out) features."""
    if _is_conv1d(module):
        return tuple(module.weight.shape)  # type: ignore[union-attr,return-value]
    return module.in_features, module.out_features  # type: ignore[return-value]


def _is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _embedding(module: nn.Embedding, spot: Spot, kind: type[Embedding2D] | type[SmallEmbedding2D]) -> Layer2D:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise spot.refused(module, "max_norm, scale_grad_by_freq and sparse gradients are not supported")
    weight = module.weight
    made = kind(
        module.num_embeddings,
        module.embedding_dim,
        spot.group,
        padding_idx=module.padding_idx,
        dtype=weight.dtype,
        device=weight.device,
    )
    made.take("weight", {f"{spot.name}.weight": weight})
    return made


def _norm(module: nn.Module, spot: Spot, eps: float) -> Layer2D:
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None or weight.dim() != 1:
        raise spot.refused(module, "norms are divided that have a weight of one dimension")
    options = {"eps": eps, "dtype": weight.dtype, "device": weight.device}
    if isinstance(module, nn.LayerNorm):
        made: Layer2D = LayerNorm2D(len(weight), spot.group, bias=bias is not None, **options)  # type: ignore[arg-type]
    else:
        made = RMSNorm2D(len(weight), spot.group, **options)  # type: ignore[arg-type]
    made.take("weight", {f"{spot.name}.weight": weight})  # type: ignore[dict-item]
    if bias is not None:
        made.take("bias", {f"{spot.name}.bias": bias})
    return made

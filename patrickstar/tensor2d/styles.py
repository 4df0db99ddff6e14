"""Styles: how each kind of module is sharded over a mesh, for plans (plans.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar.tensor2d.adapters import base_name, base_of, is_adapted, with_adapter
from patrickstar.tensor2d.embedding import Embedding2D, SmallEmbedding2D
from patrickstar.tensor2d.fused import parts_of
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.linear import Linear2D
from patrickstar.tensor2d.losses import LabelHead2D, LMHead2D, whole_logits
from patrickstar.tensor2d.mixtures import WholeMixture
from patrickstar.tensor2d.norms import LayerNorm2D, RMSNorm2D, Spread
from patrickstar.tensor2d.panels import Cut
from patrickstar.tensor2d.recognised import NormKind, embedding_factor, recognise_norm


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
    """Linear layers, embeddings and norms. Norms are recognised by what they compute
    (:mod:`~patrickstar.tensor2d.recognised`).
    """

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if is_linear(module):
            return linears([module], [spot.name], spot, Linear2D)[0]
        if isinstance(module, nn.Embedding):
            return _embedding(module, spot, Embedding2D)
        kind = recognise_norm(module, 0)
        if kind is not None and kind.features:
            return _norm(module, spot, kind, Spread.of_tokens(spot.group))
        raise spot.refused(module, "Summa2D divides linear layers, norms and embeddings; give another style")


class Firsts:
    """The first linear layers of a pair, as one product. One object is the style of each of them.

    Args:
        modules: by name in the model; with or without adapters.
        parts: features of each part of their outputs; of each part a rank gets some.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parts: Sequence[int]):
        self._modules, self._parts = dict(modules), tuple(parts)
        self._made: dict[str, nn.Module] = {}

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if not self._made:
            names = list(self._modules)
            made = linears(list(self._modules.values()), names, spot, spot.pairs.first, self._parts)
            self._made = dict(zip(names, made, strict=True))
        return self._made[spot.name]


class Second:
    """The second linear layer of a pair."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        return linears([module], [spot.name], spot, spot.pairs.second)[0]


class Norm:
    """A norm of one kind.

    Args:
        kind: of the norm.
        spread: the ranks that share its features, by group and by the dimension that shards heads.
    """

    def __init__(self, kind: NormKind, spread: Callable[[MeshGroup, Cut], Spread]):
        self._kind, self._spread = kind, spread

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        return _norm(module, spot, self._kind, self._spread(spot.group, spot.pairs.heads_by))


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


class Whole2D:
    """Token-wise modules, such as mixtures of experts, that each rank has whole."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        return WholeMixture(module, spot.name, spot.group)


class Labels2D:
    """The linear layer that computes a classifier's scores."""

    def replace(self, module: nn.Module, spot: Spot) -> nn.Module:  # noqa: D102
        if is_adapted(module):
            raise spot.refused(module, "the output layer cannot have an adapter there; leave it out of target_modules")
        weight, bias = module.weight, module.bias
        options: dict[str, Any] = {"bias": bias is not None, "dtype": weight.dtype, "device": weight.device}
        made = LabelHead2D(*features_of(module), spot.group, **options)
        made.take("weight", {f"{spot.name}.weight": weight})  # type: ignore[dict-item]
        if bias is not None:
            made.take("bias", {f"{spot.name}.bias": bias})  # type: ignore[dict-item]
        return made


class Head(LMHead2D):
    """Returns this rank's logits [b/r, ..., v/c] with autograd on. With autograd off, as in ``generate``, logits have
    the whole vocabulary: [b/r, ..., vocabulary].
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits = super().forward(hidden)
        return logits if torch.is_grad_enabled() else whole_logits(logits, self.vocabulary, self.group)


TWO_DIMENSIONS = Pairs(Linear2D, Linear2D, Head, "columns")


def linears(
    modules: list[nn.Module], names: list[str], spot: Spot, kind: type[Layer2D], parts: Sequence[int] = ()
) -> list[nn.Module]:
    """Replacements of linear layers with the same input, computed by one product.

    Args:
        modules: with or without adapters.
        names: their names in the model.
        spot: the place of replacement.
        kind: class of the product.
        parts: parts of the outputs of which each rank gets some; none: one part.

    Raises:
        ValueError: some have a bias and others do not, or the mesh does not divide them.
    """
    bases = {base_name(module, name): base_of(module) for name, module in zip(names, modules, strict=True)}
    biases = {f"{name}.bias": base.bias for name, base in bases.items()}
    has_bias = {bias is not None for bias in biases.values()}
    if len(has_bias) > 1:
        raise spot.refused(modules[0], f"some of {', '.join(names)} have a bias, and some have none")
    first = base_of(modules[0])
    made = kind(
        features_of(first)[0],
        sum(features_of(base)[1] for base in bases.values()),
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
    if len(modules) == 1:
        return [with_adapter(modules[0], names[0], made, made, parts if len(parts) > 1 else ())]
    faces = parts_of(made, [features_of(base)[1] for base in bases.values()])
    return [with_adapter(*each, made, face) for *each, face in zip(modules, names, faces, strict=True)]


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer, with or without adapters."""
    base = base_of(module)
    return isinstance(base, nn.Linear) or _is_conv1d(base)


def features_of(module: nn.Module) -> tuple[int, int]:
    """(in, out) features of a linear layer."""
    module = base_of(module)
    if _is_conv1d(module):
        return tuple(module.weight.shape)  # type: ignore[union-attr,return-value]
    return module.in_features, module.out_features  # type: ignore[return-value]


def _is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _embedding(module: nn.Embedding, spot: Spot, kind: type[Embedding2D] | type[SmallEmbedding2D]) -> Layer2D:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise spot.refused(module, "max_norm, scale_grad_by_freq and sparse gradients are not supported")
    factor = embedding_factor(module)
    if factor is None:
        raise spot.refused(module, "its forward computes something else than rows of its table times a factor")
    weight = module.weight
    made = kind(
        module.num_embeddings,
        module.embedding_dim,
        spot.group,
        padding_idx=module.padding_idx,
        factor=factor,
        dtype=weight.dtype,
        device=weight.device,
    )
    made.take("weight", {f"{spot.name}.weight": weight})
    return made


def _norm(module: nn.Module, spot: Spot, kind: NormKind, spread: Spread) -> Layer2D:
    own = {name: param for name, param in module._parameters.items() if param is not None}
    weight = own.get("weight")
    options: dict[str, Any] = {"eps": kind.eps, "elementwise_affine": kind.has_weight, "offset": kind.offset}
    if weight is not None:
        options |= {"dtype": weight.dtype, "device": weight.device}
    if kind.has_mean:
        made: Layer2D = LayerNorm2D(kind.features, spot.group, bias=kind.has_bias, spread=spread, **options)
    elif kind.has_bias:
        raise spot.refused(module, "RMS norms with a bias have no form")
    else:
        made = RMSNorm2D(kind.features, spot.group, spread=spread, **options)
    for name, param in own.items():
        made.take(name, {f"{spot.name}.{name}": param})
    return made

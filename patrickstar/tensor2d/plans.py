"""Tensor parallelism for other libraries' models: by their structure, or by a plan.

    group = MeshGroup.of_torch(Mesh(rows=2, columns=2))
    parallelize(model, group)                                  # a Hugging Face model, by its structure
    parallelize(model, group, {"net.*": Summa2D()})            # any model: styles by patterns of module names

As with ``torch.distributed.tensor.parallel.parallelize_module``, modules are replaced in place, and the model's own
code goes on around them. A model with a parameter that no style shards is refused, so that none is silently replicated.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from patrickstar.tensor2d.adapters import check_adapters
from patrickstar.tensor2d.embedding import Embedding2D
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.local_heads import check_heads, keep_local_heads
from patrickstar.tensor2d.model_losses import LabelLoss, replace_loss
from patrickstar.tensor2d.norms import Spread
from patrickstar.tensor2d.panels import Cut
from patrickstar.tensor2d.recognised import NormKind
from patrickstar.tensor2d.structure import Structure, find_structure
from patrickstar.tensor2d.styles import (
    TWO_DIMENSIONS,
    Firsts,
    Head2D,
    Labels2D,
    Norm,
    Pairs,
    Second,
    Slices2D,
    Spot,
    Style,
    Summa2D,
    Whole2D,
)

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def parallelize(model: nn.Module, group: MeshGroup, plan: Mapping[str, Style] | None = None) -> None:
    """Shards the parameters of ``model`` over the mesh, module by module, in place.

    Afterwards call the model on each rank with the samples of its row. Outputs are [b/r, ..., h/c]. Logits are [b/r,
    ..., v/c] with autograd on, and have the whole vocabulary with autograd off; a classifier's scores are whole. The
    loss of a Hugging Face model is that of the whole batch, on all ranks; each must call its ``backward``.

    An engine compares the model with the original; this function does not.

    Args:
        model: with the same whole values on all ranks, or on the meta device.
        group: the mesh.
        plan: styles by patterns of module names (``*`` matches anything), with or without the prefix of a Hugging Face
            model's base model; None: by the structure of a Hugging Face model
            (:mod:`patrickstar.tensor2d.structure`).

    Raises:
        ValueError: a module, which is named, has no form or no style, or a size is not divisible. The model may then
            be partly sharded.
    """
    if plan is not None:
        check_adapters(model)
        styles = _styles(model, plan)
        _check_covered(model, styles)
        heads = replace_modules(model, group, styles, TWO_DIMENSIONS)
        if heads:
            replace_loss(model, heads[0].vocabulary, group)
        return
    structure = find_structure(model)
    heads = shard_by_structure(model, group, structure, TWO_DIMENSIONS)
    if heads:
        replace_loss(model, heads[0].vocabulary, group)
    elif structure.scores and group.along_rows.size > 1:
        LabelLoss(model, group.along_rows).attach(model)


def shard_by_structure(model: nn.Module, group: MeshGroup, structure: Structure, pairs: Pairs) -> list[Any]:
    """Replaces the modules of ``structure``, and returns the new heads. Raises ValueError as :func:`parallelize`
    does.
    """
    for attention in structure.attentions:
        check_heads(model, attention, group.place, pairs.heads_by)
    heads = replace_modules(model, group, _styles_of(model, structure), pairs)
    for attention in structure.attentions:
        keep_local_heads(model.get_submodule(attention.name), attention, getattr(group.place, pairs.heads_by))
    return heads


def _styles_of(model: nn.Module, structure: Structure) -> dict[str, Style]:
    """Styles by module name. The table comes before the head that shares it, which some models register first."""
    found: dict[str, Style] = {structure.table: Summa2D()}
    for pair in structure.pairs:
        firsts = Firsts({name: model.get_submodule(name) for name in pair.firsts}, pair.parts)
        found |= {**dict.fromkeys(pair.firsts, firsts), pair.second: Second()}
    found |= dict.fromkeys(structure.mixtures, Whole2D())
    found |= dict.fromkeys(structure.small_tables, Slices2D())
    found |= dict.fromkeys(structure.linears, Summa2D())
    spreads: list[tuple[Mapping[str, NormKind], Callable[[MeshGroup, Cut], Spread]]] = [
        (structure.norms, lambda group, by: Spread.of_tokens(group)),
        (structure.inner_norms, Spread.of_all_heads),
        (structure.head_norms, lambda group, by: Spread.of_each_head(group)),
    ]
    for norms, spread in spreads:
        found |= {name: Norm(kind, spread) for name, kind in norms.items()}
    if structure.head is not None:
        found[structure.head] = Head2D()
    found |= dict.fromkeys(structure.scores, Labels2D())
    return found


def replace_modules(model: nn.Module, group: MeshGroup, styles: Mapping[str, Style], pairs: Pairs) -> list[Any]:
    """Replaces modules by the styles of their names, and returns the new heads.

    Raises:
        ValueError: a module cannot be sharded by its style.
    """
    tables: dict[int, Embedding2D] = {}
    # keeps old parameters alive, so that their ids are not reused
    replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
    heads = []
    for name, style in styles.items():
        module = model.get_submodule(name)
        own = dict(module.named_parameters(recurse=False))
        made = style.replace(module, Spot(name, group, tables, pairs))
        if made is module:
            continue
        if isinstance(made, Embedding2D):
            tables[id(own["weight"])] = made
        if isinstance(made, pairs.head):
            heads.append(made)
        if isinstance(made, (Embedding2D, pairs.head)):
            replaced += [(old, made.get_parameter(key)) for key, old in own.items()]
        made.train(module.training)
        for hooks in _HOOKS:  # the dictionaries themselves, by which handles remove hooks
            setattr(made, hooks, getattr(module, hooks))
        model.set_submodule(name, made)
    _tie_again(model, {id(old): new for old, new in replaced})
    return heads


def _styles(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the outermost modules that match a pattern, in model order."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, Style] = {}
    for name, _ in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in found):
            continue
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name.removeprefix(prefix), pattern) or fnmatch.fnmatchcase(name, pattern):
                found[name] = style
                break
    return found


def _check_covered(model: nn.Module, styles: Mapping[str, Style]) -> None:
    sharded = {id(parameter) for name in styles for parameter in model.get_submodule(name).parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded:
            owner = name.rpartition(".")[0]
            module = model.get_submodule(owner)
            raise ValueError(
                f"{type(model).__name__}: the plan has nothing for module {owner!r} ({type(module).__name__}), whose "
                f"parameter {name} {list(parameter.shape)} would be the same on all ranks; add a style for it to `plan`"
            )


def _tie_again(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Replaces parameters under their other names."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in made:
                module._parameters[key] = made[id(parameter)]

"""Tensor parallelism for other libraries' models: a plan maps patterns of module names to styles.

    group = MeshGroup.of_torch(Mesh(rows=2, columns=2))
    parallelize(model, group)                                  # a plan of ours, by the model's type
    parallelize(model, group, {"net.*": Summa2D()})            # or your own

As with ``torch.distributed.tensor.parallel.parallelize_module``, modules are replaced in place. A model with a
parameter that no style shards is refused, so that none is silently replicated.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from patrickstar.tensor2d.adapters import check_adapters, keep_places
from patrickstar.tensor2d.embedding import Embedding2D
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.hugging_face import PLANS, CausalLoss, TokenLoss
from patrickstar.tensor2d.styles import TWO_DIMENSIONS, Pairs, Spot, Style

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_LOSSES: dict[str | None, type[TokenLoss]] = {
    "ForCausalLM": CausalLoss,
    "ForMaskedLM": TokenLoss,
    None: CausalLoss,
}
"""By ``loss_type`` of transformers; models without one use the first."""


def parallelize(model: nn.Module, group: MeshGroup, plan: Mapping[str, Style] | None = None) -> None:
    """Shards the parameters of ``model`` over the mesh, module by module, in place.

    Afterwards call the model on each rank with the samples of its row. Outputs are [b/r, ..., h/c]. Logits are [b/r,
    ..., v/c] with autograd on, and have the whole vocabulary with autograd off. The loss of a Hugging Face causal or
    masked language model is that of the whole batch, on all ranks; each must call its ``backward``.

    Args:
        model: with the same whole values on all ranks, or on the meta device.
        group: the mesh.
        plan: styles by patterns of module names (``*`` matches anything), with or without the prefix of a Hugging Face
            model's base model; None: the plan for ``model.config.model_type``.

    Raises:
        ValueError: there is no plan for the model or for one of its modules, which is named, or a size is not
            divisible. The model may then be partly sharded.
    """
    plan = plan_for(model) if plan is None else plan
    heads = replace_modules(model, group, plan, TWO_DIMENSIONS)
    if heads:
        replace_loss(model, heads[0].vocabulary, group)


def replace_modules(model: nn.Module, group: MeshGroup, plan: Mapping[str, Style], pairs: Pairs) -> list[Any]:
    """Replaces the modules that ``plan`` names, and returns the new heads. Raises ValueError as :func:`parallelize`
    does.
    """
    check_adapters(model)
    styles = _styles(model, plan)
    _check_covered(model, styles)
    tables: dict[int, Embedding2D] = {}
    # keeps old parameters alive, so that their ids are not reused
    replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
    heads = []
    for name, style in styles.items():
        module = model.get_submodule(name)
        made = style.replace(module, Spot(name, group, tables, pairs))
        if isinstance(made, Embedding2D):
            tables[id(module.weight)] = made
        if isinstance(made, pairs.head):
            heads.append(made)
        if isinstance(made, (Embedding2D, pairs.head)):
            replaced += [(old, made.get_parameter(key)) for key, old in module.named_parameters(recurse=False)]
        keep_places(made, module)
        made.train(module.training)
        for hooks in _HOOKS:  # the dictionaries themselves, by which handles remove hooks
            setattr(made, hooks, getattr(module, hooks))
        model.set_submodule(name, made)
    _tie_again(model, {id(old): new for old, new in replaced})
    return heads


def plan_for(model: nn.Module) -> Mapping[str, Style]:
    """The plan for ``model.config.model_type``.

    Raises:
        ValueError: there is none.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in PLANS:
        raise ValueError(
            f"{type(model).__name__} (model type {kind!r}) has no plan for a mesh; there are plans for "
            f"{', '.join(sorted(PLANS))}: give one as `plan`"
        )
    return PLANS[kind]


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


def replace_loss(model: Any, vocabulary: int, group: MeshGroup) -> None:
    """Makes a causal or masked language model compute its loss from logits whose vocabulary is sharded over ``group``'s
    columns. Other models refuse labels.
    """
    kind = getattr(model, "loss_type", None)
    if hasattr(type(model), "loss_function") and kind in _LOSSES:
        _LOSSES[kind](vocabulary, group).attach(model)
    else:
        model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _refuse_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise ValueError(
            f"{type(module).__name__} would compute its loss from all logits, of which a rank has a part; call it "
            "without labels, and CrossEntropy2D with its logits"
        )

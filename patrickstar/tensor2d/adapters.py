"""PEFT's LoRA on a mesh: the frozen base is sharded as without adapters, and A and B with it.

PEFT's own layer stays, with sharded layers as its ``base_layer``, ``lora_A`` and ``lora_B``. So dropout, scaling,
several adapters and ``disable_adapter`` are PEFT's. PEFT is not imported.

Adapter dropout needs no common seed: each rank has other elements of the input. In two dimensions these are its
column's features of its row's samples; in one, its tokens or features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.linear import Linear2D
from patrickstar.tensor2d.low_rank import Narrow2D, Widen2D
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, RowLinear1D

_LORA = ("peft.tuners.lora.layer", "Linear")
_PAIRS: dict[type[Layer2D], tuple[type[Layer2D], type[Layer2D]]] = {
    Linear2D: (Narrow2D, Widen2D),
    ColumnLinear1D: (Narrow2D, ColumnLinear1D),
    RowLinear1D: (RowLinear1D, Widen2D),
}
"""Classes of A and B, by the base layer's class."""
_LABELLED = ("ForSequenceClassification", "ForTokenClassification")
"""``loss_type`` of transformers' classifiers, whose last linear layer computes a score of each label."""
_ELSE = "or train it without tensor_parallel, where a frozen base may leave the GPU"


def check_adapters(model: nn.Module) -> None:
    """Raises ValueError, naming the module, if PEFT has put something into ``model`` that cannot be sharded."""
    if _is_of_peft(model):
        raise ValueError(f"{type(model).__name__} is PEFT's; divide the model inside, which its get_base_model() gives")
    for name, module in model.named_modules():
        if is_adapted(module):
            _check_lora(name, module)
        elif type(module).__name__ == "ModulesToSaveWrapper" and is_above_base(model, name):
            continue  # a classifier's head, of which PEFT keeps a frozen and a trained one
        elif _is_of_peft(module) or hasattr(module, "base_layer"):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise ValueError(
                f"{name} ({kind}) has no form over a mesh, where adapters are LoRA of linear layers; leave it out of "
                "the adapter's configuration (target_modules, modules_to_save), put it into the weights first "
                f"(merge_and_unload()), {_ELSE}"
            )


def is_above_base(model: Any, name: str) -> bool:
    """True if the module ``name`` belongs to a classifier and not to its base model."""
    is_classifier = getattr(model, "loss_type", None) in _LABELLED and model.base_model is not model
    return is_classifier and not name.startswith(f"{model.base_model_prefix}.")


def is_adapted(module: nn.Module) -> bool:
    """True for PEFT's LoRA of a linear layer."""
    return (type(module).__module__, type(module).__name__) == _LORA


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def base_of(module: nn.Module) -> Any:
    """The layer below an adapter, or ``module`` itself."""
    return module.base_layer if is_adapted(module) else module


def base_name(module: nn.Module, name: str) -> str:
    """The name of :func:`base_of`, given the module's name."""
    return f"{name}.base_layer" if is_adapted(module) else name


def with_adapter(module: nn.Module, name: str, base: Layer2D, made: nn.Module, parts: Sequence[int] = ()) -> nn.Module:
    """``made``, or the adapter of ``module`` around it.

    Args:
        module: a linear layer, whose adapters are sharded in place.
        name: its name in the model.
        base: computes the product; the kinds of A and B follow from its class.
        made: replaces the layer below the adapter.
        parts: features of each part of ``base``'s output, if ``module`` has several of them.
    """
    if not is_adapted(module):
        return made
    _divide(module, name, base, parts)
    module.base_layer = made
    return module


def _divide(module: Any, name: str, base: Layer2D, parts: Sequence[int]) -> None:
    """Replaces A and B of all adapters of ``module``, in place."""
    narrow, wide = _PAIRS[type(base)]
    sharded = {"parts": parts} if parts else {}
    for key in module.lora_A:
        module.lora_A[key] = _made(module.lora_A[key], f"{name}.lora_A.{key}", narrow, base)
        module.lora_B[key] = _made(module.lora_B[key], f"{name}.lora_B.{key}", wide, base, **sharded)
    module.merge = functools.partial(_refuse_merge, name)


def _made(linear: nn.Linear, name: str, kind: type[Any], base: Layer2D, **options: Any) -> Layer2D:
    if linear.bias is not None or kind in (ColumnLinear1D, RowLinear1D):
        options["bias"] = linear.bias is not None
    weight = linear.weight
    sizes = linear.in_features, linear.out_features
    made = kind(*sizes, base.group, dtype=weight.dtype, device=weight.device, **options)
    for key, whole in linear.named_parameters():
        made.take(key, {f"{name}.{key}": whole})
    return made.train(linear.training)


def _check_lora(name: str, module: Any) -> None:
    variants = sorted({type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()})
    if variants or any(getattr(module, "use_dora", {}).values()):
        why = (
            f"has a variant of LoRA ({', '.join(variants) or 'DoRA'}), of which plain LoRA alone has a form over a "
            f"mesh; leave its key (such as use_dora) out of LoraConfig, {_ELSE}"
        )
    elif module.merged_adapters:
        merged = ", ".join(module.merged_adapters)
        why = f"has adapters that are part of its weights now ({merged}); call unmerge_adapter() or merge_and_unload()"
    else:
        return
    raise ValueError(f"{name} ({type(module).__module__}.{type(module).__name__}) {why}")


def _refuse_merge(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{name} has a part of its matrices on each rank, and cannot be merged there; load engine.state_dict() into a "
        "model of one process, and merge that"
    )

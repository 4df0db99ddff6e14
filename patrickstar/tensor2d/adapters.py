"""PEFT's LoRA on a mesh: the frozen base is sharded as without adapters, and A and B with it.

PEFT's own layer stays, with sharded layers as its ``base_layer``, ``lora_A`` and ``lora_B``. So dropout, scaling,
several adapters and ``disable_adapter`` are PEFT's. PEFT is not imported.

Adapter dropout needs no common seed: each rank has other elements of the input. In two dimensions these are its
column's features of its row's samples; in one, its tokens or features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
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
_ELSE = "or train it without tensor_parallel, where a frozen base may leave the GPU"


def check_adapters(model: nn.Module) -> None:
    """Raises ValueError, naming the module, if PEFT has put something into ``model`` that cannot be sharded."""
    if _is_of_peft(model):
        raise ValueError(f"{type(model).__name__} is PEFT's; divide the model inside, which its get_base_model() gives")
    for name, module in model.named_modules():
        if is_adapted(module):
            _check_lora(name, module)
        elif _is_of_peft(module) or hasattr(module, "base_layer"):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise ValueError(
                f"{name} ({kind}) has no form over a mesh, where adapters are LoRA of linear layers; leave it out of "
                "the adapter's configuration (target_modules, modules_to_save), put it into the weights first "
                f"(merge_and_unload()), {_ELSE}"
            )


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


def with_adapters(base: Layer2D, modules: Sequence[nn.Module], names: Sequence[str], parts: Sequence[int]) -> nn.Module:
    """``base`` with the adapters of the layers that it replaces.

    Args:
        base: replaces all ``modules``, outputs concatenated.
        modules: linear layers, some with adapters, which are sharded in place.
        names: their names in the model.
        parts: features of each part of ``base``'s output.
    """
    if len(modules) == 1:
        if not is_adapted(modules[0]):
            return base
        _divide(modules[0], names[0], base, parts if len(parts) > 1 else ())
        modules[0].base_layer = base
        return modules[0]
    adapted = {}
    for index, (module, name) in enumerate(zip(modules, names, strict=True)):
        if is_adapted(module):
            _divide(module, name, base, ())
            module.base_layer = GivenProduct()
            adapted[index] = module
    return AdaptedParts(base, parts, adapted) if adapted else base


def keep_places(made: nn.Module, module: nn.Module) -> None:
    """Adds the adapted layers of ``module`` to its replacement ``made``, as its first children and under their old
    names. PEFT finds an adapter's values in a state dict by these names.

    Raises:
        ValueError: an adapted layer is no direct child of ``module``.
    """
    adapted = {name: child for name, child in module.named_modules() if child is not made and is_adapted(child)}
    for name in adapted:
        if name not in module._modules:
            raise ValueError(
                f"{name} of a {type(module).__name__} has an adapter; give it a style of its own in `plan`"
            )
    made._modules = {**adapted, **made._modules}


class AdaptedParts(nn.Module):
    """A fused layer of several, some with adapters: one product of the base, plus each adapter's output on its part.

    Args:
        base: computes all parts, concatenated.
        parts: features of each part, over all ranks.
        adapted: PEFT's layers, by index of their part.
    """

    def __init__(self, base: Layer2D, parts: Sequence[int], adapted: Mapping[int, nn.Module]):
        super().__init__()
        self.base = base
        self.parts = tuple(parts)
        self.adapted = nn.ModuleDict({str(index): module for index, module in adapted.items()})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output of ``base`` plus each adapter's; shapes are those of ``base``."""
        product = self.base(hidden)
        ranks = sum(self.parts) // product.shape[-1]
        found = list(product.split([size // ranks for size in self.parts], dim=-1))
        for index, module in self.adapted.items():
            found[int(index)] = module(hidden, product=found[int(index)])
        return torch.cat(found, dim=-1)


class GivenProduct(nn.Module):
    """A base layer that returns a precomputed product; PEFT's layer passes it on as a keyword."""

    def forward(self, hidden: torch.Tensor, *, product: torch.Tensor) -> torch.Tensor:
        """Returns ``product``, which the fused base computed from ``hidden``."""
        return product


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

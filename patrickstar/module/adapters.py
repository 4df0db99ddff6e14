"""PEFT adapters on models that are on the meta device.

PEFT creates an adapter on the device of its base layer, so on the meta device the adapter's initial values are lost.
Once the adapter has memory, PEFT's own initialiser draws them again. Copies in ``modules_to_save`` get the values of
their originals. PEFT need not be installed: its layers are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C


def is_adapted(module: nn.Module) -> bool:
    """Tests for a PEFT wrapper: a module with a ``base_layer``."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def adapter_modules(layer: nn.Module) -> list[nn.Module]:
    """Submodules that the adapter adds to ``base_layer``, children before parents."""
    base = set(layer.base_layer.modules())
    return [module for module in post_order(layer) if module not in base]


def adapted_layers(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Maps each adapter submodule inside ``module`` to its innermost adapted layer; base layers are not included."""
    owners: dict[nn.Module, nn.Module] = {}
    for layer in module.modules():
        if is_adapted(layer):
            owners |= dict.fromkeys(adapter_modules(layer), layer)
    return owners


def copies_of_tensors(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (copy, original) of the parameters and buffers under ``modules_to_save``."""
    for wrapper in module.modules():
        original, copies = getattr(wrapper, "original_module", None), getattr(wrapper, "modules_to_save", None)
        if not isinstance(original, nn.Module) or not isinstance(copies, nn.ModuleDict):
            continue
        for copy in copies.values():
            yield from zip(copy.parameters(), original.parameters(), strict=True)
            yield from zip(copy.buffers(), original.buffers(), strict=True)


def adapter_configs(root: nn.Module) -> dict[str, Any]:
    """PEFT's configurations in ``root``, by adapter name."""
    found: dict[str, Any] = {}
    for module in root.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict):
            found |= configs
    return found


def draw_values(root: nn.Module, layer: nn.Module, configs: Mapping[str, Any]) -> None:
    """Initialises the adapters of ``layer`` with PEFT's initialiser; they must have memory.

    Args:
        root: names the layer in errors.
        layer: a module of ``root``.
        configs: the result of :func:`adapter_configs`.

    Raises:
        ValueError: the adapter is not LoRA, or its values derive from the base's.
    """
    if not hasattr(layer, "reset_lora_parameters"):
        raise _without_values(root, layer, f"a {type(layer).__name__}")
    for adapter in dict.fromkeys([*layer.lora_A, *layer.lora_embedding_A]):
        init = getattr(configs.get(adapter), "init_lora_weights", True)
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise _without_values(root, layer, f"{type(variant).__name__} of adapter {adapter!r}")
        if init is False:
            for leaf in (layer.lora_A, layer.lora_B):
                if adapter in leaf:
                    leaf[adapter].reset_parameters()
        elif init is not True and str(init).lower() != "gaussian":
            raise _without_values(root, layer, f"init_lora_weights={init!r} of adapter {adapter!r}")
        layer.reset_lora_parameters(adapter, init)


def draw_adapters(root: nn.Module) -> None:
    """Allocates LoRA adapters that are on the meta device, on the CPU, and initialises them with PEFT's initialiser.

    Raises:
        ValueError: as :func:`draw_values`.
    """
    configs = adapter_configs(root)
    for layer in [module for module in root.modules() if is_adapted(module)]:
        leaves = [leaf for leaf in adapter_modules(layer) if any(param.is_meta for param in leaf.parameters(False))]
        if leaves:
            with _C.HostAllocations():
                for leaf in leaves:
                    leaf.to_empty(device="cpu", recurse=False)
                draw_values(root, layer, configs)


def _without_values(root: nn.Module, layer: nn.Module, what: str) -> ValueError:
    name = next(name for name, module in root.named_modules() if module is layer)
    return ValueError(
        f"{name} is on the meta device and has adapters that are made of their base's values ({what}), which are not "
        "in memory yet; load the model with from_pretrained of transformers, and say quantization in the "
        "configuration where it is wanted"
    )


def post_order(module: nn.Module) -> list[nn.Module]:
    """The submodules of ``module``, children first, and ``module`` itself."""
    return [*(inner for child in module.children() for inner in post_order(child)), module]

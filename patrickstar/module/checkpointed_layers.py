"""Modules that can checkpoint their activations: Hugging Face's, with the attribute ``gradient_checkpointing``.

``gradient_checkpointing_enable`` of a model sets that attribute on its layers, or on the model that calls them. It also
gives each the function that it checkpoints with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_WRAPPED_FORWARD = "forward_with_checkpointing"
"""Name of the code of a layer's ``forward`` that checkpoints itself (transformers 5.23)."""


def checkpointable_modules(module: nn.Module) -> list[nn.Module]:
    """Modules inside ``module``, itself included, that can checkpoint, whether or not checkpointing is on."""
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def is_checkpointing(module: nn.Module) -> bool:
    """Tests whether ``module`` itself checkpoints now."""
    return bool(getattr(module, "gradient_checkpointing", False))


def checkpoints_itself(module: nn.Module) -> bool:
    """True if a call of ``module`` would now run a checkpoint within its ``forward``. Before transformers 5.23 the
    checkpoint was outside of it.
    """
    code = getattr(type(module).forward, "__code__", None)
    is_wrapped = code is not None and code.co_name == _WRAPPED_FORWARD
    return is_wrapped and is_checkpointing(module) and module.training and torch.is_grad_enabled()


def run_checkpointed(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checkpoints ``call``, which runs ``module``, outside of it. Caches are left out as the module itself would."""
    changed = {"use_cache": False}
    if not getattr(module, "_can_checkpoint_with_cache", False):
        changed |= {"past_key_values": None, "layer_past": None}
    kwargs = kwargs | {name: value for name, value in changed.items() if name in kwargs}

    def run(*args: Any) -> Any:
        module.gradient_checkpointing = False
        try:
            return call(*args, **kwargs)
        finally:
            module.gradient_checkpointing = True

    return module._gradient_checkpointing_func(run, *args)


def is_checkpointed(module: nn.Module) -> bool:
    """True if layers in ``module`` are checkpointed."""
    return any(map(is_checkpointing, checkpointable_modules(module)))


def turn_on_checkpoints(module: nn.Module) -> bool:
    """Lets the outermost Hugging Face model in ``module`` checkpoint its layers. False if it has none that can, or
    checkpoints already.
    """
    if is_checkpointed(module):
        return False
    for child in module.modules():
        if getattr(child, "supports_gradient_checkpointing", False):
            child.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return is_checkpointed(module)
    return False

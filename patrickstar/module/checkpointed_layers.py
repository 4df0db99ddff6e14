"""Modules that can checkpoint their activations: Hugging Face's, with the attribute ``gradient_checkpointing``.

``gradient_checkpointing_enable`` of a model sets that attribute on its layers, or on the model that calls them. It also
gives each the function that it checkpoints with.
"""

from __future__ import annotations

from torch import nn


def checkpointable_modules(module: nn.Module) -> list[nn.Module]:
    """Modules inside ``module``, itself included, that can checkpoint, whether or not checkpointing is on."""
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def is_checkpointing(module: nn.Module) -> bool:
    """Tests whether ``module`` itself checkpoints now."""
    return bool(getattr(module, "gradient_checkpointing", False))


def turn_on_checkpoints(module: nn.Module) -> bool:
    """Lets the outermost Hugging Face model in ``module`` checkpoint its layers. False if it has none that can, or
    checkpoints already.
    """
    if any(map(is_checkpointing, checkpointable_modules(module))):
        return False
    for child in module.modules():
        if getattr(child, "supports_gradient_checkpointing", False):
            child.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return any(map(is_checkpointing, checkpointable_modules(module)))
    return False

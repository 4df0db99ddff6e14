"""Which modules checkpoint their activations: those of Hugging Face, which say so by ``gradient_checkpointing``.

``gradient_checkpointing_enable`` of a model switches that attribute on its layers, or on a model that calls them.
"""

from __future__ import annotations

from torch import nn


def checkpointable_modules(module: nn.Module) -> list[nn.Module]:
    """Those inside of ``module``, itself included, that can checkpoint, whether they do so now or not."""
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def is_checkpointing(module: nn.Module) -> bool:
    """Whether ``module`` itself does so now."""
    return bool(getattr(module, "gradient_checkpointing", False))

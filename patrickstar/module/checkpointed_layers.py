"""Modules that can checkpoint their activations: Hugging Face's, with the attribute ``gradient_checkpointing``.

``gradient_checkpointing_enable`` of a model sets that attribute on its layers, or on the model that calls them. It also
gives each the function that it checkpoints with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpointable_modules(module: nn.Module) -> list[nn.Module]:
    """Modules inside ``module``, itself included, that can checkpoint, whether or not checkpointing is on."""
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def is_checkpointing(module: nn.Module) -> bool:
    """Tests whether ``module`` itself checkpoints now."""
    return bool(getattr(module, "gradient_checkpointing", False))


def options_of_checkpoint(module: nn.Module) -> dict[str, Any] | None:
    """The keywords with which ``module`` calls ``torch.utils.checkpoint.checkpoint`` now.

    Returns:
        None if the module does not checkpoint, or uses another function, ``use_reentrant=True`` or its own
        ``context_fn``.
    """
    function = vars(module).get("_gradient_checkpointing_func")
    if not is_checkpointing(module) or not isinstance(function, functools.partial):
        return None
    options = function.keywords
    is_plain = function.func is checkpoint and not function.args and "context_fn" not in options
    return options if is_plain and options.get("use_reentrant") is False else None


@contextlib.contextmanager
def replaced_checkpoints(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``modules`` call ``run(module, function, call, *args)`` instead of their checkpoint
    ``function(call, *args)``. Modules without ``options_of_checkpoint`` are left alone.
    """
    replaced = []
    try:
        for module in modules:
            if options_of_checkpoint(module) is not None:
                function: Any = module._gradient_checkpointing_func
                replaced.append((module, function))
                module._gradient_checkpointing_func = functools.partial(run, module, function)
        yield
    finally:
        for module, function in replaced:
            module._gradient_checkpointing_func = function

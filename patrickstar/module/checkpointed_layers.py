"""Which modules checkpoint their activations: those of Hugging Face, which say so by ``gradient_checkpointing``.

``gradient_checkpointing_enable`` of a model switches that attribute on its layers, or on a model that calls them, and
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
    """Those inside of ``module``, itself included, that can checkpoint, whether they do so now or not."""
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def is_checkpointing(module: nn.Module) -> bool:
    """Whether ``module`` itself does so now."""
    return bool(getattr(module, "gradient_checkpointing", False))


def options_of_checkpoint(module: nn.Module) -> dict[str, Any] | None:
    """The keywords with which ``module`` calls ``torch.utils.checkpoint.checkpoint`` now. None: it does not checkpoint,
    or otherwise: with another function, ``use_reentrant=True``, or a ``context_fn`` of its own.
    """
    function = vars(module).get("_gradient_checkpointing_func")
    if not is_checkpointing(module) or not isinstance(function, functools.partial):
        return None
    options = function.keywords
    is_plain = function.func is checkpoint and not function.args and "context_fn" not in options
    return options if is_plain and options.get("use_reentrant") is False else None


@contextlib.contextmanager
def replaced_checkpoints(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Within it, those of ``modules`` that have ``options_of_checkpoint`` call ``run(module, function, call, *args)``
    instead of ``function(call, *args)``, their checkpoint of ``call(*args)``.
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

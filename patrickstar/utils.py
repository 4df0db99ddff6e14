"""The parts of ``deepspeed.utils`` that scripts use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from patrickstar.deepspeed.full_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from patrickstar.deepspeed.local_values import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
]

logger = logging.getLogger("patrickstar")


class RepeatingLoader:
    """Restarts ``loader`` when it ends."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes, given by type or by name. Accepted without effect: modules whose uses change from
    step to step, or from rank to rank, need no mark.

    Raises:
        ValueError: there is none, and ``raise_if_not_found``.
    """
    kinds = list(leaf_module_classes)
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    found = [module for module in model.modules() if isinstance(module, types) or _is_named(type(module), kinds)]
    if raise_if_not_found and not found:
        raise ValueError(f"the model has no module of {kinds}; give classes, or their names, that it has")
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Returns the same modules; there is nothing to undo."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)


def _is_named(cls: type, names: list[Any]) -> bool:
    return cls.__name__ in names or f"{cls.__module__}.{cls.__qualname__}" in names

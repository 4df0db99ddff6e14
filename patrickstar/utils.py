"""``deepspeed.utils``: what scripts use of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from patrickstar.full_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
]

logger = logging.getLogger("patrickstar")


class RepeatingLoader:
    """Begins ``loader`` again when it ends."""

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


def set_z3_leaf_modules(model: Any, leaf_module_classes: Any) -> list[Any]:
    """Accepted: modules whose uses change from step to step need no mark."""
    return []

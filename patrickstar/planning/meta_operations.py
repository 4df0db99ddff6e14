"""Caches shapes of meta-device operations.

PyTorch computes most shapes in Python at half a millisecond each, which dominates the trace of a step. Layers repeat
the same calls, so results are cached by the arguments. Only operations that return new tensors are cached: neither
views nor arguments.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable
from typing import Any

import torch

_CONSTANTS = (
    bool,
    int,
    float,
    str,
    types.NoneType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


# Products of 16-bit matrices onto a float32 one (tensor2d/local_products.py). PyTorch 2.11 confuses the arguments in
# its meta function; older versions have no such operation.
_PRODUCT_ONTO = getattr(torch.ops.aten.addmm, "dtype_out", None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A new tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class MetaOperations:
    """Runs operations and caches their results' shapes."""

    def __init__(self) -> None:
        self._returned: dict[Hashable, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Hashable]:
        """Returns the result of ``func`` and a key that determines its shapes; None if no key does."""
        if func is _PRODUCT_ONTO:
            return kwargs["out"], None
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs), None
        key = _describe((func, args, *kwargs.items()))
        if key is None:
            return func(*args, **kwargs), None
        returned = self._returned.get(key)
        if returned is None:
            out = func(*args, **kwargs)
            returned = _remember(out, _storages((args, tuple(kwargs.values()))))
            if returned is None:
                return out, None
            self._returned[key] = returned
            return out, key
        if isinstance(returned, tuple):
            return tuple(item.again() if isinstance(item, _Made) else item for item in returned), key
        return returned.again(), key


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or value.dtype.is_complex:
            return None
        return value.dtype, value.size(), value.stride(), value.untyped_storage().nbytes()
    if isinstance(value, (tuple, list)):
        described = tuple(map(_describe, value))
        return None if None in described else described
    if isinstance(value, _CONSTANTS):
        return type(value), value
    return value if isinstance(value, torch._ops.OpOverload) else None


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, (tuple, list)):
        return set().union(*map(_storages, value))
    return set()


def _remember(out: Any, given: set[int]) -> _Made | tuple[Any, ...] | None:
    """Returns a recipe that recreates ``out``; None if there is none."""
    if isinstance(out, tuple):
        items = tuple(item if isinstance(item, _CONSTANTS) else _remember(item, given) for item in out)
        known = all(made is not None or item is None for made, item in zip(items, out, strict=True))
        storages = [item.untyped_storage()._cdata for item in out if isinstance(item, torch.Tensor)]
        return items if known and len(set(storages)) == len(storages) > 0 else None
    if not isinstance(out, torch.Tensor) or out.device.type != "meta" or out.storage_offset() != 0:
        return None
    made = _Made(out.size(), out.stride(), out.dtype)
    storage = out.untyped_storage()
    is_new = storage._cdata not in given and storage.nbytes() == made.again().untyped_storage().nbytes()
    return made if is_new and type(out) is torch.Tensor else None

"""Copies of values in chunks, for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from patrickstar.module.parameter_writes import may_write, written_tensors


class ReadOnlyCopy(torch.Tensor):
    """A copy of values in a chunk. Operations that would write it are refused, since the chunk would not change.
    Results are ordinary tensors; views are ``ReadOnlyCopy`` too.
    """

    _patrickstar_refusal: str

    @staticmethod
    def of(values: torch.Tensor, refusal: str) -> ReadOnlyCopy:
        """Wraps ``values``, whose memory is shared; ``refusal`` is the error of writes."""
        copy = values.as_subclass(ReadOnlyCopy)
        copy._patrickstar_refusal = refusal
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``func``, or returns NotImplemented if a ``ChunkedParameter`` among the arguments must handle it."""
        kwargs = kwargs or {}
        if may_write(func) or "out" in kwargs:
            for target in written_tensors(func, args, kwargs):
                if isinstance(target, ReadOnlyCopy):
                    raise RuntimeError(target._patrickstar_refusal)
        if not all(issubclass(cls, other) for other in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            source = next((arg for arg in args if isinstance(arg, ReadOnlyCopy)), None)
            if source is not None and type(result) is torch.Tensor and _share_memory(result, source):
                return ReadOnlyCopy.of(result, source._patrickstar_refusal)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copies to an ordinary tensor."""
        return memo.setdefault(id(self), self.detach().clone().as_subclass(torch.Tensor))

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as an ordinary tensor."""
        return self.detach().clone().as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata

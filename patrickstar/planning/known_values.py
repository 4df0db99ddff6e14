"""Values of tensors on the meta device that follow from a step's inputs, such as the mask of image tokens.

Shapes and branches of vision-language models depend on them: on grids of patches, positions and counts. Each known
tensor has a counterpart on the CPU, on which its operations run as well. Values that depend on a parameter are unknown.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from patrickstar.planning.meta_operations import MetaOperations
from patrickstar.planning.operation_costs import tensors_in

_ATEN = torch.ops.aten
_EMPTY = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
_CPU, _META = torch.device("cpu"), torch.device("meta")
_MOST_ELEMENTS = 2**24
"""Elements of a known tensor that is neither a view nor as large as an input. Masks of [tokens, tokens] have more."""


class KnownValues:
    """Follows the values of inputs through operations on the meta device."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()
        self._most_elements = _MOST_ELEMENTS

    def on_meta(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor on the meta device that has ``values`` in another dtype."""
        there = torch.empty_like(values, device=_META, dtype=dtype)
        self._values[there] = values.to(_CPU, dtype)
        self._most_elements = max(self._most_elements, values.numel())
        return there

    def keeping_numbers(self) -> contextlib.AbstractContextManager[object]:
        """Context in which tensors that are made of Python numbers are known; empty if no input is."""
        return _KeptNumbers() if self._values else contextlib.nullcontext()

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor's values on the CPU; None: unknown."""
        return tensor if tensor.device == _CPU else self._values.get(tensor)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_meta: Callable[..., tuple[Any, Hashable]]
    ) -> tuple[Any, Hashable]:
        """Returns what ``on_meta`` returns, also where values tell the shape of a result.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            on_meta: runs the operation on the meta device (``MetaOperations.run``).

        Raises:
            NotImplementedError: unknown values tell the shape.
        """
        if not self._values:
            return on_meta(func, args, kwargs)
        is_known = self._knows((args, kwargs)) and not _is_arbitrary(func)
        if is_known and _reads_values(func, args, kwargs):
            return self._on_cpu(func, args, kwargs), None
        if torch.Tag.dynamic_output_shape in func.tags:
            if is_known:
                values = self._on_cpu(func, args, kwargs)
                out = tree_map_only(torch.Tensor, lambda tensor: tensor.to(_META), values)
                self._record(out, values)
                return out, None
            if func is _ATEN.index.Tensor:
                args = (args[0], [place for index in args[1] for place in self._places(index)])
        out, key = on_meta(func, args, kwargs)
        made = tensors_in(out)
        if is_known and any(tensor.is_meta for tensor in made) and self._is_small(func, made):
            self._record(out, self._on_cpu(func, args, kwargs))
        elif func._schema.is_mutable:
            self._forget(made or tensors_in((args, kwargs)))
        return out, key

    def _knows(self, given: Any) -> bool:
        return all(self.find(tensor) is not None for tensor in tensors_in(given))

    def _is_small(self, func: Any, made: list[torch.Tensor]) -> bool:
        return func.is_view or all(tensor.numel() <= self._most_elements for tensor in made)

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known_args, known_kwargs = tree_map_only(torch.Tensor, self.find, (args, kwargs))
        if kwargs.get("device") is not None:
            known_kwargs["device"] = _CPU
        return func(*known_args, **known_kwargs)

    def _record(self, out: Any, values: Any) -> None:
        for tensor, known in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._values[tensor] = known

    def _forget(self, written: list[torch.Tensor]) -> None:
        """Forgets tensors, and all that share memory with them. Views of known tensors are known, too."""
        storages = {tensor.untyped_storage()._cdata for tensor in written if tensor in self._values}
        if not storages:
            return
        for tensor in [key for key in self._values if key.untyped_storage()._cdata in storages]:
            del self._values[tensor]

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The index on the meta device. A mask becomes the places of its true elements, by dimension."""
        values = None if index is None else self.find(index)
        if index is None or values is None or values.dtype is not torch.bool:
            return [index]
        return [torch.empty(_num_true(values), dtype=torch.long, device=_META) for _ in range(values.dim())]


class _KeptNumbers(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU first: ``torch.tensor`` on the meta device drops the numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        device = kwargs.pop("device", None)
        numbers = tree_map_only(torch.Tensor, torch.Tensor.item, args[0])
        return func(numbers, *args[1:], **kwargs).to(device or "cpu")


class ValuesMode(TorchDispatchMode):
    """Runs operations on the meta device, and follows the values of their arguments."""

    def __init__(self, values: KnownValues):
        super().__init__()
        self._values, self._operations = values, MetaOperations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.run(func, args, kwargs or {}, self._operations.run)[0]


def _num_true(mask: torch.Tensor) -> int:
    """Number of true elements. Expanded dimensions are not read again and again."""
    expanded = [dim for dim, stride in enumerate(mask.stride()) if stride == 0]
    own = mask[tuple(slice(0, 1) if dim in expanded else slice(None) for dim in range(mask.dim()))]
    return int(own.sum()) * math.prod(mask.shape[dim] for dim in expanded)


def _is_arbitrary(func: Any) -> bool:
    """True for operations whose results do not follow from their arguments."""
    return func.overloadpacket in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a copy to the CPU or to a number."""
    is_copied = func is _ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") == _CPU
    return is_copied or func is _ATEN._local_scalar_dense.default

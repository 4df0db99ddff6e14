"""A module's buffers: detection of changes in place, and those that are saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from patrickstar.module.compiled.dynamo import without_wrappers

SPARSE_BUFFER_REMEDY = (
    "checkpoints and exports have dense tensors only; register it with persistent=False and make it when the model is "
    "built, or register its indices and values"
)


@dataclasses.dataclass(frozen=True)
class BufferPlace:
    """A module's dict of buffers, and the name of one of them."""

    buffers: dict[str, torch.Tensor | None]
    name: str
    is_statistic: bool

    def observe(self) -> ObservedBuffer | None:
        """Starts observing the buffer; None if it is absent now."""
        buffer = self.buffers.get(self.name)
        if buffer is None:
            return None
        return ObservedBuffer(buffer, self.buffers.get("num_batches_tracked") if self.is_statistic else None)


class ObservedBuffer:
    """A buffer and its version at the start of observation.

    PyTorch counts a tensor's in-place changes in its version. Batch norm kernels change running statistics without
    that; their layer changes ``counter`` with them.
    """

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor | None):
        self.tensor = tensor
        self._counter = counter
        self._version = self._current_version()

    def has_changed(self) -> bool:
        """Tests whether the elements were written since."""
        return self._current_version() != self._version

    def _current_version(self) -> int:
        return _version(self.tensor) + (_version(self._counter) if self._counter is not None else 0)


def buffer_places(module: nn.Module) -> list[BufferPlace]:
    """Buffers of ``module`` and its submodules, in state-dict order."""
    return [
        BufferPlace(child._buffers, name, isinstance(child, _NormBase))
        for child in module.modules()
        for name in child._buffers.keys()  # noqa: SIM118 - those of a ScriptModule cannot be iterated otherwise
    ]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of a ``state_dict``, by name."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield without_wrappers(f"{prefix}.{name}".lstrip(".")), buffer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

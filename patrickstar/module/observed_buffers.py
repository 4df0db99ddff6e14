"""Which buffers of a module were changed in place since one last looked."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@dataclasses.dataclass(frozen=True)
class BufferPlace:
    """Where a module keeps a buffer: ``buffers`` is the module's dict of them."""

    buffers: dict[str, torch.Tensor | None]
    name: str
    is_statistic: bool

    def observe(self) -> ObservedBuffer | None:
        """The buffer that is there as it is now; None: there is none."""
        buffer = self.buffers.get(self.name)
        if buffer is None:
            return None
        return ObservedBuffer(buffer, self.buffers.get("num_batches_tracked") if self.is_statistic else None)


class ObservedBuffer:
    """A buffer, and whether it changes from now on.

    PyTorch counts a tensor's changes in place in its version; those of running statistics, which kernels of batch norm
    make by themselves, are counted by the ``counter`` that their layer changes beside them.
    """

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor | None):
        self.tensor = tensor
        self._counter = counter
        self._version = self._current_version()

    def has_changed(self) -> bool:
        """Whether its elements were written since."""
        return self._current_version() != self._version

    def _current_version(self) -> int:
        return _version(self.tensor) + (_version(self._counter) if self._counter is not None else 0)


def buffer_places(module: nn.Module) -> list[BufferPlace]:
    """Of ``module`` and all inside it, in the order of their names in a state dict."""
    return [
        BufferPlace(child._buffers, name, isinstance(child, _NormBase))
        for child in module.modules()
        for name in child._buffers
    ]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

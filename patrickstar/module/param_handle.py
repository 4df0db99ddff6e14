"""``ParamHandle``: the record that a parameter in chunks carries."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from patrickstar import _C


class HandleObserver(Protocol):
    """The members of ``Observer`` that a parameter and its writes use."""

    uses: _C.UseObserver
    forward_writes: Any
    """See ``ForwardWrites``."""
    overwritten: Any
    """See ``OverwrittenMasters``."""
    gradients: Any
    """See ``GradientReader``."""

    def read_values(self, handle: ParamHandle, kind: _C.ArrayKind) -> torch.Tensor:
        """See ``Observer``."""

    def write_values(self, handle: ParamHandle, kind: _C.ArrayKind, values: torch.Tensor) -> None:
        """See ``Observer``."""

    def clear_gradient(self, handle: ParamHandle) -> None:
        """See ``Observer``."""


@dataclasses.dataclass(eq=False, slots=True)
class ParamHandle:
    """State of one chunked parameter."""

    id: int
    """Id in the core: the index in registration order among chunked parameters."""
    name: str
    """Name in the user's module."""
    chunk: int
    """Index of its chunk."""
    storage: int
    """Address of the chunk's storage object; all parameters and views of the chunk share it."""
    shape: torch.Size
    """Shape of the whole parameter, on any number of ranks."""
    stride: tuple[int, ...]
    """Strides in elements: dense, in the memory order the user gave it."""
    offset: int
    """Offset in the chunk, in elements."""
    share: slice
    """This rank's shard of its elements, in memory order."""
    dtype: torch.dtype
    """The compute dtype."""
    trainable: bool
    """True for a parameter that the optimizer updates. It required a gradient and was in a parameter group when the
    engine was built, or was added later (:mod:`patrickstar.session.trained_params`).
    """
    original_dtype: torch.dtype
    """Dtype in the user's module."""
    original_device: torch.device
    """Device in the user's module."""
    observer: HandleObserver
    """Receives uses; reads and writes values."""
    uses: _C.UseObserver
    """``observer.uses``: the core's object that torch functions report uses to."""

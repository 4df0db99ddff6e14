"""``ParamHandle``: the record that a parameter in chunks carries."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Protocol

import torch

from patrickstar import _C
from patrickstar.module.param_ranks import RankPart


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
    """Shape of the parameter, or of this rank's part of it."""
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
    part: RankPart | None = None
    """This rank's part of the parameter; None: ranks share it."""
    views: weakref.WeakValueDictionary[int, torch.Tensor] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )
    """Live views of its memory that autograd does not know, such as ``param.data``, by their ``id``."""

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.shape if self.part is None else self.part.shape_of_whole(self.shape)

    @property
    def whole_begin(self) -> int:
        """Elements of the whole parameter before this rank's part."""
        return 0 if self.part is None else self.part.index * self.shape.numel()

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """The whole tensor, of ``values`` of :attr:`shape` on the CPU. Collective if ranks have parts."""
        return values if self.part is None else self.part.gather(values)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this rank's part of a whole tensor."""
        return whole if self.part is None else self.part.of(whole)

"""Parameters in chunks that a running forward writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.module.chunked_parameter import ParamHandle


class ForwardWrites:
    """Masters that the present forward has overwritten first, in host memory, so that it can be undone.

    Args:
        most_bytes: of all of them together; parameters beyond that are :attr:`lost`.
    """

    def __init__(self, most_bytes: int = 0):
        self._most_bytes = most_bytes
        self._masters: dict[ParamHandle, torch.Tensor] = {}
        self.is_on = False
        """A forward runs that may be undone."""
        self.lost: list[str] = []
        """The names of parameters whose values of before are not there any more."""

    def begin(self) -> None:
        """A forward begins."""
        self._masters.clear()
        self.lost = []
        self.is_on = True

    def end(self) -> None:
        """The forward is over, and nobody will undo it."""
        self._masters.clear()
        self.is_on = False

    def note(self, handle: ParamHandle, masters: torch.Tensor) -> None:
        """``masters``, of which this has the only reference, are overwritten."""
        if not self.is_on or handle in self._masters or handle.name in self.lost:
            return
        if sum(kept.nbytes for kept in self._masters.values()) + masters.nbytes > self._most_bytes:
            self.lost.append(handle.name)
        else:
            self._masters[handle] = masters

    def undo(self) -> None:
        """Writes them back."""
        for handle, masters in self._masters.items():
            handle.observer.write_values(handle, _C.ArrayKind.MASTER, masters)
        self._masters.clear()

"""Undo of parameter writes within a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.module.param_handle import ParamHandle


class ForwardWrites:
    """Masters that the running forward has overwritten, copied to host memory so that the forward can be undone.

    Args:
        most_bytes: limit of all copies together; names of parameters beyond it go to :attr:`lost`.
    """

    def __init__(self, most_bytes: int = 0):
        self._most_bytes = most_bytes
        self._masters: dict[ParamHandle, torch.Tensor] = {}
        self.is_on = False
        """True while a forward runs that may be undone."""
        self.lost: list[str] = []
        """Names of parameters whose earlier values were not kept."""

    def begin(self) -> None:
        """Begins a forward; earlier copies are dropped."""
        self._masters.clear()
        self.lost = []
        self.is_on = True

    def end(self) -> None:
        """Ends the forward and drops the copies."""
        self._masters.clear()
        self.is_on = False

    def note(self, handle: ParamHandle, masters: torch.Tensor) -> None:
        """Keeps ``masters``, which are overwritten now. The caller gives up its reference."""
        if not self.is_on or handle in self._masters or handle.name in self.lost:
            return
        if sum(kept.nbytes for kept in self._masters.values()) + masters.nbytes > self._most_bytes:
            self.lost.append(handle.name)
        else:
            self._masters[handle] = masters

    def undo(self) -> None:
        """Writes the kept masters back."""
        for handle, masters in self._masters.items():
            handle.observer.write_values(handle, _C.ArrayKind.MASTER, masters)
        self._masters.clear()

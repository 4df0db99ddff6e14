"""The ranks of an engine as the peers of a checkpoint."""

from __future__ import annotations

from patrickstar import _C


class RankPeers:
    """An engine's ranks as ``checkpoint.Peers``, over a control group of theirs."""

    def __init__(self, control: _C.collective.ControlGroup):
        self._control = control
        self.rank = control.rank
        self.size = control.size

    def exchange(self, message: bytes) -> list[bytes]:
        """All ranks' messages, by rank, on every rank."""
        return self._control.exchange(message)

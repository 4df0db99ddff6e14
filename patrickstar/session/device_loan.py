"""The user of a device's memory: the engine, or others while it is lent (lending.py)."""

from __future__ import annotations

import enum

from patrickstar import _C


class Holder(enum.Enum):
    """The user of the device's memory."""

    ENGINE = enum.auto()
    OTHERS = enum.auto()


class DeviceLoan:
    """Holder of one engine's device memory.

    Attributes:
        room_bytes: for chunks and activations when the loan began.
    """

    def __init__(self) -> None:
        self.holder = Holder.ENGINE
        self.room_bytes = 0

    def check(self) -> None:
        """Raises StateError during a loan."""
        if self.holder is Holder.OTHERS:
            raise _C.StateError(
                "the engine's device memory is lent; leave the block of engine.lend(), or call reload_states(), first"
            )

"""The limits by which activations leave the device between forward and backward: of an engine, and of a plan for it.

An engine acts by them (patrickstar/engine/stashed_activations.py, [Note: kept activations]; kept_attention.py,
[Note: kept attention]), and patrickstar/planning/leaving.py plays what it does.

[Note: what stays] A byte of activations that leaves passes the link twice, and the byte of room that chunks get for it
saves them at most about one passage. So activations leave to make a step fit, and where they would take what chunks
live on, but not because the tide is high for one moment, as with the logits: what is kept would have left long before,
and come back after it. In the first step nobody knows what backward will need, and all activations together get half
of the device. From the second step on that is known (``working_bytes``), and what is kept may take a third of the
device beside it, as long as what is computed with has room, and the largest module's chunks twice: one in use, one on
its way.
"""

from __future__ import annotations

import dataclasses
import enum

LEAST_SHARE = 4096
"""Tensors of less than the device's memory divided by this stay, so that hooks cost little."""
MOST_LEAVING = 2
"""Tensors whose copies to the host run: so far may the launching thread be ahead of the device."""
LEAST_ATTENTION_TOKENS = 32768
"""Of fewer tokens attention is computed again unless the configuration says "always": host memory is worth more for
updates that start early then, and the link more for chunks.
"""

_FETCHED_AHEAD = 3  # how many tensors before its use the copy back of one begins
_FIRST_DIVISOR = 2  # of the device, what activations may take before anything is known of them
_KEPT_DIVISOR = 3  # of it, what is kept may take whatever is computed beside
_CHUNKS_DIVISOR = 6  # of it, what chunks have at least, and what PyTorch's cache wastes


def comes_ahead(number: int, used: int) -> bool:
    """True where the copy of tensor ``number`` to the device begins when tensor ``used`` is used in backward. Numbers
    count kept tensors in the order of the forward.
    """
    return 0 < used - number <= _FETCHED_AHEAD


class ActivationTier(enum.Enum):
    """Where the activations of one layer rest between its forward and its backward."""

    KEEP = "device"
    OFFLOAD = "host"
    RECOMPUTE = "nowhere"
    """The layer's input alone is kept, and goes by [Note: what stays]."""


@dataclasses.dataclass(frozen=True)
class SeenStep:
    """What the steps so far have shown of activations, all in bytes ([Note: working activations])."""

    working_bytes: int
    """The most that was alive beside what was kept."""
    highest_bytes: int
    """What plans leave to activations at the highest moment."""


@dataclasses.dataclass(frozen=True)
class DeviceShares:
    """How a device is shared between activations and chunks ([Note: what stays]).

    Attributes:
        device_bytes: the configuration's ``device_memory``.
        chunk_bytes: what the largest module's chunks and their gradients take (``_C.working_set_bytes``).
    """

    device_bytes: int
    chunk_bytes: int

    @property
    def first_bytes(self) -> int:
        """What activations may take in the first step."""
        return self.device_bytes // _FIRST_DIVISOR

    @property
    def least_bytes(self) -> int:
        """Of a tensor that may leave."""
        return self.device_bytes // LEAST_SHARE

    def most_bytes(self, working_bytes: int) -> int:
        """What they may take in later steps, with ``working_bytes`` beside what is kept."""
        room = self.device_bytes - max(self.device_bytes // _CHUNKS_DIVISOR, 2 * self.chunk_bytes)
        return max(self.first_bytes, min(room, working_bytes + self.device_bytes // _KEPT_DIVISOR))

    def seen(self, working_bytes: int, highest_bytes: int) -> SeenStep:
        """``highest_bytes``: the highest tide, had nothing left."""
        return SeenStep(working_bytes, min(highest_bytes, self.most_bytes(working_bytes)))

    def excess_bytes(self, held_bytes: int, beyond_bytes: int, seen: SeenStep) -> int:
        """How much must leave of ``held_bytes``, what is kept on the device. ``beyond_bytes`` of it autograd did not
        save by itself; these get no more than plans leave to activations.
        """
        needed = held_bytes + seen.working_bytes
        return max(needed - self.most_bytes(seen.working_bytes), min(needed - seen.highest_bytes, beyond_bytes))

    def has_room(self, num_bytes: int, held_bytes: int, host_bytes: int, seen: SeenStep) -> bool:
        """True where device and host can keep ``num_bytes`` that autograd would not save: the device beside
        ``held_bytes``, the host in ``host_bytes`` that are free.
        """
        on_device = seen.highest_bytes - seen.working_bytes - held_bytes
        return num_bytes <= max(on_device, 0) + max(host_bytes, 0)

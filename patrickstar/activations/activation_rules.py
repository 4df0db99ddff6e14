"""Limits by which activations leave the device between forward and backward, for an engine and for a plan.

``ActivationStash`` and ``KeptAttention`` apply these limits in an engine; patrickstar/planning/leaving.py simulates
them.
"""

from __future__ import annotations

import dataclasses
import enum

LEAST_SHARE = 4096
"""Smaller tensors than the device's memory divided by this stay on the device, so that hooks cost little."""
MOST_LEAVING = 2
"""Running copies of tensors to the host; limits how far the launching thread may run ahead of the device."""
LEAST_ATTENTION_TOKENS = 32768
"""With fewer tokens attention is recomputed unless the configuration says "always". Host memory then helps more for
updates that start early, and the link more for chunks.
"""

_FETCHED_AHEAD = 3  # tensors between the start of a copy to the device and its use
_FIRST_DIVISOR = 2  # share of the device: activations before the first measurement
_KEPT_DIVISOR = 3  # share of the device: kept activations beside working memory
_CHUNKS_DIVISOR = 6  # share of the device: least room for chunks and for waste of PyTorch's cache


def comes_ahead(number: int, used: int) -> bool:
    """True if the copy of tensor ``number`` to the device begins when backward uses tensor ``used``.

    Numbers count kept tensors in the order of the forward.
    """
    return 0 < used - number <= _FETCHED_AHEAD


class ActivationTier(enum.Enum):
    """Where one layer's activations rest between its forward and its backward."""

    KEEP = "device"
    OFFLOAD = "host"
    RECOMPUTE = "nowhere"
    """Only the layer's input is kept, and follows ``DeviceShares``."""


@dataclasses.dataclass(frozen=True)
class SeenStep:
    """Measurements of the steps so far, in bytes (see ``WorkingBytes``)."""

    working_bytes: int
    """Peak of live memory beside kept activations."""
    highest_bytes: int
    """Activation memory that plans reserve at the highest access of a step."""


@dataclasses.dataclass(frozen=True)
class DeviceShares:
    """How activations and chunks share a device.

    An activation byte that leaves crosses the link twice. The room that it frees saves chunks about one crossing. So
    activations leave only to make a step fit, and where they would take the room that chunks need. A short peak, as at
    the logits, is no reason: kept activations would have to leave long before it and return after it.

    The first step cannot know what backward needs, so all activations together get half of the device. From the second
    step on ``working_bytes`` is known, and kept activations may take a third of the device beside it. The remaining
    room
    must hold the largest module's chunks twice: one copy in use, one in transfer.

    Attributes:
        device_bytes: the configuration's ``device_memory``.
        chunk_bytes: bytes of the largest module's chunks and their gradients (``_C.working_set_bytes``).
    """

    device_bytes: int
    chunk_bytes: int

    @property
    def first_bytes(self) -> int:
        """Limit for activations in the first step."""
        return self.device_bytes // _FIRST_DIVISOR

    @property
    def least_bytes(self) -> int:
        """Size of the smallest tensor that may leave."""
        return self.device_bytes // LEAST_SHARE

    def most_bytes(self, working_bytes: int) -> int:
        """Limit for activations in later steps, with ``working_bytes`` beside kept ones."""
        room = self.device_bytes - max(self.device_bytes // _CHUNKS_DIVISOR, 2 * self.chunk_bytes)
        return max(self.first_bytes, min(room, working_bytes + self.device_bytes // _KEPT_DIVISOR))

    def seen(self, working_bytes: int, highest_bytes: int) -> SeenStep:
        """``highest_bytes``: peak of activation memory if nothing had left."""
        return SeenStep(working_bytes, min(highest_bytes, self.most_bytes(working_bytes)))

    def excess_bytes(self, held_bytes: int, beyond_bytes: int, seen: SeenStep) -> int:
        """Bytes that must leave the device.

        Args:
            held_bytes: kept activations on the device.
            beyond_bytes: their part that autograd did not save itself; limited to what plans reserve for activations.
            seen: measurements so far.
        """
        needed = held_bytes + seen.working_bytes
        return max(needed - self.most_bytes(seen.working_bytes), min(needed - seen.highest_bytes, beyond_bytes))

    def has_room(self, num_bytes: int, held_bytes: int, host_bytes: int, seen: SeenStep) -> bool:
        """True if device and host can keep ``num_bytes`` that autograd would not save.

        Args:
            num_bytes: to be kept.
            held_bytes: already kept on the device.
            host_bytes: free on the host.
            seen: measurements so far.
        """
        on_device = seen.highest_bytes - seen.working_bytes - held_bytes
        return num_bytes <= max(on_device, 0) + max(host_bytes, 0)

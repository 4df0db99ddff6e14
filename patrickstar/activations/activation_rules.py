"""Limits of activation offload and selective recomputation, shared by the engine and the planner.

The engine applies them (``OffloadStore``, ``SelectiveAttention``); patrickstar/planning/leaving.py simulates them.
"""

from __future__ import annotations

import dataclasses
import enum

LEAST_SHARE = 4096
"""Tensors below this share of the device's memory are not offloaded, so that hooks cost little."""
MOST_LEAVING = 2
"""Most tensors, or calls with products, being copied to the host: how far the launching thread may run ahead of the
device.
"""
LEAST_SENT_BYTES = 2**20
"""Smaller products stay on the device: a copy of 1 MiB has nine tenths of the link's bandwidth."""
LEAST_ATTENTION_TOKENS = 32768
"""With fewer tokens attention is recomputed unless the configuration says "always": host memory then helps early
updates more, and the link helps chunks more.
"""

_FETCHED_AHEAD = 3  # tensors between the begin of a copy to the device and its use
_FIRST_DIVISOR = 2  # share of activations before any measurement
_KEPT_DIVISOR = 3  # share of kept activations, whatever is computed beside them
_CHUNKS_DIVISOR = 6  # least share of chunks and of PyTorch's cache waste


def comes_ahead(number: int, used: int) -> bool:
    """True if the copy of tensor ``number`` to the device begins when backward uses tensor ``used``. Kept tensors are
    numbered in the order of the forward.
    """
    return 0 < used - number <= _FETCHED_AHEAD


class Saved(enum.Enum):
    """Part of a checkpointed call's activations that is saved between its forward and its backward. The rest is
    recomputed. The call's inputs are saved in any case.
    """

    NOTHING = "nothing"
    PRODUCTS = "products"
    """Results of matrix products and of attention. Norms, activation functions and rotations are recomputed."""
    PRODUCTS_ON_HOST = "products on host"
    """Results of matrix products and of attention, in host memory."""
    EVERYTHING = "everything"


@dataclasses.dataclass(frozen=True)
class SeenStep:
    """Activation memory of the steps so far, in bytes."""

    working_bytes: int
    """Highest activation memory beside kept tensors."""
    highest_bytes: int
    """The plan's activation memory at its highest access."""


@dataclasses.dataclass(frozen=True)
class DeviceShares:
    """Division of a device between activations and chunks.

    An offloaded byte crosses the link twice, and the byte that chunks gain saves at most about one crossing.
    Activations are therefore offloaded to make a step fit and to keep the chunks' least share, not for a short peak
    such as the logits.

    In the first step the need of backward is unknown, and all activations together get half of the device. Later steps
    know it (``working_bytes``). Kept tensors may then take a third of the device beside it, as long as the largest
    module's chunks fit twice: one in use, one in transfer.

    Attributes:
        device_bytes: the configuration's ``device_memory``.
        chunk_bytes: the largest module's chunks with their gradients (``_C.working_set_bytes``).
    """

    device_bytes: int
    chunk_bytes: int

    @property
    def first_bytes(self) -> int:
        """Limit of activations in the first step."""
        return self.device_bytes // _FIRST_DIVISOR

    @property
    def least_bytes(self) -> int:
        """Least size of an offloaded tensor."""
        return self.device_bytes // LEAST_SHARE

    def most_bytes(self, working_bytes: int) -> int:
        """Limit of activations in later steps, with ``working_bytes`` beside kept tensors."""
        room = self.device_bytes - max(self.device_bytes // _CHUNKS_DIVISOR, 2 * self.chunk_bytes)
        return max(self.first_bytes, min(room, working_bytes + self.device_bytes // _KEPT_DIVISOR))

    def seen(self, working_bytes: int, highest_bytes: int) -> SeenStep:
        """``highest_bytes``: the highest activation memory without any offload."""
        return SeenStep(working_bytes, min(highest_bytes, self.most_bytes(working_bytes)))

    def excess_bytes(self, held_bytes: int, beyond_bytes: int, seen: SeenStep) -> int:
        """Bytes of the ``held_bytes`` kept on the device that must be offloaded. ``beyond_bytes`` of them autograd
        would not save by itself; these are limited to the plan's activation memory.
        """
        needed = held_bytes + seen.working_bytes
        return max(needed - self.most_bytes(seen.working_bytes), min(needed - seen.highest_bytes, beyond_bytes))

    def has_room(self, num_bytes: int, held_bytes: int, host_bytes: int, seen: SeenStep) -> bool:
        """True if ``num_bytes`` that autograd would not save fit on the device beside ``held_bytes`` and in
        ``host_bytes`` of free host memory.
        """
        on_device = seen.highest_bytes - seen.working_bytes - held_bytes
        return num_bytes <= max(on_device, 0) + max(host_bytes, 0)

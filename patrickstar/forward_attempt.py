"""One forward that may have to be run a second time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ForwardAttempt:
    """What a forward changes beside its result: random numbers drawn, buffers.

    A forward that ran out of device memory is repeated from the same random numbers, so that its result does not
    depend on the failure; not if it changed a buffer in place already, which cannot be undone.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], device: torch.device):
        self._device = device
        self._buffers = buffers
        self._versions = _versions(buffers)
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def can_repeat(self) -> bool:
        """Whether the forward left the buffers as they were."""
        return _versions(self._buffers) == self._versions

    def rewind(self) -> None:
        """Random numbers start again from where they were."""
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)


def _versions(buffers: Sequence[torch.Tensor]) -> list[int]:
    return [0 if buffer.is_inference() else buffer._version for buffer in buffers]

"""A forward that ran out of device memory, run again as if its first attempt had never been."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.observed_buffers import BufferPlace, buffer_places

# Buffers changed in place that take more than this together are not copied: every forward would take longer.
MOST_COPIED_BYTES = 64 << 20


class RepeatableForwards:
    """Forwards of ``module``, and what it takes to undo one: the random numbers drawn, the buffers it changed.

    Running statistics, and whatever an earlier forward changed in place, are copied to host memory before each forward.
    Other buffers that a forward changes so cannot be undone; what it assigns always can.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self._device = device
        self._places = buffer_places(module)
        statistics = [place.buffers.get(place.name) for place in self._places if place.is_statistic]
        self._changing = {id(buffer): buffer for buffer in statistics if buffer is not None}

    def begin(self) -> ForwardAttempt:
        """What the forward that begins now starts from."""
        return ForwardAttempt(self._device, self._places, self._changing.values())

    def end(self, attempt: ForwardAttempt) -> None:
        """``attempt`` came through: what it changed in place is copied from the next forward on."""
        changing = {*self._changing, *map(id, attempt.changed_in_place())}
        present = [place.buffers.get(place.name) for place in self._places]  # no longer those that were replaced
        self._changing = {id(buffer): buffer for buffer in present if buffer is not None and id(buffer) in changing}
        if sum(buffer.nbytes for buffer in self._changing.values()) > MOST_COPIED_BYTES:
            self._changing.clear()


class ForwardAttempt:
    """The random numbers and buffers that a forward started from; ``changing`` are the buffers to copy."""

    def __init__(self, device: torch.device, places: list[BufferPlace], changing: Iterable[torch.Tensor]):
        self._device = device
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._places = places
        self._observed = [place.observe() for place in places]
        self._copies = _Copies(changing)

    def changed_in_place(self) -> list[torch.Tensor]:
        """The buffers whose elements are others than when the forward began."""
        return [observed.tensor for observed in self._observed if observed is not None and observed.has_changed()]

    def can_repeat(self) -> bool:
        """Whether there is a copy of each buffer that was changed in place."""
        return all(buffer in self._copies for buffer in self.changed_in_place())

    def rewind(self) -> None:
        """Random numbers start again from where they were, and buffers have the values they had."""
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)
        self._copies.restore()
        for place, observed in zip(self._places, self._observed, strict=True):
            if place.name in place.buffers:
                place.buffers[place.name] = observed.tensor if observed is not None else None
        self._observed = [place.observe() for place in self._places]


class _Copies:
    """Values of ``buffers`` as they are now, in host memory: the bytes of a device's in one tensor, for few copies."""

    @torch.no_grad()
    def __init__(self, buffers: Iterable[torch.Tensor]):
        self._ids: set[int] = set()
        groups: dict[torch.device, list[torch.Tensor]] = {}
        for buffer in sorted(buffers, key=torch.Tensor.element_size, reverse=True):  # so that all pieces are aligned
            self._ids.add(id(buffer))
            groups.setdefault(buffer.device, []).append(buffer)
        self._groups = [(group, _to_host(group)) for group in groups.values()]

    def __contains__(self, buffer: torch.Tensor) -> bool:
        return id(buffer) in self._ids

    @torch.no_grad()
    def restore(self) -> None:
        for group, values in self._groups:
            pieces = values.to(group[0].device, non_blocking=True).split([buffer.nbytes for buffer in group])
            for buffer, piece in zip(group, pieces, strict=True):
                buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _to_host(group: list[torch.Tensor]) -> torch.Tensor:
    if group[0].device.type == "cpu":
        with _C.HostAllocations():
            return torch.cat([_bytes(buffer) for buffer in group])
    flat = torch.cat([_bytes(buffer) for buffer in group])
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).view(torch.uint8)

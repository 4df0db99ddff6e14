"""Undo of a forward that ran out of device memory, so that it can be run again with the same result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.forward_writes import ForwardWrites
from patrickstar.module.observed_buffers import BufferPlace, ObservedBuffer, buffer_places
from patrickstar.module.observer import Observer
from patrickstar.module.preprocess import ManagedParam
from patrickstar.session.module_state import ModuleState, NotedState

# Larger buffers together are not copied, since every forward would take longer.
MOST_COPIED_BYTES = 64 << 20


class RepeatableForwards:
    """Records what each forward of ``module`` changes: random numbers, buffers, attributes, written parameters.

    Running statistics, and all tensors that an earlier forward changed in place, are copied to host memory before each
    forward. Other in-place changes of buffers, and those of sparse ones, cannot be undone. Assignments always can.
    """

    def __init__(
        self,
        module: nn.Module,
        managed: Sequence[ManagedParam],
        observer: Observer,
        device: torch.device,
        num_ranks: int,
    ):
        self._module = module
        self._managed = [item.param for item in managed]
        self._writes = ForwardWrites(MOST_COPIED_BYTES if num_ranks == 1 else 0)
        observer.forward_writes = self._writes
        self._state = ModuleState(module, self._managed)
        self._has_run = False
        self._device = device
        self._places = buffer_places(module)
        statistics = [place.buffers.get(place.name) for place in self._places if place.is_statistic]
        self._changing = {id(buffer): buffer for buffer in statistics if buffer is not None}

    def begin(self) -> ForwardAttempt:
        """The state at the start of a forward."""
        self._writes.begin()
        return ForwardAttempt(self._device, self._places, self._changing.values(), self._state.note(), self._writes)

    def abandon(self) -> None:
        """Ends a forward that failed for good."""
        self._writes.end()

    def end(self, attempt: ForwardAttempt) -> None:
        """Ends a successful forward. Tensors that it changed in place are copied from the next forward on."""
        self._writes.end()
        if not self._has_run:  # attributes that the first forward makes
            self._has_run = True
            self._state = ModuleState(self._module, self._managed)
        changing = {*self._changing, *map(id, attempt.changed_in_place())}
        present = [place.buffers.get(place.name) for place in self._places]  # without replaced ones
        dense = [buffer for buffer in present if buffer is not None and buffer.layout == torch.strided]
        self._changing = {id(buffer): buffer for buffer in dense if id(buffer) in changing}
        if sum(buffer.nbytes for buffer in self._changing.values()) > MOST_COPIED_BYTES:
            self._changing.clear()


class ForwardAttempt:
    """State at the start of a forward: random numbers, buffers, other state of the module.

    Args:
        device: whose random numbers the forward draws.
        places: of buffers.
        changing: the buffers to copy.
        state: of the module, beside buffers.
        writes: records parameters that the forward writes.
    """

    def __init__(
        self,
        device: torch.device,
        places: list[BufferPlace],
        changing: Iterable[torch.Tensor],
        state: NotedState,
        writes: ForwardWrites,
    ):
        self._device = device
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._places = places
        self._observed = [place.observe() for place in places]
        self._copies = _Copies(changing)
        self._state = state
        self._writes = writes

    def changed_in_place(self) -> list[torch.Tensor]:
        """Buffers whose elements have changed since the start."""
        return [place.observed.tensor for place in self._changed_places()]

    def _changed_places(self) -> list[_ChangedPlace]:
        pairs = zip(self._places, self._observed, strict=True)
        return [_ChangedPlace(place.name, seen) for place, seen in pairs if seen is not None and seen.has_changed()]

    def obstacle(self) -> str:
        """A sentence on why the forward cannot be run again; empty if it can."""
        changed = [place.name for place in self._changed_places() if place.observed.tensor not in self._copies]
        changed += self._state.changed_tensors() + self._writes.lost
        if not changed:
            return ""
        return (
            "The forward was not run again with an emptier device, since it would give other numbers: it has changed "
            f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''} in place, of which there is no copy."
        )

    def rewind(self) -> None:
        """Restores random numbers, buffers and attributes."""
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)
        self._copies.restore()
        for place, observed in zip(self._places, self._observed, strict=True):
            if place.name in place.buffers:
                place.buffers[place.name] = observed.tensor if observed is not None else None
        self._observed = [place.observe() for place in self._places]
        self._state.restore()

    def undo_writes(self) -> None:
        """Restores written parameters; no operation may use them any more."""
        self._writes.undo()


@dataclasses.dataclass(frozen=True)
class _ChangedPlace:
    name: str
    observed: ObservedBuffer


class _Copies:
    """Host copies of ``buffers``. The bytes of one device are in one tensor, so there are few copies."""

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
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True, device="cpu").copy_(flat, non_blocking=True)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).view(torch.uint8)

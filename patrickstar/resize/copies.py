"""Copies of each rank's shards, from which the other ranks go on when it is lost.

    copies = Copies("a unique name")
    copies.enter(session)               # after each change of ranks
    copies.take(session, user_state)    # after each step

Each rank copies its shards into host memory, and sends the copy to the next rank, which keeps it. Copies of the step
before stay until all ranks have those of this step. So whenever a rank is lost, some step's copies are complete, and
values that a broken step has changed are never read.

A rank holds four times the float32 bytes of its shards: two steps' own copies and two of the rank before it. It sends
and receives these bytes once per step.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.elastic.movement import Part
from patrickstar.elastic.survivors import Generation, Report
from patrickstar.machine.host_memory import available_bytes
from patrickstar.module.observed_buffers import buffer_places
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.messages import reading
from patrickstar.resize.plan import UserState, all_or_none
from patrickstar.resize.shards import IN_MEMORY, Range, arrays_of, common_state, parts_of
from patrickstar.session.session import Session
from patrickstar.sizes import show_shortage

_PIECE_BYTES = 32 * 2**20
"""Bytes that travel at a time; a few times as much is taken for messages."""
_CALL = "copying shards"


class ShardCopy:
    """One rank's part of all arrays in chunks, as float32 in host memory.

    Args:
        parts: of each parameter.
        arrays: number of arrays of each parameter.
    """

    def __init__(self, parts: Sequence[Part], arrays: Mapping[int, int]):
        self.parts, self._arrays = list(parts), dict(arrays)
        self._begins: dict[tuple[int, int], int] = {}
        num_bytes = 0
        for param, (begin, end) in enumerate(self.parts):
            for array in range(self._arrays[param]):
                self._begins[param, array] = num_bytes
                num_bytes += (end - begin) * torch.float32.itemsize
        self.num_bytes = num_bytes
        self._memory = _C.HostMapping(max(num_bytes, 1))

    def fits(self, parts: Sequence[Part], arrays: Mapping[int, int]) -> bool:
        """True if the memory can be used for these parts."""
        return self.parts == list(parts) and self._arrays == dict(arrays)

    def ranges(self, session: Session) -> list[Range]:
        """Ranges of all parts that are not empty, for the core."""
        kinds = arrays_of(session)
        return [
            (param, kinds[array], *self.parts[param], IN_MEMORY, self._memory.address + at)
            for (param, array), at in self._begins.items()
            if self.parts[param][0] < self.parts[param][1]
        ]

    def address(self, param: int, array: int, begin: int) -> int:
        """Address of element ``begin`` of a parameter's array."""
        return self._memory.address + self._at(param, array, begin)

    def elements(self, param: int, array: int, begin: int, end: int) -> memoryview:
        """Bytes of some elements."""
        at = self._at(param, array, begin)
        return self.bytes()[at : at + (end - begin) * torch.float32.itemsize]

    def bytes(self) -> memoryview:
        """All bytes; valid as long as this object."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self._memory.address)).cast("B")

    def _at(self, param: int, array: int, begin: int) -> int:
        return self._begins[param, array] + (begin - self.parts[param][0]) * torch.float32.itemsize


@dataclasses.dataclass(kw_only=True)
class Copy:
    """This process's copies of one generation."""

    generation: Generation
    own: ShardCopy
    mirrored: ShardCopy
    """Shards of the rank before this one."""
    state: dict[str, Any]
    """State beside shards (``common_state``)."""
    managed: list[torch.Tensor]
    """Values of parameters that stay with PyTorch."""
    buffers: list[torch.Tensor | None]
    step_counts: list[int]
    """By parameter in chunks."""
    accumulation: int | None
    """The configuration's ``gradient_accumulation_steps``."""

    def restore_rest(self, session: Session) -> None:
        """Sets buffers, and parameters that stay with PyTorch."""
        with torch.no_grad():
            for managed, value in zip(session.managed.params, self.managed, strict=True):
                managed.param.copy_(value)
            for place, value in zip(buffer_places(session.module), self.buffers, strict=True):
                buffer = place.buffers.get(place.name)
                if buffer is not None and value is not None:
                    buffer.copy_(value)


class Copies:
    """One process's copies of its ranks' last steps. See the module's docstring.

    Args:
        name: of this process, unique in the run.
    """

    def __init__(self, name: str):
        self.name = name
        self._worlds: dict[int, tuple[str, ...]] = {}
        self._world = -1
        self._num_taken = 0  # in this world
        self._ranks: RankGroups | None = None
        self._kept: list[Copy] = []

    def enter(self, session: Session) -> None:
        """Learns the processes of the present ranks. Collective after each change of ranks; otherwise nothing."""
        if self._ranks is session.ranks:
            return
        said = [json.dumps([self._world, self.name]).encode()]
        if len(session.ranks.members) > 1:
            with session.guard(_CALL):
                said = session.ranks.control.exchange(said[0], "the ranks' processes")
        with reading("the ranks' processes"):
            told = [(int(world), str(name)) for world, name in map(json.loads, said)]
        self._world = max(world for world, _ in told) + 1
        self._worlds[self._world] = tuple(name for _, name in told)
        self._ranks, self._num_taken = session.ranks, 0

    def take(self, session: Session, user_state: Mapping[str, UserState]) -> None:
        """Copies the shards of all ranks. Collective, between two steps, after :meth:`enter`.

        Raises:
            ResizeError: host memory has no room for copies on some rank; training can go on without them.
            RankFailure: a rank is lost; earlier copies are still there.
        """
        ranks, params = session.ranks, session.params_now()
        size, rank = len(ranks.members), ranks.control.rank
        trained = [spec.trained for spec in params.chunked]
        counts = [session.runtime.step_count(param) if is_trained else 0 for param, is_trained in enumerate(trained)]
        arrays = {param: len(arrays_of(session)) if count > 0 else 1 for param, count in enumerate(counts)}
        parts = parts_of(session, params, session.chunk_numel, size)
        *_, last = self._kept or [None]
        unused = [one for one in self._kept if one is not last]
        with session.guard(_CALL):
            with all_or_none(session, "shards were not copied"):  # all are here, so they have the last copies
                own, mirrored = _memory_for(session, unused, parts[rank], parts[rank - 1], arrays)
            self._kept = [] if last is None else [last]
            session.runtime.read_ranges(own.ranges(session), [])
            rest = self._copy_rest(session, user_state)
            most = max(_num_bytes(some, arrays) for some in parts)
            for begin in range(0, most, _PIECE_BYTES):
                piece = own.bytes()[begin : begin + _PIECE_BYTES].tobytes()
                to_each = [piece if other == (rank + 1) % size else b"" for other in range(size)]
                received = ranks.control.distribute(to_each, "copies of shards")[rank - 1]
                mirrored.bytes()[begin : begin + len(received)] = received
        self._num_taken += 1
        generation = Generation(self._world, self._num_taken)
        self._kept.append(Copy(generation=generation, own=own, mirrored=mirrored, step_counts=counts, **rest))
        known = {one.generation.world for one in self._kept} | {self._world}
        self._worlds = {world: names for world, names in self._worlds.items() if world in known}

    @staticmethod
    def _copy_rest(session: Session, user_state: Mapping[str, UserState]) -> dict[str, Any]:
        with _C.HostAllocations(), torch.no_grad():
            places = buffer_places(session.module)
            buffers = [place.buffers.get(place.name) for place in places]
            return {
                "accumulation": session.config.gradient_accumulation_steps,
                "state": copy.deepcopy(common_state(session, user_state)),
                "managed": [managed.param.detach().to("cpu", copy=True) for managed in session.managed.params],
                "buffers": [None if one is None else one.detach().to("cpu", copy=True) for one in buffers],
            }

    def report(self) -> Report:
        """The copies that this process has."""
        generations = tuple(one.generation for one in self._kept)
        return Report(host=socket.gethostname(), worlds=dict(self._worlds), own=generations, mirrored=generations)

    def of(self, generation: Generation) -> Copy:
        """This process's copies of a generation that it has."""
        return next(one for one in self._kept if one.generation == generation)

    def forget_but(self, generation: Generation | None) -> None:
        """Frees all other copies. Those that are kept stay until :meth:`take` has made new ones."""
        self._kept = [one for one in self._kept if one.generation == generation]


def _memory_for(
    session: Session, unused: Sequence[Copy], own: Sequence[Part], before: Sequence[Part], arrays: Mapping[int, int]
) -> tuple[ShardCopy, ShardCopy]:
    """Memory of older copies with the same layout, or new memory."""
    for one in unused:
        if one.own.fits(own, arrays) and one.mirrored.fits(before, arrays):
            return one.own, one.mirrored
    num_here = session.ranks.context.local_world_size
    needed, there = num_here * (_num_bytes(own, arrays) + _num_bytes(before, arrays)), available_bytes()
    if needed > there:
        raise _C.MemoryBudgetError(
            f"copies of one step on {num_here} ranks of this machine: {show_shortage(needed, there)} of host memory; "
            "lower host_memory, which copies do not count in, or leave redundancy out"
        )
    return ShardCopy(own, arrays), ShardCopy(before, arrays)


def _num_bytes(parts: Sequence[Part], arrays: Mapping[int, int]) -> int:
    return sum((end - begin) * arrays[param] for param, (begin, end) in enumerate(parts)) * torch.float32.itemsize

"""Shards that stay on devices in a resize, and their transfer from device to device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence

import torch

from patrickstar import _C
from patrickstar.elastic.movement import Move, Part, kept
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, warm_up
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.messages import reading
from patrickstar.ranks.passing import (
    PassingPlace,
    PeerBytes,
    connect_ahead,
    exchange,
    passing_communicator,
    prepare_to_pass,
)
from patrickstar.resize.plan import ResizeOptions, ResizePlan
from patrickstar.session.session import Session

_BATCH_MESSAGES = 64  # enqueued together
_SIMULATED = -1  # device index of host memory
_ALONE_SHARE = 0.8
"""Share of a GPU's memory that is free if no other process uses it."""
_ROOM_SHARE = 0.9
"""Share of free device memory for arriving values; the rest is for their transport."""


def params_on_device(session: Session) -> list[int]:
    """Trained parameters whose arrays all lie on this process's device in a form that can be copied."""
    specs = enumerate(session.params_now().chunked)
    return [param for param, spec in specs if spec.trained and session.runtime.is_stored_on_device(param)]


def prepare_to_receive(session: Session) -> None:
    """Maps device memory ahead, while a joining process is not yet awaited.

    Mapping takes about a second for some tens of gigabytes. Half of the parameters' bytes are mapped and left to
    PyTorch's cache. Does nothing on a GPU that other processes use, since these may be the training ranks.
    """
    if session.device.type != "cuda":
        return
    prepare_to_pass(session.device)
    free, total = torch.cuda.mem_get_info(session.device)
    if free < _ALONE_SHARE * total:
        return
    numels = [spec.param.numel() for spec in session.plan_of_params.chunked]
    sizes = stored_bytes(session, range(len(numels)))
    wanted = sum(numel * sum(sizes[param]) for param, numel in enumerate(numels)) // 2
    with contextlib.suppress(_C.MemoryBudgetError):
        _C.DeviceMemory(session.device.index, min(wanted, int(free * _ROOM_SHARE)))


def on_all_devices(told: Iterable[bytes]) -> list[int]:
    """Intersection of all ranks' :func:`params_on_device`, as JSON."""
    with reading("parameters on devices"):
        return sorted(set.intersection(*(set(json.loads(message)) for message in told)))


def stored_bytes(session: Session, params: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Bytes per element of each parameter's arrays."""
    return {param: tuple(session.runtime.stored_bytes(param)) for param in params}


def those_with_room(
    params: Sequence[int], sizes: dict[int, tuple[int, ...]], moves: Sequence[Move], room_bytes: Sequence[int]
) -> list[int]:
    """The first parameters that the new ranks' devices can receive.

    Args:
        params: on all old ranks' devices.
        sizes: their :func:`stored_bytes`.
        moves: of all parameters.
        room_bytes: free bytes by new rank's device.
    """
    left = [int(room * _ROOM_SHARE) for room in room_bytes]
    arriving: dict[int, list[Move]] = {}
    for move in moves:
        arriving.setdefault(move.param, []).append(move)
    chosen = []
    for param in params:
        for move in arriving.get(param, []):
            left[move.target] -= move.numel * sum(sizes[param])
        if min(left) < 0:
            break
        chosen.append(param)
    return chosen


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements [begin, end) of one array of a parameter, in their own memory."""

    array: int
    begin: int
    end: int
    memory: _C.DeviceMemory
    where: _C.Tier


class DeviceShards:
    """One process's parts of the parameters that stay on devices.

    A parameter stays on devices if all of its arrays lie on the device of every old rank; its values then never pass
    through host memory. Parts for other processes are sent from device to device, in stored form, before the decision,
    and wait there in separate memory for the new core. Parts that this process keeps are copied to separate memory
    while its old core closes, and freed while the new core takes them, both chunk by chunk. So a device holds values
    once, plus one chunk. The old ranks' plan decides which states rest on devices, and new ranks start with it.

    Args:
        sizes: the parameters' :func:`stored_bytes`.
        old: this process's former part of each parameter; None: it was no rank.
        new: its new part; None: it leaves.
    """

    def __init__(self, sizes: dict[int, tuple[int, ...]], old: Sequence[Part] | None, new: Sequence[Part] | None):
        self._sizes, self._old, self._new = sizes, old, new
        self._pieces: dict[int, list[_Piece]] = {param: [] for param in sizes}

    def has_any(self, moves: Sequence[Move]) -> bool:
        """True if some of ``moves`` pass from device to device."""
        return any(move.param in self._sizes for move in moves)

    def reserve(self, session: Session, moves: Sequence[Move], targets: dict[int, int], mine: int) -> None:
        """Allocates memory for what this process will receive as rank ``mine`` of ``targets``; see :meth:`pass_on`.

        Raises:
            MemoryBudgetError: no room.
        """
        for move in moves:
            if move.param in self._sizes and targets[move.target] == mine:
                for array in range(len(self._sizes[move.param])):
                    self._make(session, move.param, array, move.begin, move.end)

    def pass_on(
        self,
        session: Session,
        communicator: _C.collective.Communicator,
        moves: Sequence[Move],
        sources: dict[int, int],
        targets: dict[int, int],
        timeout_seconds: float,
    ) -> None:
        """Sends this process's parts to others, and receives into the memory from :meth:`reserve`.

        Args:
            session: of this process, between steps.
            communicator: of all processes.
            moves: of all parameters, the same on all processes.
            sources: rank in ``communicator`` by old rank.
            targets: rank in ``communicator`` by new rank.
            timeout_seconds: for the whole transfer.

        Raises:
            RankFailure: from ``exchange``.
        """
        mine = communicator.rank
        addresses: dict[int, list[int]] = {}
        sends: list[PeerBytes] = []
        receives: list[PeerBytes] = []
        batches = []
        passing = [move for move in moves if move.param in self._sizes]
        for count, move in enumerate(passing, 1):
            source, target, sizes = sources[move.source], targets[move.target], self._sizes[move.param]
            if source == mine:
                if move.param not in addresses:
                    addresses[move.param] = session.runtime.stored_on_device(move.param)
                assert self._old is not None
                at = move.begin - self._old[move.param][0]
                ours = zip(addresses[move.param], sizes, strict=True)
                sends += [(target, address + at * size, move.numel * size) for address, size in ours]
            elif target == mine:
                pieces = [piece for piece in self._pieces[move.param] if piece.begin == move.begin]
                receives += [(source, p.memory.address, p.memory.num_bytes) for p in pieces]
            if count % _BATCH_MESSAGES == 0 or count == len(passing):
                batches.append((sends, receives))
                sends, receives = [], []
        exchange(communicator, batches, session.device, timeout_seconds=timeout_seconds)

    def _make(self, session: Session, param: int, array: int, begin: int, end: int) -> _Piece:
        index = session.device.index if session.device.type == "cuda" else _SIMULATED
        memory = _C.DeviceMemory(index, (end - begin) * self._sizes[param][array])
        piece = _Piece(array, begin, end, memory, _C.Tier.DEVICE)
        self._pieces[param].append(piece)
        return piece

    def _make_anywhere(self, session: Session, param: int, array: int, begin: int, end: int) -> _Piece:
        """Allocates on the device, else on the host: the resize is decided and cannot be refused."""
        try:
            return self._make(session, param, array, begin, end)
        except _C.MemoryBudgetError:
            memory = _C.DeviceMemory(_SIMULATED, (end - begin) * self._sizes[param][array])
        self._pieces[param].append(_Piece(array, begin, end, memory, _C.Tier.HOST))
        return self._pieces[param][-1]

    def set_aside(self, session: Session) -> None:
        """Copies the parts that this process keeps, chunk by chunk, from a core that closes next."""
        if self._old is None:
            return
        for chunk, params in enumerate(self._by_chunk(session)):
            for param in params if self._new is not None else ():
                begin, end = kept(self._new[param], self._old[param])
                addresses = session.runtime.stored_on_device(param) if begin < end else []
                for array, (address, size) in enumerate(zip(addresses, self._sizes[param], strict=False)):
                    piece = self._make_anywhere(session, param, array, begin, end)
                    at = address + (begin - self._old[param][0]) * size
                    session.runtime.copy_on_device(piece.memory.address, at, piece.memory.num_bytes)
            if params and set(session.layout.chunk(chunk)["params"]) <= self._sizes.keys():
                session.runtime.leave_stored(chunk)

    def fill(self, session: Session) -> None:
        """Writes all parts into the new core, chunk by chunk."""
        for params in self._by_chunk(session):
            for param in params:
                pieces = self._pieces[param]
                ranges = [(p.array, p.begin, p.end, p.memory.address, p.where) for p in pieces]
                session.runtime.write_stored(param, ranges)
            if session.device.type == "cuda":
                torch.cuda.synchronize(session.device)  # another stream may reuse the memory
            for param in params:
                self._pieces[param].clear()
        if self._sizes:
            session.runtime.return_cached()  # else the cache would take the room of states in the first steps

    def _by_chunk(self, session: Session) -> Iterator[list[int]]:
        """These parameters by chunk of the session's present core."""
        for chunk in range(session.layout.num_chunks):
            yield [param for param in session.layout.chunk(chunk)["params"] if param in self._sizes]


def pass_on(
    session: Session,
    plan: ResizePlan,
    moves: Sequence[Move],
    on_devices: DeviceShards,
    place: PassingPlace,
    options: ResizeOptions,
) -> ChunkCommunicators | None:
    """Passes values from device to device before the decision. Collective over all processes, at the same point.

    If the new ranks alone take part, their communicators are returned for the new world; the caller closes them.
    """
    if not on_devices.has_any(moves):
        return None
    limit = options.timeout_seconds
    if not plan.joiners:
        communicator = session.ranks.scatter
        sources = {old: old for old in range(plan.num_old)}
        targets = {new: _given(old) for new, old in enumerate(plan.former)}
        on_devices.reserve(session, moves, targets, communicator.rank)
        with session.guard("resize"):
            on_devices.pass_on(session, communicator, moves, sources, targets, limit)
        return None
    name, sources = f"resize {plan.token}", plan.passing_sources
    targets = {new: new for new in range(len(plan.former))}
    reserve = functools.partial(on_devices.reserve, session, moves, targets, place.rank)
    with contextlib.ExitStack() as unless_it_passes:
        try:
            if not plan.all_stay:
                with passing_communicator(name, place, session.device, reserve, timeout_seconds=limit) as communicator:
                    on_devices.pass_on(session, communicator, moves, sources, targets, limit)
                return None
            connected = connect_ahead(name, place, session.device, reserve, timeout_seconds=limit)
            unless_it_passes.callback(connected.close)
            on_devices.pass_on(session, connected.scatter, moves, sources, targets, limit)
            if session.device.type == "cuda":
                warm_up(connected.gather, connected.scatter, session.device, limit)
        except _C.RankFailure as error:  # a joining process may have failed, which is no failed rank
            raise OSError(f"values did not pass from device to device: {first_line(error)}") from error
        unless_it_passes.pop_all()
    return connected


def _given(old: int | None) -> int:
    assert old is not None  # no process joins
    return old

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

_BATCH_MESSAGES = 64  # that are enqueued together
_SIMULATED = -1  # of GPUs: host memory
_ALONE_SHARE = 0.8
"""Of a GPU's memory, that is free where nobody else uses it."""
_ROOM_SHARE = 0.9
"""Of what is free on a device, that arriving values may take; the rest is for what their transport takes."""


def params_on_device(session: Session) -> list[int]:
    """Parameters that are trained, of which all arrays lie on this process's device as they may be copied."""
    specs = enumerate(session.params_now().chunked)
    return [param for param, spec in specs if spec.trained and session.runtime.is_stored_on_device(param)]


def prepare_to_receive(session: Session) -> None:
    """What a process that will join can do before it is awaited. To map device memory takes a second for some tens of
    gigabytes: so memory for as much as it may get, half of what there is, is taken and left to PyTorch's cache. Not on
    a GPU that others use, perhaps the ranks that train.
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
    """Of what ranks say :func:`params_on_device` is on each, as JSON, what is so on all of them."""
    with reading("parameters on devices"):
        return sorted(set.intersection(*(set(json.loads(message)) for message in told)))


def stored_bytes(session: Session, params: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Of each parameter, the bytes of an element of each of its arrays."""
    return {param: tuple(session.runtime.stored_bytes(param)) for param in params}


def those_with_room(
    params: Sequence[int], sizes: dict[int, tuple[int, ...]], moves: Sequence[Move], room_bytes: Sequence[int]
) -> list[int]:
    """As many of the parameters as new ranks' devices have room to receive.

    Args:
        params: on all old ranks' devices.
        sizes: :func:`stored_bytes` of them.
        moves: of all parameters.
        room_bytes: by new rank, what is free on its device.
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
    """Elements [begin, end) of an array of a parameter, in memory of their own."""

    array: int
    begin: int
    end: int
    memory: _C.DeviceMemory
    where: _C.Tier


class DeviceShards:
    """What one process has and gets of the parameters that stay on devices.

    Args:
        sizes: :func:`stored_bytes` of them.
        old: this process's part of each parameter so far; None: it was no rank.
        new: the same from now on; None: it leaves.
    """

    def __init__(self, sizes: dict[int, tuple[int, ...]], old: Sequence[Part] | None, new: Sequence[Part] | None):
        self._sizes, self._old, self._new = sizes, old, new
        self._pieces: dict[int, list[_Piece]] = {param: [] for param in sizes}

    def has_any(self, moves: Sequence[Move]) -> bool:
        """Whether some of ``moves`` pass from device to device."""
        return any(move.param in self._sizes for move in moves)

    def reserve(self, session: Session, moves: Sequence[Move], targets: dict[int, int], mine: int) -> None:
        """Takes memory for what this process will receive, which is its rank ``mine`` of ``targets``; see
        :meth:`pass_on`.

        Raises:
            MemoryBudgetError: there is no room for what comes.
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
        """Sends what others need of this process, and receives what it needs, where :meth:`reserve` has made room.

        Args:
            session: of this process, between steps.
            communicator: of all processes.
            moves: of all parameters, the same on all processes.
            sources: by old rank, the process's rank in ``communicator``.
            targets: by new rank, likewise.
            timeout_seconds: for all of it.

        Raises:
            RankFailure: of ``exchange``.
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
        """On the host where the device has no room: the resize is decided."""
        try:
            return self._make(session, param, array, begin, end)
        except _C.MemoryBudgetError:
            memory = _C.DeviceMemory(_SIMULATED, (end - begin) * self._sizes[param][array])
        self._pieces[param].append(_Piece(array, begin, end, memory, _C.Tier.HOST))
        return self._pieces[param][-1]

    def set_aside(self, session: Session) -> None:
        """Copies what this process keeps, chunk by chunk, of a core that is closed next."""
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
        """Gives the new core all of it, chunk by chunk."""
        for params in self._by_chunk(session):
            for param in params:
                pieces = self._pieces[param]
                ranges = [(p.array, p.begin, p.end, p.memory.address, p.where) for p in pieces]
                session.runtime.write_stored(param, ranges)
            if session.device.type == "cuda":
                torch.cuda.synchronize(session.device)  # the memory may be given to another queue
            for param in params:
                self._pieces[param].clear()
        if self._sizes:
            session.runtime.return_cached()  # else the first steps would leave it the room of states

    def _by_chunk(self, session: Session) -> Iterator[list[int]]:
        """These parameters, by the chunks of the session's present core."""
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
    """All processes call this at the same point, before the decision. Where values pass between the new ranks alone,
    they do it in a communicator that these go on with; it is given, and whoever gets it closes it.
    """
    if not on_devices.has_any(moves):
        return None
    limit = options.timeout_seconds
    if not plan.guests:
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
        except _C.RankFailure as error:  # of processes, some of which join: no rank has failed yet
            raise OSError(f"values did not pass from device to device: {first_line(error)}") from error
        unless_it_passes.pop_all()
    return connected


def _given(old: int | None) -> int:
    assert old is not None  # nobody joins
    return old

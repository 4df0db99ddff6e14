"""Shards and other state that a resize moves: files between hosts, copies that a process keeps, and the leader's state.

Files are written without pickle.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.plain_state import read_plain_state, write_plain_state
from patrickstar.checkpoint.rng import rng_states, set_rng_states
from patrickstar.elastic.movement import Move, Part, find_moves, kept
from patrickstar.elastic.published import OpenFile, Piece, PublishedShards
from patrickstar.elastic.resize_folder import ResizeFolder
from patrickstar.elastic.sampler import OfOneRun
from patrickstar.elastic.transfers import FileServer, fetch, own_address
from patrickstar.machine.state_scheme import state_scheme
from patrickstar.module.layouts import make_layout
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.private_files import create_private, open_private
from patrickstar.resize.devices import DeviceShards, stored_bytes, those_with_room
from patrickstar.resize.plan import ResizeOptions, ResizePlan, UserState
from patrickstar.session.session import Session

STATE_NAME = "state"
"""Name of the leader's state file, in its folder and in its ``FileServer``."""

logger = logging.getLogger("patrickstar")

Range = tuple[int, _C.ArrayKind, int, int, int, int]
"""Argument of ``_C.Runtime.read_ranges``: parameter, kind, begin, end, file, address."""
IN_MEMORY = -1


class Shards:
    """Parts of all ranks before and after the resize, and the files in which they travel.

    Args:
        session: of this process.
        plan: of the resize.
        new: this process's new rank; None: it leaves.
        folder: of this process.
        key: of the file servers, 32 bytes.
    """

    def __init__(self, session: Session, plan: ResizePlan, new: int | None, folder: str, key: bytes):
        params = session.params_now()
        self.old, self.new, self.moves = all_moves(session, plan)
        self.sizes = stored_bytes(session, plan.on_device)
        trained = [spec.trained for spec in params.chunked]
        self.arrays = {
            index: len(arrays_of(session)) if trained[index] and count > 0 else 1
            for index, count in enumerate(plan.step_counts)
        }
        through_files = [move for move in self.moves if move.param not in self.sizes]
        self.files = PublishedShards(folder, plan.token, key, through_files, self.arrays)
        self._key = key
        self._state_names = [STATE_NAME] if new is None else [STATE_NAME, reached_name(new)]

    @property
    def state_path(self) -> Path:
        """The leader's file of state beside shards."""
        return self.files.folder.file(STATE_NAME)

    def num_bytes(self, moves: Sequence[Move]) -> int:
        """Bytes of these moves."""
        return sum(move.numel * self._element_bytes(move.param) for move in moves)

    def _element_bytes(self, param: int) -> int:
        return sum(self.sizes.get(param, ())) or self.arrays[param] * torch.float32.itemsize

    def copied_bytes(self, old: int, new: int | None) -> int:
        """Host bytes of an old rank's copies beside its open core: published parts and kept parts."""
        published = self.num_bytes([one for one in self.moves if one.source == old and one.param not in self.sizes])
        if new is None:
            return published
        parts = enumerate(zip(self.new[new], self.old[old], strict=True))
        of_each = ((kept(*both), self.arrays[param]) for param, both in parts if param not in self.sizes)
        return published + sum((end - begin) * count for (begin, end), count in of_each) * torch.float32.itemsize

    def on_devices(self, old: int | None, new: int | None) -> DeviceShards:
        """Device parts of a process with these ranks; None: no rank."""
        return DeviceShards(self.sizes, None if old is None else self.old[old], None if new is None else self.new[new])

    def remove(self) -> None:
        """Removes all files of this resize from this process's folder, including those of other processes."""
        self.files.remove()
        self.files.folder.remove(self._state_names)

    def remove_reached(self, new: int) -> None:
        """Removes files that the new rank was to read from this process's folder."""
        mine = [file.name for file in self.files.files if file.target == new]
        self.files.folder.remove([*mine, reached_name(new)])

    def serve(self, options: ResizeOptions, old: int) -> FileServer | None:
        """Serves an old rank's files to processes that do not find them in their folder; None: it cannot."""
        files = {file.name: self.files.path(file) for file in self.files.of_source(old)}
        files[STATE_NAME] = self.state_path
        try:
            return FileServer(own_address(options.towards()), self._key, files, options.timeout_seconds)
        except OSError as error:
            logger.warning("rank %d cannot serve its shards to other hosts: %s", old, first_line(error))
            return None

    def remove_given(self, old: int, server: FileServer) -> None:
        """Removes an old rank's files that new ranks have fetched; no process reads them in the folder."""
        files = self.files.of_source(old)
        self.files.folder.remove(file.name for file in files if server.has_given(file.name, str(file.target)))


class HeldShards:
    """Sources of this process's new shards: parts that it keeps, and files of other processes."""

    def __init__(self, shards: Shards, on_device: DeviceShards, old: int | None, new: int | None):
        """``on_device``: its parts on the device. ``old``, ``new``: this process's ranks; None: no rank."""
        self._shards, self._on_device, self._old, self._new = shards, on_device, old, new
        self._parts = shards.new[new] if new is not None else []
        self._kept: dict[tuple[int, int], list[Range]] = {}
        self._memory: list[_C.HostMapping | _C.KeptRegions] = []

    def set_aside(self, session: Session) -> _C.KeptRegions:
        """Keeps this process's parts of a core that closes next. Returns the core's remaining memory."""
        self._on_device.set_aside(session)
        if self._old is None or self._new is None:
            return session.runtime.keep_memory()
        both = enumerate(zip(self._parts, self._shards.old[self._old], strict=True))
        parts = {param: kept(*parts) for param, parts in both if param not in self._shards.sizes}
        sizes = {
            (param, array): (end - begin) * torch.float32.itemsize
            for param, (begin, end) in parts.items()
            for array in range(self._shards.arrays[param] if begin < end else 0)
        }
        mapping = _C.HostMapping(max(sum(sizes.values()), 1))  # touched only by parts that are not on the host
        ranges: list[Range] = []
        at = mapping.address
        for (param, array), size in sizes.items():
            ranges.append((param, arrays_of(session)[array], *parts[param], IN_MEMORY, at))
            at += size
        addresses, regions, free = session.runtime.set_aside(ranges)
        for key, one, address in zip(sizes, ranges, addresses, strict=True):
            self._kept[key] = [(*one[:-1], address)]
        self._memory = [mapping, regions]
        return free

    def fill(self, session: Session) -> None:
        """Writes this rank's part of all arrays into the new core, and frees the kept copies."""
        self._on_device.fill(session)
        if self._new is not None:
            write_parts(session, self._shards, self._new, self._kept)
        self._kept.clear()
        self._memory.clear()


def write_parts(session: Session, shards: Shards, new: int, sources: dict[tuple[int, int], list[Range]]) -> None:
    """Writes a new rank's parts that were not on devices into its new core.

    Args:
        session: of this process, with the new core.
        shards: of all ranks.
        new: this process's new rank, whose files are there.
        sources: ranges in memory by parameter and array; those of files are added.
    """
    kinds = arrays_of(session)
    with shards.files.opened(new) as (pieces, files):
        for piece in pieces:
            move, kind = piece.move, kinds[piece.array]
            found = (move.param, kind, move.begin, move.end, piece.file, piece.at)
            sources.setdefault((move.param, piece.array), []).append(found)
        ranges: list[Range] = []
        for param, (begin, _) in enumerate(shards.new[new]):
            if param in shards.sizes:
                continue
            for array in range(shards.arrays[param]):
                nothing = (param, kinds[array], begin, begin, IN_MEMORY, 0)  # the chunk still needs the state
                ranges += sources.get((param, array), [nothing])
        session.runtime.write_ranges(ranges, files)


def all_moves(session: Session, plan: ResizePlan) -> tuple[list[list[Part]], list[list[Part]], list[Move]]:
    """Each old rank's part of each parameter, each new rank's part, and the moves between them."""
    params = session.params_now()
    old = parts_of(session, params, plan.chunk_numel, plan.num_old)
    new = parts_of(session, params, plan.chunk_numel, len(plan.former))
    return old, new, find_moves(old, new, plan.former)


def choose_params(session: Session, plan: ResizePlan, on_device: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Parameters that stay on devices.

    Args:
        session: of this process.
        plan: of the resize.
        on_device: parameters on all old ranks' devices.
        rooms: free bytes by new rank's device.
    """
    _, _, moves = all_moves(session, plan)
    return those_with_room(on_device, stored_bytes(session, on_device), moves, rooms)


def publish(session: Session, shards: Shards, rank: int) -> None:
    """Writes an old rank's files."""
    kinds = arrays_of(session)

    def fill(pieces: list[Piece], files: list[OpenFile]) -> None:
        ranges = [(p.move.param, kinds[p.array], p.move.begin, p.move.end, p.file, p.at) for p in pieces]
        session.runtime.read_ranges(ranges, files)

    shards.files.write(rank, fill)


def arrays_of(session: Session) -> tuple[_C.ArrayKind, ...]:
    """Arrays of an updated parameter that travel; of other parameters only the first travels."""
    return (_C.ArrayKind.MASTER, *session.states.arrays.values())


def parts_of(session: Session, params: Any, chunk_numel: int, num_ranks: int) -> list[list[Part]]:
    """Parts by rank and parameter, a pure function of parameters, chunk size and number of ranks."""
    scheme = state_scheme(session.config.optimizer)
    found = []
    for rank in range(num_ranks):
        layout = make_layout(params, chunk_numel, num_ranks, rank, scheme)
        shards = (layout.shard_of(param) for param in range(len(params.chunked)))
        found.append([(begin, begin + numel) for begin, numel, _ in shards])
    return found


def reached_name(new: int) -> str:
    """Name of the state file that a new rank has fetched."""
    return f"{STATE_NAME}-for{new}"


def managed_states(session: Session) -> list[dict[str, Any]]:
    """Optimizer states of parameters that stay with PyTorch, whole on each rank."""
    return [dict(session.states.optimizer_state(managed.param) or {}) for managed in session.managed.params]


def write_state(session: Session, path: Path, user_state: Mapping[str, UserState]) -> None:
    """Writes the leader's state file with mode 0600.

    Raises:
        OSError: the file cannot be written.
        CheckpointError: a user state has other types than plain values and tensors.
    """
    state = common_state(session, user_state)
    with os.fdopen(create_private(path), "wb") as file:
        write_plain_state(file, state, "the state that goes along with a resize")


def common_state(session: Session, user_state: Mapping[str, UserState]) -> dict[str, Any]:
    """State beside shards, the same on all ranks except for random numbers. Shares memory with the session."""
    return {
        "num_steps": session.num_steps,
        "outcome": dataclasses.asdict(dataclasses.replace(session.outcome, parts=None)),  # a new core measures none
        "scaler": dict(session.scaler.state()) if session.scaler is not None else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in session.optimizer.read_groups()],
        "managed": managed_states(session),
        "rng": rng_states(session.device),
        "user_state": {name: item.state_dict() for name, item in user_state.items()},
    }


def reached_state(folder: ResizeFolder, key: bytes, new: int, address: str, timeout_seconds: float) -> dict[str, Any]:
    """The leader's state, from its file in ``folder`` or from its server at ``address``.

    Raises:
        OSError: neither is reachable.
        CheckpointError: the file is damaged.
    """
    path = folder.file(STATE_NAME)
    if not path.exists():
        path = folder.file(reached_name(new))
        fetch(address, key, STATE_NAME, path, client=str(new), timeout_seconds=timeout_seconds)
    with os.fdopen(open_private(path), "rb") as file:
        return read_plain_state(file, "the state that goes along with a resize")


def check_state(state: dict[str, Any], user_state: Mapping[str, UserState]) -> None:
    """Raises ValueError if a user state could not take over the leader's."""
    for name, item in user_state.items():
        if isinstance(item, OfOneRun):
            item.check_state(state["user_state"][name])


def take_state(session: Session, state: dict[str, Any], user_state: Mapping[str, UserState]) -> None:
    """Sets the leader's state, except for parameters that stay with PyTorch (:func:`managed_states`)."""
    session.num_steps = state["num_steps"]
    session.outcome = type(session.outcome)(**state["outcome"])
    if session.scaler is not None:
        session.scaler.set_state(**state["scaler"])
    for group, saved in zip(session.optimizer.read_groups(), state["groups"], strict=True):
        group.update(saved)
    for name, item in user_state.items():
        item.load_state_dict(state["user_state"][name])
    set_rng_states(state["rng"], session.device)

"""Connections of one set of ranks: control groups, communicators, and the failure watch.

They are watched together, aborted at once when a rank fails, and closed together. Groups of some of the ranks belong to
all of them ([Note: groups of an axis]).
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import gloo_on_loopback
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.failures import DisagreementError, FailureWatch, abort_all, connecting
from patrickstar.ranks.messages import read_list
from patrickstar.ranks.wording import format_ranks


class _Way(enum.Enum):
    """Transport of chunks between ranks."""

    GLOO = enum.auto()
    """From host to host."""
    STAGED = enum.auto()
    """From GPU to GPU through the hosts, over gloo, if two ranks share a GPU."""
    NCCL = enum.auto()
    """From GPU to GPU."""


class Connections:
    """Connections opened by :meth:`connect`; without it, those of a single process. For one thread; the watch aborts
    them from its own.
    """

    context: DistributedContext
    """This process's rank; complete after :meth:`connect`."""
    watch: FailureWatch | None
    """The watch for failures of other ranks; None for a single process, or once closed."""

    def __init__(self, context: DistributedContext, members: tuple[int, ...], timeout_seconds: float):
        self.context = context
        self.watch = None
        self._members = members
        self._timeout_seconds = timeout_seconds
        self._way = _Way.GLOO
        self._groups: list[dist.ProcessGroup] = []
        self._controls = [_C.collective.make_single_control()]  # the first is of all members, the others of some
        self._own_controls: list[_C.collective.ControlGroup] = []  # whose call is not this rank's
        self._communicators: list[_C.collective.Communicator] = []
        self._connected_before: ChunkCommunicators | None = None
        self._stop_watch_at_exit: Callable[[], object] = lambda: None

    def connect(self, store: dist.Store, prefix: str) -> None:
        """Opens the control group of the members and starts the failure watch. All members must call it.

        Args:
            store: the store in which the members have met.
            prefix: of their keys in it.

        Raises:
            RankFailure: a rank cannot be reached.
        """
        members, device = self._members, self.context.device
        index = members.index(self.context.rank)
        group = self._gloo_group(members, [members])
        self._controls = [_C.collective.make_c10d_control(group.group_name, self._timeout_seconds)]
        if device.type == "cuda":
            # First of all over gloo: NCCL waits without a timeout for an absent rank.
            gpus = self.control.exchange(_gpu_in_use(device).encode(), "which GPU each rank has")
            self.context = dataclasses.replace(self.context, num_device_ranks=gpus.count(gpus[index]))
            is_shared = len(set(gpus)) < len(gpus)  # any of them: all ranks of a group use one transport
            self._way = _Way.STAGED if is_shared else _Way.NCCL
        controls, own, communicators = self._controls, self._own_controls, self._communicators

        def stop_all() -> None:  # refers to no Connections, whose finalizer ends the watch
            abort_all((*controls, *own, *communicators))

        self.watch = FailureWatch(store, prefix, index, members, stop_all, self._timeout_seconds)
        # The thread must end before the interpreter does, even if close() is not called.
        self._stop_watch_at_exit = weakref.finalize(self, self.watch.stop)

    @property
    def control(self) -> _C.collective.ControlGroup:
        """Agreement among all members."""
        return self._controls[0]

    def enter(self, call: str) -> None:
        """Sets the call that this rank is in, for all control groups; empty: none."""
        for control in self._controls:
            control.enter(call)

    def open_for_all(self) -> _C.collective.Communicator:
        """A communicator of all members, connected by the first collective. All must call it at the same point."""
        if self.watch is None:
            return self._keep(self._single_communicator())
        return self._keep(self._communicator(self._members, [self._members]))

    def keep_connected(self, connected: ChunkCommunicators) -> None:
        """Takes ownership of communicators that the members opened before they were ranks."""
        self._connected_before = connected
        self._keep(connected.gather)
        self._keep(connected.scatter)

    def open_communicator(self, what: str, some: tuple[int, ...]) -> _C.collective.Communicator:
        """A communicator of ``some`` members, for ``what``, connected for exchanges. All members must call it at the
        same point, each with its own group.

        Raises:
            DisagreementError: ranks name different members for one group.
        """
        division = self._agree_on_division(what, some)
        if division is None:
            return self._single_communicator()
        communicator = self._keep(self._communicator(some, division))
        if self.context.device.type == "cuda":
            _send_to_all(communicator, self.context.device)
        return communicator

    def open_control(self, what: str, some: tuple[int, ...]) -> _C.collective.ControlGroup:
        """A control group of ``some`` members, for ``what``, in this rank's current call. Conditions are those of
        :meth:`open_communicator`.
        """
        division = self._agree_on_division(what, some)
        if division is None:
            control = _C.collective.make_single_control()
        else:
            name = self._gloo_group(some, division).group_name
            control = _C.collective.make_c10d_control(name, self._timeout_seconds, self._numbers(some))
            self._controls.append(control)
        control.enter(self.control.call)
        return control

    def open_own_control(self, call: str) -> _C.collective.ControlGroup:
        """A control group of all members for another thread, which is always in ``call``. All members must open it at
        the same point.
        """
        if self.watch is None:
            return _C.collective.make_single_control()
        name = self._gloo_group(self._members, [self._members]).group_name
        control = _C.collective.make_c10d_control(name, self._timeout_seconds)
        control.enter(call)
        self._own_controls.append(control)
        return control

    def abort(self) -> None:
        """Aborts all running operations, on this rank."""
        abort_all((*self._controls, *self._own_controls, *self._communicators))

    def close(self) -> None:
        """Closes all connections without waiting for other ranks."""
        self._stop_watch_at_exit()
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        # before any is closed: on a GPU an operation of one may be queued behind a waiting operation of another
        self.abort()
        for part in (*self._controls, *self._own_controls, *self._communicators):
            part.close()
        if self._connected_before is not None:
            self._connected_before.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def _keep(self, communicator: _C.collective.Communicator) -> _C.collective.Communicator:
        self._communicators.append(communicator)
        if self.watch is not None:
            self.watch.watch_also(communicator)
        return communicator

    def _agree_on_division(self, what: str, some: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """The groups into which the members are divided, in the same order on all ranks; None if each is alone."""
        if self.watch is None:
            return None
        told = self.control.exchange(json.dumps(some).encode(), f"the members for {what}")
        of_each = [read_list(value, f"the members for {what}", lambda rank: isinstance(rank, int)) for value in told]
        _check_division(what, dict(zip(self._members, map(tuple, of_each), strict=True)))
        division = sorted(set(map(tuple, of_each)))
        return None if all(len(part) == 1 for part in division) else division

    def _communicator(
        self, members: tuple[int, ...], division: Sequence[tuple[int, ...]]
    ) -> _C.collective.Communicator:
        numbers, device = self._numbers(members), self.context.device
        if self._way is _Way.NCCL:
            index = members.index(self.context.rank)
            ids = self.control.exchange(_C.collective.make_nccl_id() if index == 0 else b"", "NCCL's id")
            first = ids[self._members.index(members[0])]
            return _C.collective.make_nccl_communicator(
                first, rank=index, size=len(members), device=device.index, members=numbers
            )
        name = self._gloo_group(members, division).group_name
        if self._way is _Way.STAGED:
            return _C.collective.make_cuda_staged_communicator(name, device=device.index, members=numbers)
        return _C.collective.make_c10d_communicator(name, numbers)

    def _single_communicator(self) -> _C.collective.Communicator:
        device = self.context.device
        if device.type == "cuda" and _C.build_info()["cuda"] is not None:
            return _C.collective.make_cuda_single_communicator(device.index)
        return _C.collective.make_single_communicator()

    def _gloo_group(self, members: tuple[int, ...], division: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """The gloo group of ``members``, while other ranks of the run make theirs.

        PyTorch names a group by a count if all ranks of the world make all groups. If only its members make it, the
        name can be that of an earlier group of theirs, whose addresses it would find. So that variant is used only if
        some ranks of the world take no part.
        """
        timeout = datetime.timedelta(seconds=self._timeout_seconds)
        world_group = len(self._members) == self.context.world_size
        options = {"timeout": timeout, "backend": "gloo", "use_local_synchronization": not world_group}
        parts = division if world_group else [members]
        with connecting(self.context.rank), gloo_on_loopback(os.environ.get("MASTER_ADDR", "")):
            made = {part: dist.new_group(list(part), **options) for part in parts}
        self._groups.append(made[members])
        return made[members]

    def _numbers(self, members: tuple[int, ...]) -> Sequence[int]:
        """The members' ranks in the run, for errors of a communicator that counts from 0; empty if these
        are the same.
        """
        return members if len(members) < self.context.world_size else ()


def _check_division(what: str, members: dict[int, tuple[int, ...]]) -> None:
    """Checks that members of a group name the same group; all ranks see all ``members``, so all raise."""
    if all(members.get(other) == some for some in members.values() for other in some):
        return
    shown = "; ".join(f"rank {rank} with {format_ranks(some)}" for rank, some in members.items())
    raise DisagreementError(
        f"ranks share the communicator for {what} with different ones ({shown}); give the same members on each of them"
    )


def _gpu_in_use(device: torch.device) -> str:
    """The UUID of a GPU, independent of CUDA_VISIBLE_DEVICES. First touches the GPU: on a shared GPU all processes have
    allocated their context before any measures free memory.
    """
    torch.zeros(1, device=device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _send_to_all(communicator: _C.collective.Communicator, device: torch.device) -> None:
    """First messages, as in ``warm_up``, for exchanges alone; connections for collectives would take memory."""
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    sent, received = torch.zeros(2, communicator.size, 4, device=device)
    with torch.cuda.device(device):
        communicator.exchange(
            [(rank, sent[rank].data_ptr(), 16) for rank in others],
            [(rank, received[rank].data_ptr(), 16) for rank in others],
        )
        torch.cuda.current_stream().synchronize()
        communicator.check()

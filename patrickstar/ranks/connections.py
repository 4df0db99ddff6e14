"""Connections of one set of ranks: groups for agreement, communicators, and the watch for failures.

They are watched together, aborted at once when a rank fails, and closed together. What is opened among some of the
ranks belongs to all of them ([Note: groups of an axis]).
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
from patrickstar.ranks.failures import DisagreementError, FailureWatch, abort_all, first_line
from patrickstar.ranks.messages import read_list
from patrickstar.ranks.wording import format_ranks


class _Way(enum.Enum):
    """The way of chunks from rank to rank."""

    GLOO = enum.auto()
    """From host to host."""
    STAGED = enum.auto()
    """From GPU to GPU through the hosts, over gloo: two ranks have one GPU."""
    NCCL = enum.auto()
    """From GPU to GPU."""


class Connections:
    """Connections that :meth:`connect` opens; without it those of a process alone, which needs none. One thread; the
    watch aborts them from its own.
    """

    context: DistributedContext
    """The rank that this process is; complete after :meth:`connect`."""
    watch: FailureWatch | None
    """The watch for failures of other ranks; None: a process alone, or closed."""

    def __init__(self, context: DistributedContext, members: tuple[int, ...], timeout_seconds: float):
        self.context = context
        self.watch = None
        self._members = members
        self._timeout_seconds = timeout_seconds
        self._way = _Way.GLOO
        self._groups: list[dist.ProcessGroup] = []
        self._controls = [_C.collective.make_single_control()]  # of all members, then of some
        self._communicators: list[_C.collective.Communicator] = []
        self._connected_before: ChunkCommunicators | None = None
        self._stop_watch_at_exit: Callable[[], object] = lambda: None

    def connect(self, store: dist.Store, prefix: str) -> None:
        """Opens agreement among the members, all of which call it, and watches for failures from now on.

        Args:
            store: the one in which the members have met.
            prefix: of their keys in it.

        Raises:
            RankFailure: a rank cannot be reached.
        """
        members, device = self._members, self.context.device
        index = members.index(self.context.rank)
        group = self._gloo_group(members, [members])
        self._controls = [_C.collective.make_c10d_control(group.group_name, self._timeout_seconds)]
        if device.type == "cuda":
            # Also because NCCL waits without end for a rank that does not come.
            gpus = self.control.exchange(_gpu_in_use(device).encode(), "which GPU each rank has")
            self.context = dataclasses.replace(self.context, num_device_ranks=gpus.count(gpus[index]))
            is_shared = len(set(gpus)) < len(gpus)  # any of them: all ranks of a group talk in the same way
            self._way = _Way.STAGED if is_shared else _Way.NCCL
        controls, communicators = self._controls, self._communicators

        def stop_all() -> None:  # refers to no Connections, whose end ends the watch
            abort_all((*controls, *communicators))

        self.watch = FailureWatch(store, prefix, index, members, stop_all, self._timeout_seconds)
        # The thread must end before the interpreter does, also when nobody closes.
        self._stop_watch_at_exit = weakref.finalize(self, self.watch.stop)

    @property
    def control(self) -> _C.collective.ControlGroup:
        """Agreement among all members."""
        return self._controls[0]

    def enter(self, call: str) -> None:
        """The call that this rank is in from now on, for all agreement; empty: none."""
        for control in self._controls:
            control.enter(call)

    def open_for_all(self) -> _C.collective.Communicator:
        """A communicator of all members, which call it at the same point, that the first collective connects."""
        if self.watch is None:
            return self._keep(self._single_communicator())
        return self._keep(self._communicator(self._members, [self._members]))

    def keep_connected(self, connected: ChunkCommunicators) -> None:
        """Communicators that the members opened before they were ranks belong to these connections from now on."""
        self._connected_before = connected
        self._keep(connected.gather)
        self._keep(connected.scatter)

    def open_communicator(self, what: str, some: tuple[int, ...]) -> _C.collective.Communicator:
        """A communicator of ``some`` members, for ``what``, connected for exchanges. All members call it at the same
        point, each with those that it shares it with.

        Raises:
            DisagreementError: two ranks share it with different ones.
        """
        division = self._agree_on_division(what, some)
        if division is None:
            return self._single_communicator()
        communicator = self._keep(self._communicator(some, division))
        if self.context.device.type == "cuda":
            _send_to_all(communicator, self.context.device)
        return communicator

    def open_control(self, what: str, some: tuple[int, ...]) -> _C.collective.ControlGroup:
        """Agreement among ``some`` members, for ``what``, in the call that this rank is in; as
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

    def abort(self) -> None:
        """Ends what runs in them, on this rank ([Note: aborted at once])."""
        abort_all((*self._controls, *self._communicators))

    def close(self) -> None:
        """Takes down all of them; waits for no other rank."""
        self._stop_watch_at_exit()
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        self.abort()  # before any is closed: on a GPU what one has begun may be behind what waits in another
        for part in (*self._controls, *self._communicators):
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
        """The sets that the members are divided into, in the same order on all ranks; None: each is alone."""
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
        """The group of ``members``, while the others of the run make theirs. [Note: names of groups] PyTorch names a
        group by a count where all ranks of the world make all groups. Where its members alone make it, its name is that
        of an earlier group of theirs, whose addresses it would find; so that is done only where some ranks of the world
        have no part in this.
        """
        timeout = datetime.timedelta(seconds=self._timeout_seconds)
        everybody = len(self._members) == self.context.world_size
        options = {"timeout": timeout, "backend": "gloo", "use_local_synchronization": not everybody}
        try:
            with gloo_on_loopback(os.environ.get("MASTER_ADDR", "")):
                made = {part: dist.new_group(list(part), **options) for part in (division if everybody else [members])}
        except RuntimeError as error:
            raise _C.RankFailure(
                f"rank {self.context.rank} could not connect to the others ({first_line(error)}); where ranks are on "
                "several nodes, GLOO_SOCKET_IFNAME must name the network interface that reaches them"
            ) from error
        self._groups.append(made[members])
        return made[members]

    def _numbers(self, members: tuple[int, ...]) -> Sequence[int]:
        """The members' numbers in the run, for errors of a communicator, which counts its own from 0; none where those
        are the same.
        """
        return members if len(members) < self.context.world_size else ()


def _check_division(what: str, members: dict[int, tuple[int, ...]]) -> None:
    """All ranks have the same ``members`` of each, so all of them raise."""
    if all(members.get(other) == some for some in members.values() for other in some):
        return
    shown = "; ".join(f"rank {rank} with {format_ranks(some)}" for rank, some in members.items())
    raise DisagreementError(
        f"ranks share the communicator for {what} with different ones ({shown}); give the same members on each of them"
    )


def _gpu_in_use(device: torch.device) -> str:
    """The name of a GPU, the same in all processes, whichever they see (CUDA_VISIBLE_DEVICES). This process has begun
    to use it: on a shared GPU all have, before any asks what is free.
    """
    torch.zeros(1, device=device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _send_to_all(communicator: _C.collective.Communicator, device: torch.device) -> None:
    """The first messages, as of ``warm_up``, for exchanges alone: connections for collectives would take memory."""
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    sent, received = torch.zeros(2, communicator.size, 4, device=device)
    with torch.cuda.device(device):
        communicator.exchange(
            [(rank, sent[rank].data_ptr(), 16) for rank in others],
            [(rank, received[rank].data_ptr(), 16) for rank in others],
        )
        torch.cuda.current_stream().synchronize()
        communicator.check()

"""Ranks: this process's rank, its groups, and the reaction to failures.

    with open_ranks(device_type="cpu", timeout_seconds=600) as ranks:
        ranks.check_agreement("config", json_text)
        with ranks.guard("forward of step 1"):
            ranks.gather.all_gather(address, shard_bytes)

Collectives of all ranks take memory on GPUs; code that may not need them begins with `join_ranks`.

A single process (WORLD_SIZE unset or 1) does not use torch.distributed. Otherwise an initialised torch.distributed is
used, or one is made from torchrun's environment, which `close` takes down again. Ranks need not share a machine.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, warm_up
from patrickstar.ranks.connections import Connections
from patrickstar.ranks.context import DistributedContext, make_context
from patrickstar.ranks.failures import DisagreementError, FailureWatch, failing_together, first_line
from patrickstar.ranks.wording import describe_disagreement, format_ranks
from patrickstar.ranks.world import Meeting, enter_world, leave_world, meet

DEFAULT_TIMEOUT_SECONDS = 600.0


class _State(enum.Enum):
    """Connections of :class:`RankGroups`."""

    JOINED = enum.auto()
    """Control groups only."""
    CONNECTED = enum.auto()
    """Communicators for chunks too."""
    CLOSED = enum.auto()


class RankGroups:
    """The groups of one set of ranks, made by `open_ranks` or `join_ranks`. For one thread, unless a member says
    otherwise.
    """

    context: DistributedContext
    """This process's rank and device."""
    members: tuple[int, ...]
    """The group's ranks, ascending; `rank` of a communicator is the index in it."""
    control: _C.collective.ControlGroup
    """Agreement on small values, over the hosts."""
    gather: _C.collective.Communicator
    """For all-gathers of chunks among the members; available after :meth:`open_collectives`."""
    scatter: _C.collective.Communicator
    """For reduce-scatters, independent of `gather`."""

    def __init__(self, context: DistributedContext, members: Sequence[int], timeout_seconds: float):
        self.context = context
        self.members = tuple(members)
        self._connections = Connections(context, self.members, timeout_seconds)
        self.control = self._connections.control
        self.gather = self.scatter = _C.collective.make_single_communicator()
        self._state = _State.JOINED
        self._world = contextlib.ExitStack()
        self._process = os.getpid()

    def _connect(self, meeting: Meeting) -> None:
        self._connections.connect(meeting.store, meeting.prefix)
        self.context, self.control = self._connections.context, self._connections.control

    @property
    def _watch(self) -> FailureWatch | None:
        return self._connections.watch

    @property
    def is_fork(self) -> bool:
        """True if this process is a fork of the one that opened the groups and owns their connections."""
        return os.getpid() != self._process

    def open_collectives(self) -> None:
        """Opens ``gather`` and ``scatter`` if necessary. All ranks of these groups must call it at the same point."""
        if self._state is _State.CONNECTED:
            return
        self._state = _State.CONNECTED
        if self._watch is None:
            self.gather = self.scatter = self._connections.open_for_all()
            return
        with self.guard("opening the groups for chunks"):
            self.gather = self._connections.open_for_all()
            self.scatter = self._connections.open_for_all()
            if self.context.device.type == "cuda":
                warm_up(self.gather, self.scatter, self.context.device)

    def take_collectives(self, connected: ChunkCommunicators) -> None:
        """Replaces :meth:`open_collectives`: takes communicators that these ranks opened, in their order, before they
        were ranks. They fail, are aborted and are closed with these groups.
        """
        self._state = _State.CONNECTED
        self.gather, self.scatter = connected.gather, connected.scatter
        self._connections.keep_connected(connected)

    def open_communicator(self, what: str, members: Sequence[int] | None = None) -> _C.collective.Communicator:
        """Opens another communicator, for ``what``: of ``members`` (default: all), connected for exchanges.

        All ranks of these groups must open it at the same point, each with its own group. It fails, is aborted and is
        closed with these groups. On a GPU it takes memory.

        Raises:
            ValueError: this rank is not one of ``members``, or one of them is not in these groups.
            DisagreementError: ranks name different members for one group.
        """
        some = self._checked(what, self.members if members is None else members)
        with self.guard(f"opening the group for {what}"):
            return self._connections.open_communicator(what, some)

    def _checked(self, what: str, members: Sequence[int]) -> tuple[int, ...]:
        some = tuple(sorted(members))
        if self.context.rank not in some or not set(some) <= set(self.members):
            raise ValueError(
                f"rank {self.context.rank} opens a communicator for {what} with {format_ranks(some)}, but the groups "
                f"are of {format_ranks(self.members)}; give some of these, with this rank among them"
            )
        return some

    def open_control(self, what: str, members: Sequence[int]) -> _C.collective.ControlGroup:
        """A control group of ``members``, for ``what``, in the same calls as these groups. Conditions are those of
        :meth:`open_communicator`.
        """
        some = self._checked(what, members)
        with self.guard(f"opening the group for {what}"):
            return self._connections.open_control(what, some)

    def open_own_control(self, call: str) -> _C.collective.ControlGroup:
        """A control group of all members for another thread, which is always in ``call``. All members must open it at
        the same point. It fails and is closed with these groups.
        """
        return self._connections.open_own_control(call)

    def check_agreement(self, name: str, value: str) -> None:
        """Raises DisagreementError, a StateError, on every rank unless all ranks have the same `value`."""
        digests = self.control.exchange(hashlib.sha256(value.encode()).digest(), name)
        if len(set(digests)) > 1:
            values = [item.decode(errors="replace") for item in self.control.exchange(value.encode(), name)]
            raise DisagreementError(describe_disagreement(name, dict(zip(self.members, values, strict=True))))

    def guard(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Context around a call in which all ranks take part, such as "forward of step 3".

        A failure inside is posted to the other ranks; a failure of another rank raises RankFailure. Ranks that meet in
        different calls raise RankMismatch. Nested calls count as the outer one.

        Raises:
            StateError: this process is a fork of the one that opened the groups.
        """
        if self._watch is not None and self.is_fork:
            raise _C.StateError(
                f"{call}: this process is a fork of the one that opened the groups of ranks (a DataLoader worker, a "
                "subprocess?), and must not use their connections; call it in the process that opened them"
            )
        if self._watch is None or self.control.call:
            return contextlib.nullcontext()
        return self._in_call(self._watch, call)

    def meet(self) -> None:
        """Checks that all ranks are in the same call; otherwise raises RankMismatch on all. For calls whose own
        messages do not name the call.
        """
        if self._watch is not None:
            self.control.exchange(b"", "its beginning")

    @contextlib.contextmanager
    def _in_call(self, watch: FailureWatch, call: str) -> Iterator[None]:
        self._connections.enter(call)
        watch.activity = call
        try:
            with failing_together(watch, self.context.rank, call):
                yield
        finally:
            self._connections.enter("")
            watch.activity = f"the user's code after {call}"

    def close(self) -> None:
        """Waits for the other ranks to close too, unless one has failed, and takes down everything that `open_ranks`
        made. Raises RankFailure if another rank leaves without closing.
        """
        if self._state is _State.CLOSED or self.is_fork:
            return
        self._state = _State.CLOSED
        try:
            if self._watch is not None and self._watch.failure is None:
                with self.guard("close"):
                    self.control.exchange(b"", "the end")
        finally:
            self._take_down()

    def fail(self, error: BaseException) -> None:
        """Posts that this rank leaves because of ``error``, and aborts all running operations. Afterwards only
        :meth:`leave` may be called.
        """
        if self._state is _State.CLOSED or self._watch is None or self.is_fork:
            return
        if self._watch.failure is None:
            self._watch.announce(f"rank {self.context.rank}: {type(error).__name__}: {first_line(error)}")
        self._connections.abort()

    def leave(self, error: BaseException) -> None:
        """Calls :meth:`fail` and takes down what `open_ranks` made. Waits for no other rank."""
        self.fail(error)
        self._take_down()

    def _take_down(self) -> None:
        self._state = _State.CLOSED
        if self.is_fork:  # PyTorch's groups have threads, which belong to the other process
            return
        self._connections.close()
        self._world.close()

    def __enter__(self) -> RankGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave(error)


def open_ranks(
    *,
    device_type: str = "cpu",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    local_rank: int | None = None,
    device_index: int | None = None,
    ranks: Sequence[int] | None = None,
    connected: ChunkCommunicators | None = None,
) -> RankGroups:
    """Opens the groups of `ranks` (default: all). Each of them must call this; the others need not.

    `device_type` is "cpu" (gloo) or "cuda" (NCCL; through the host, over gloo, if two ranks share a GPU). `local_rank`
    overrides LOCAL_RANK; `device_index` is the GPU's index if it is not `local_rank`. `timeout_seconds` bounds every
    wait for another rank. `connected`, given by all ranks or none, are communicators for chunks opened earlier; these
    groups close them, also on failure.

    Raises RankFailure if a rank does not arrive, StateError for an incomplete environment.
    """
    try:
        groups = join_ranks(
            device_type=device_type,
            timeout_seconds=timeout_seconds,
            local_rank=local_rank,
            device_index=device_index,
            ranks=ranks,
        )
    except BaseException:
        if connected is not None:
            connected.close()
        raise
    try:
        if connected is None:
            groups.open_collectives()
        else:
            groups.take_collectives(connected)
    except BaseException:
        groups._take_down()
        raise
    return groups


def join_ranks(
    *,
    device_type: str = "cpu",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    local_rank: int | None = None,
    device_index: int | None = None,
    ranks: Sequence[int] | None = None,
) -> RankGroups:
    """Groups as of `open_ranks`, with the control group alone; :meth:`RankGroups.open_collectives` opens the rest."""
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
    where: dict[str, Any] = {"local_rank": local_rank, "device_type": device_type, "device_index": device_index}
    if not enter_world(timeout_seconds):
        return RankGroups(make_context(0, 1, **where), (0,), timeout_seconds)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        members = tuple(range(world_size)) if ranks is None else tuple(sorted(ranks))
        if rank not in members:
            raise ValueError(f"rank {rank} is not one of ranks {list(members)}; only those open the group")
        meeting = meet(rank, members, timeout_seconds)
        context = make_context(rank, world_size, meeting.hosts, **where)
    except BaseException:
        leave_world()
        raise
    groups = RankGroups(context, members, timeout_seconds)
    groups._world.callback(leave_world)
    if len(members) == 1:  # as without a world: nobody else fails with this process
        return groups
    try:
        groups._connect(meeting)
    except BaseException:
        groups._take_down()
        raise
    return groups

"""Ranks: which one this process is, the groups in which it talks to others, and what happens when one of them fails.

    with open_ranks(device_type="cpu", timeout_seconds=600) as ranks:
        ranks.check_agreement("config", json_text)
        with ranks.guard("forward of step 1"):
            ranks.gather.all_gather(address, shard_bytes)

Who may not need collectives of all ranks, which take memory on GPUs, begins with `join_ranks`.

One process alone (WORLD_SIZE unset or 1) uses nothing of torch.distributed. Otherwise an initialised torch.distributed
is used as it is, or one is made from the environment that torchrun sets, and taken down again by `close`.
Nothing here assumes that ranks share a machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import gloo_on_loopback
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, warm_up
from patrickstar.ranks.failures import (
    DisagreementError,
    FailureWatch,
    abort_all,
    failing_together,
    first_line,
    own_connection,
)
from patrickstar.ranks.messages import read_list
from patrickstar.ranks.world_store import attempt, reach_world, world_store

DEFAULT_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 0.002  # twice as long each time: who comes to a resize is here at once
_VERDICT_SECONDS = 1.0  # for the others to read who is missing
_SHOWN_CHARACTERS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """Which rank this process is."""

    rank: int = 0
    """From 0 to `world_size` - 1, over all nodes."""
    world_size: int = 1
    """Number of processes in the run, over all nodes."""
    local_rank: int = 0
    """From 0 to `local_world_size` - 1, among those on this node; the index of this process's GPU, unless ranks share
    GPUs.
    """
    local_world_size: int = 1
    """Processes of the run on this node: they share its cores, memory and links."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """The device on which this process computes."""
    num_device_ranks: int = 1
    """Ranks of the run that compute on the GPU of this process, itself included; simulated devices are never shared."""


class RankGroups:
    """The groups of one set of ranks, made by `open_ranks` or `join_ranks`. One thread, but for what the members
    allow.
    """

    context: DistributedContext
    """Which rank this process is."""
    members: tuple[int, ...]
    """The group's ranks, ascending; `rank` of a communicator is the index in it."""
    control: _C.collective.ControlGroup
    """Agreement on small values, over the hosts."""
    gather: _C.collective.Communicator
    """For all-gathers of chunks among the members; with :meth:`open_collectives`."""
    scatter: _C.collective.Communicator
    """For reduce-scatters, independent of `gather`."""

    def __init__(self, context: DistributedContext, members: Sequence[int], timeout_seconds: float):
        self.context = context
        self.control = _C.collective.make_single_control()
        self.gather = self.scatter = _C.collective.make_single_communicator()
        self.members = tuple(members)
        self._timeout_seconds = timeout_seconds
        self._groups: list[dist.ProcessGroup] = []
        self._further: list[_C.collective.Communicator] = []
        self._controls: list[_C.collective.ControlGroup] = []  # of some of the members
        self._communicator_of: Callable[[RankGroups, tuple[int, ...]], _C.collective.Communicator] = _host_communicator
        self._has_collectives = False
        self._connected: ChunkCommunicators | None = None
        self._watch: FailureWatch | None = None
        self._stop_watch_at_exit: Callable[[], object] = lambda: None
        self._uses_world = False
        self._closed = False
        self._process = os.getpid()

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that opened the groups: the connections are the other's."""
        return os.getpid() != self._process

    @property
    def has_collectives(self) -> bool:
        """Whether ``gather`` and ``scatter`` are there."""
        return self._has_collectives

    def open_collectives(self) -> None:
        """Opens ``gather`` and ``scatter``, unless they are there. All ranks of these groups call it at the same
        point.
        """
        if self._has_collectives:
            return
        self._has_collectives = True
        if self._watch is None:
            self.gather = self.scatter = _single_communicator(self.context.device)
            self._further.append(self.gather)
            return
        with self.guard("opening the groups for chunks"):
            for name in ("gather", "scatter"):
                made = self._communicator_of(self, self.members, [self.members])
                setattr(self, name, made)
                self._further.append(made)
                self._watch.watch_also(made)
            if self.context.device.type == "cuda":
                warm_up(self.gather, self.scatter, self.context.device)

    def take_collectives(self, connected: ChunkCommunicators) -> None:
        """In place of :meth:`open_collectives`: ``gather`` and ``scatter`` that these ranks opened before they were
        ranks, in their order. They fail, are stopped and are closed together with these groups.
        """
        self._has_collectives = True
        self.gather, self.scatter = connected.gather, connected.scatter
        self._connected = connected
        self._further += [self.gather, self.scatter]
        if self._watch is not None:
            self._watch.watch_also(self.gather)
            self._watch.watch_also(self.scatter)

    def open_communicator(self, what: str, members: Sequence[int] | None = None) -> _C.collective.Communicator:
        """Another communicator, for ``what``: of ``members`` (default: all), connected for exchanges.

        All ranks of these groups open it at the same point, each with those that it shares it with; it fails, is
        stopped and is closed together with these groups. On a GPU it takes memory.

        Raises:
            ValueError: this rank is not one of ``members``, or one of them is not in these groups.
            DisagreementError: two ranks share it with different ones.
        """
        some = self._checked(what, self.members if members is None else members)
        if self._watch is None:
            return _single_communicator(self.context.device)
        with self.guard(f"opening the group for {what}"):
            return _open_further(self, self._watch, what, some)

    def _checked(self, what: str, members: Sequence[int]) -> tuple[int, ...]:
        some = tuple(sorted(members))
        if self.context.rank not in some or not set(some) <= set(self.members):
            raise ValueError(
                f"rank {self.context.rank} opens a communicator for {what} with {format_ranks(some)}, but the groups "
                f"are of {format_ranks(self.members)}; give some of these, with this rank among them"
            )
        return some

    def open_control(self, what: str, members: Sequence[int]) -> _C.collective.ControlGroup:
        """Agreement among ``members`` alone, for ``what``, in the same calls as these groups; as
        :meth:`open_communicator`.
        """
        some = self._checked(what, members)
        if self._watch is None:
            return _C.collective.make_single_control()
        with self.guard(f"opening the group for {what}"):
            control = _open_control(self, what, some)
            control.enter(self.control.call)
        return control

    def check_agreement(self, name: str, value: str) -> None:
        """Raises DisagreementError, a StateError, on every rank unless all ranks have the same `value`."""
        digests = self.control.exchange(hashlib.sha256(value.encode()).digest(), name)
        if len(set(digests)) > 1:
            values = [item.decode(errors="replace") for item in self.control.exchange(value.encode(), name)]
            raise DisagreementError(describe_disagreement(name, dict(zip(self.members, values, strict=True))))

    def guard(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Around a call in which all ranks take part, such as "forward of step 3". Within it, what fails here is told
        to the others, and what failed on another rank raises RankFailure; ranks that meet in different calls raise
        RankMismatch. A call within a call counts as the outer one.

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
        """Within a call whose own messages do not say which call it is (it gathers values): all ranks are in it, or
        RankMismatch is raised on all of them.
        """
        if self._watch is not None:
            self.control.exchange(b"", "its beginning")

    @contextlib.contextmanager
    def _in_call(self, watch: FailureWatch, call: str) -> Iterator[None]:
        self._enter(call)
        watch.activity = call
        try:
            with failing_together(watch, self.context.rank, call):
                yield
        finally:
            self._enter("")
            watch.activity = f"the user's code after {call}"

    def _enter(self, call: str) -> None:
        for control in (self.control, *self._controls):
            control.enter(call)

    def close(self) -> None:
        """Waits for the other ranks to close as well, unless one has failed, and takes down what `open_ranks` made: on
        all ranks at this point, and nothing of it is left afterwards.

        Raises RankFailure when another rank leaves without closing.
        """
        if self._closed or self.is_fork:
            return
        self._closed = True
        try:
            if self._watch is not None and self._watch.failure is None:
                with self.guard("close"):
                    self.control.exchange(b"", "the end")
        finally:
            self._take_down()

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that this one leaves because of ``error``, and ends what still runs with them. Nothing
        of the groups can be used afterwards but :meth:`leave`.
        """
        if self._closed or self._watch is None or self.is_fork:
            return
        if self._watch.failure is None:
            self._watch.announce(f"rank {self.context.rank}: {type(error).__name__}: {first_line(error)}")
        abort_all((self.control, *self._controls, *self._further))

    def leave(self, error: BaseException) -> None:
        """:meth:`fail`, and takes down what `open_ranks` made. Waits for no other rank."""
        self.fail(error)
        self._take_down()

    def _take_down(self) -> None:
        self._closed = True
        if self.is_fork:  # PyTorch's groups have threads, too, which are the other process's
            return
        self._stop_watch_at_exit()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        parts = (self.control, *self._controls, *self._further)
        abort_all(parts)  # before any is closed: on a GPU what one has begun may be behind what waits in another
        for part in parts:
            part.close()
        if self._connected is not None:
            self._connected.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        if self._uses_world:
            self._uses_world = False
            _leave_world()

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
    """The groups of `ranks` (default: all), each of which must call this; the others need not.

    `device_type` is "cpu" (gloo) or "cuda" (NCCL; through the host, over gloo, where two ranks have one GPU);
    `local_rank` overrides LOCAL_RANK, `device_index` is the GPU's where that is not `local_rank`. `timeout_seconds`
    bounds every wait for another rank. `connected`, which all of them or none must give, are what they opened for
    chunks beforehand; these groups close it, also when they cannot be opened. Raises RankFailure when a rank does not
    come, StateError for an incomplete environment.
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
    """As `open_ranks`, with agreement alone: :meth:`RankGroups.open_collectives` opens the rest, where it is needed."""
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
    if not _enter_world(timeout_seconds):
        context = _make_context(0, 1, local_rank, device_type, device_index, lambda: [_host()])
        return RankGroups(context, (0,), timeout_seconds)
    store = own_connection(dist.distributed_c10d._get_default_store(), timeout_seconds)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = tuple(range(world_size)) if ranks is None else tuple(sorted(ranks))
    if rank not in members:
        _leave_world()
        raise ValueError(f"rank {rank} is not one of ranks {list(members)}; only those open the group")
    try:
        with _waiting(rank):
            prefix = _new_prefix(store, members, rank)
            _call_the_roll(store, prefix, members, rank, timeout_seconds)
            context = _make_context(
                rank, world_size, local_rank, device_type, device_index, lambda: _hosts(store, prefix, members, rank)
            )
    except BaseException:
        _leave_world()
        raise
    groups = RankGroups(context, members, timeout_seconds)
    groups._uses_world = True
    try:
        _connect(groups, store, prefix)
    except BaseException:
        groups._take_down()
        raise
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank a process is from now on, and who serves the store of the ranks' world."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """Of rank 0, which serves the store."""
    port: int
    """The store's port on it; 0: one rank, without a store."""
    key: bytes = dataclasses.field(repr=False)
    """The store's key: 32 bytes."""


def move_to_world(place: Place, timeout_seconds: float) -> None:
    """This process leaves the world that it is in, whose groups were closed, and is in that of ``place`` when it opens
    ranks the next time. The environment says what torchrun would: libraries read it. A ``torch.distributed`` that is
    still there ends with all its groups.

    Raises:
        RankFailure: the store of the new ranks is not reached within the timeout.
    """
    global _num_world_users
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        _num_world_users = 0
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if place.world_size > 1:
        reach_world(place.host, place.port, place.key, timeout_seconds)


def num_ranks_to_come() -> int:
    """How many ranks `open_ranks` will find, before it is called."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return max(int(os.environ.get("WORLD_SIZE") or 1), 1)


# Entering torch.distributed.


_process: int | None = None
"""The process that was the first to enter torch.distributed."""
_made_world = False
"""Whether the present torch.distributed was made here."""
_num_world_users = 0
"""Groups of ranks in this process that are open: the last to leave takes down what was made here."""


def _enter_world(timeout_seconds: float) -> bool:
    """False for a process alone. Who enters leaves by :func:`_leave_world`."""
    is_there = dist.is_available() and dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if not is_there and world_size <= 1:
        return False
    global _process, _made_world, _num_world_users
    if _process not in (None, os.getpid()):
        raise _C.StateError(
            "this process is a fork of a rank (a DataLoader worker, a subprocess?), and must not use its connections; "
            "start ranks as processes of their own"
        )
    _process = os.getpid()
    if not is_there:
        _make_world(world_size, timeout_seconds)
        _made_world, _num_world_users = True, 0
    elif _num_world_users == 0:
        _made_world = False
    _num_world_users += 1
    return True


def _leave_world() -> None:
    global _num_world_users
    _num_world_users -= 1
    if _num_world_users == 0 and _made_world and dist.is_initialized():
        dist.destroy_process_group()


def _make_world(world_size: int, timeout_seconds: float) -> None:
    if not dist.is_available():
        raise _C.StateError(
            f"WORLD_SIZE is {world_size}, but this PyTorch has no torch.distributed; install one that has"
        )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise _C.StateError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set; start the script with torchrun, or set them"
        )
    rank = int(os.environ["RANK"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = world_store(rank, timeout)
    # Before torch.distributed does it, whose error would not say who is missing.
    _call_the_roll(store, f"patrickstar/{attempt()}/world", range(world_size), rank, timeout_seconds)
    with gloo_on_loopback(os.environ["MASTER_ADDR"]):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextlib.contextmanager
def _waiting(rank: int) -> Iterator[None]:
    """A store that is lost while ranks wait for each other to come is a RankFailure."""
    try:
        yield
    except dist.DistError as error:
        raise _C.RankFailure(
            f"rank {rank} waited for the others to come and lost torch's store ({first_line(error)}): rank 0 or "
            "torchrun's agent ended; see its output"
        ) from error


def _call_the_roll(store: dist.Store, prefix: str, members: Sequence[int], rank: int, timeout_seconds: float) -> None:
    """Returns when all members are here; raises RankFailure that names those who are not within the timeout."""
    keys = {member: f"{prefix}/arrived/{member}" for member in members}
    verdict = f"{prefix}/missing"
    deadline = time.monotonic() + timeout_seconds
    poll = _FIRST_POLL_SECONDS
    with _waiting(rank):
        store.set(f"{prefix}/arrived/{rank}", "1")
        while not store.check(list(keys.values())):
            if store.check([verdict]):
                raise _C.RankFailure(store.get(verdict).decode())
            if time.monotonic() > deadline:
                missing = format_ranks([member for member, key in keys.items() if not store.check([key])])
                text = f"{missing} of {len(keys)} did not come within {timeout_seconds:g} s; see their output"
                store.set(verdict, text)
                time.sleep(_VERDICT_SECONDS)  # this process may be the one that serves the store
                raise _C.RankFailure(text)
            time.sleep(poll)
            poll = min(2 * poll, _POLL_SECONDS)


def _new_prefix(store: dist.Store, members: Sequence[int], rank: int) -> str:
    """Where the keys of these groups lie: another place each time that the same ranks open groups."""
    name = f"patrickstar/{attempt()}/{hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]}"
    return f"{name}/{store.add(f'{name}/opened/{rank}', 1)}"


# Who is on this node.


def _host() -> str:
    """A name that processes on one node share: containers on one machine count as nodes of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _hosts(store: dist.Store, prefix: str, members: Sequence[int], rank: int) -> list[str]:
    """The hosts of the members in their order."""
    store.set(f"{prefix}/host/{rank}", _host())
    return [store.get(f"{prefix}/host/{member}").decode() for member in members]


def _make_context(
    rank: int, world_size: int, local_rank: int | None, device_type: str, device_index: int | None, hosts
) -> DistributedContext:
    told_rank, told_size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if world_size == 1:
        local_rank = int(told_rank or 0) if local_rank is None else local_rank
        local_world_size = 1
    elif told_rank is not None and told_size is not None:
        local_rank = int(told_rank) if local_rank is None else local_rank
        local_world_size = int(told_size)
    else:
        by_rank = hosts()
        mine = [index for index, host in enumerate(by_rank) if host == _host()]
        if local_rank is None:
            local_rank = int(told_rank) if told_rank is not None else mine.index(rank)
        local_world_size = len(mine)
    index = local_rank if device_index is None else device_index
    device = torch.device("cuda", index) if device_type == "cuda" else torch.device("cpu")
    return DistributedContext(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, device=device
    )


# Making the groups.


def _single_communicator(device: torch.device) -> _C.collective.Communicator:
    if device.type == "cuda" and _C.build_info()["cuda"] is not None:
        return _C.collective.make_cuda_single_communicator(device.index)
    return _C.collective.make_single_communicator()


def _connect(groups: RankGroups, store: dist.Store, prefix: str) -> None:
    context, members, timeout_seconds = groups.context, groups.members, groups._timeout_seconds
    index = members.index(context.rank)
    everybody = [members]
    groups.control = _C.collective.make_c10d_control(
        _gloo_group(groups, members, everybody).group_name, timeout_seconds
    )
    if context.device.type == "cuda":
        # Also because NCCL waits without end for a rank that does not come.
        gpus = groups.control.exchange(_gpu_in_use(context.device).encode(), "which GPU each rank has")
        groups.context = dataclasses.replace(context, num_device_ranks=gpus.count(gpus[index]))
        is_shared = len(set(gpus)) < len(gpus)  # any of them: all ranks of a group talk in the same way
        groups._communicator_of = _staged_communicator if is_shared else _nccl_communicator
    control, controls, further = groups.control, groups._controls, groups._further

    def stop_all() -> None:
        abort_all((control, *controls, *further))

    groups._watch = FailureWatch(store, prefix, index, members, stop_all, timeout_seconds)
    # The thread must end before the interpreter does, also when nobody closes.
    groups._stop_watch_at_exit = weakref.finalize(groups, groups._watch.stop)


def _open_further(
    groups: RankGroups, watch: FailureWatch, what: str, members: tuple[int, ...]
) -> _C.collective.Communicator:
    division = _agree_on_division(groups, what, members)
    if all(len(part) == 1 for part in division):
        return _single_communicator(groups.context.device)
    communicator = groups._communicator_of(groups, members, division)
    groups._further.append(communicator)
    watch.watch_also(communicator)
    if groups.context.device.type == "cuda":
        _send_to_all(communicator, groups.context.device)
    return communicator


def _open_control(groups: RankGroups, what: str, members: tuple[int, ...]) -> _C.collective.ControlGroup:
    division = _agree_on_division(groups, what, members)
    if all(len(part) == 1 for part in division):
        return _C.collective.make_single_control()
    name = _gloo_group(groups, members, division).group_name
    control = _C.collective.make_c10d_control(name, groups._timeout_seconds, _numbers(groups, members))
    groups._controls.append(control)
    return control


def _agree_on_division(groups: RankGroups, what: str, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The members of all ranks, each set once, in the same order on all of them."""
    told = groups.control.exchange(json.dumps(members).encode(), f"the members for {what}")
    of_each = [read_list(value, f"the members for {what}", lambda rank: isinstance(rank, int)) for value in told]
    _check_division(what, dict(zip(groups.members, map(tuple, of_each), strict=True)))
    return sorted(set(map(tuple, of_each)))


def _check_division(what: str, members: dict[int, tuple[int, ...]]) -> None:
    """All ranks have the same ``members`` of each, so all of them raise."""
    if all(members.get(other) == some for some in members.values() for other in some):
        return
    shown = "; ".join(f"rank {rank} with {format_ranks(some)}" for rank, some in members.items())
    raise DisagreementError(
        f"ranks share the communicator for {what} with different ones ({shown}); give the same members on each of them"
    )


def _gloo_group(groups: RankGroups, members: tuple[int, ...], division: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
    """Of ``members``, while the others of the run make theirs. [Note: names of groups] PyTorch names a group by a count
    where all ranks of the world make all groups. Where its members alone make it, its name is that of an earlier group
    of theirs, whose addresses it would find; so that is done only where some ranks of the world have no part in this.
    """
    timeout = datetime.timedelta(seconds=groups._timeout_seconds)
    everybody = len(groups.members) == groups.context.world_size
    options = {"timeout": timeout, "backend": "gloo", "use_local_synchronization": not everybody}
    try:
        with gloo_on_loopback(os.environ.get("MASTER_ADDR", "")):
            made = {part: dist.new_group(list(part), **options) for part in (division if everybody else [members])}
    except RuntimeError as error:
        raise _C.RankFailure(
            f"rank {groups.context.rank} could not connect to the others ({first_line(error)}); where ranks are on "
            "several nodes, GLOO_SOCKET_IFNAME must name the network interface that reaches them"
        ) from error
    groups._groups.append(made[members])
    return made[members]


def _gpu_in_use(device: torch.device) -> str:
    """Its name, the same in all processes, whichever GPUs they see (CUDA_VISIBLE_DEVICES). This process has begun to
    use it: on a shared GPU all have, before any asks what is free.
    """
    torch.zeros(1, device=device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _nccl_communicator(
    groups: RankGroups, members: tuple[int, ...], division: Sequence[tuple[int, ...]]
) -> _C.collective.Communicator:
    index = members.index(groups.context.rank)
    ids = groups.control.exchange(_C.collective.make_nccl_id() if index == 0 else b"", "NCCL's id")
    return _C.collective.make_nccl_communicator(
        ids[groups.members.index(members[0])],
        rank=index,
        size=len(members),
        device=groups.context.device.index,
        members=_numbers(groups, members),
    )


def _staged_communicator(
    groups: RankGroups, members: tuple[int, ...], division: Sequence[tuple[int, ...]]
) -> _C.collective.Communicator:
    name, device = _gloo_group(groups, members, division).group_name, groups.context.device.index
    return _C.collective.make_cuda_staged_communicator(name, device=device, members=_numbers(groups, members))


def _host_communicator(
    groups: RankGroups, members: tuple[int, ...], division: Sequence[tuple[int, ...]]
) -> _C.collective.Communicator:
    name = _gloo_group(groups, members, division).group_name
    return _C.collective.make_c10d_communicator(name, _numbers(groups, members))


def _numbers(groups: RankGroups, members: tuple[int, ...]) -> Sequence[int]:
    """For errors of a communicator, which counts its own ranks from 0; nothing where that is how the run counts."""
    return members if len(members) < groups.context.world_size else ()


def _send_to_all(communicator: _C.collective.Communicator, device: torch.device) -> None:
    """As ``warm_up``, for exchanges alone: connections for collectives would take memory."""
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    sent, received = torch.zeros(2, communicator.size, 4, device=device)
    with torch.cuda.device(device):
        communicator.exchange(
            [(rank, sent[rank].data_ptr(), 16) for rank in others],
            [(rank, received[rank].data_ptr(), 16) for rank in others],
        )
        torch.cuda.current_stream().synchronize()
        communicator.check()


# Words.


def format_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"; runs of neighbours are drawn together."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def describe_disagreement(name: str, values: dict[int, str]) -> str:
    """Who has which value, each shown from shortly before the first difference."""
    distinct = sorted(set(values.values()), key=lambda value: min(r for r, v in values.items() if v == value))
    start = max(len(os.path.commonprefix(distinct)) - _SHOWN_CHARACTERS // 4, 0)
    shown = []
    for value in distinct:
        part = value[start : start + _SHOWN_CHARACTERS]
        part = f"{'...' if start else ''}{part}{'...' if len(value) > start + _SHOWN_CHARACTERS else ''}"
        shown.append(f"{format_ranks([rank for rank, other in values.items() if other == value])}: {part}")
    return f"ranks disagree on {name}; it must be the same on all. " + "; ".join(shown)

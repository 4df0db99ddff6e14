"""Data that the processes of a resize exchange: options, keys, the plan, and agreement among the old ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from patrickstar import _C
from patrickstar.elastic.phases import ResizePhase
from patrickstar.elastic.rendezvous import ADDRESS_VARIABLE, CONNECT_SECONDS, Rendezvous, ResizeError, run_secret_at
from patrickstar.elastic.transfers import own_address
from patrickstar.planning.step_plan import timeline_to_json
from patrickstar.ranks.addresses import LOOPBACK, split_address
from patrickstar.ranks.failures import is_interrupt
from patrickstar.ranks.passing import PassingPlace
from patrickstar.ranks.run_secret import RunSecret
from patrickstar.ranks.world import RankPlace
from patrickstar.ranks.world_store import forget_world, giving_up, reach_world, serve_world
from patrickstar.resize.memory import MemoryFacts
from patrickstar.session.rank_sync import failed_ranks
from patrickstar.session.session import Session

MEMORY = "memory"
"""Key of a joining process's :class:`MemoryFacts`."""


class UserState(Protocol):
    """User state that joining processes take over: a scheduler, a sampler, any state of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The state, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Sets the state on a joining process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeOptions:
    """Arguments that old ranks and joining processes pass alike."""

    rendezvous: Rendezvous | str | None
    user_state: Mapping[str, UserState]
    folder: str
    """Parent of this process's folder for the resize; other processes do not know its name."""
    timeout_seconds: float
    """Limit of each wait."""
    note_phase: Callable[[ResizePhase], None]

    @classmethod
    def of(
        cls,
        default_seconds: float,
        rendezvous: Rendezvous | str | None,
        user_state: Mapping[str, UserState] | None,
        folder: str,
        timeout_seconds: float | None,
        note_phase: Callable[[ResizePhase], None],
    ) -> ResizeOptions:
        """Options from the arguments of ``Engine.resize`` and ``Engine.join``."""
        seconds = default_seconds if timeout_seconds is None else timeout_seconds
        return cls(
            rendezvous=rendezvous,
            user_state=dict(user_state or {}),
            folder=folder,
            timeout_seconds=seconds,
            note_phase=note_phase,
        )

    def meeting_place(self) -> Rendezvous:
        """The rendezvous, connected."""
        at, limit = self.rendezvous, min(self.timeout_seconds, CONNECT_SECONDS)
        return at if isinstance(at, Rendezvous) else Rendezvous.at(at, timeout_seconds=limit)

    def run_secret(self) -> RunSecret:
        """The secret of the run at that rendezvous."""
        at = self.rendezvous
        return at.secret if isinstance(at, Rendezvous) else run_secret_at(at)

    def towards(self) -> str:
        """A host that all processes reach: the rendezvous, else the old ranks' store."""
        if isinstance(self.rendezvous, Rendezvous):
            return self.rendezvous.host
        address = self.rendezvous or os.environ.get(ADDRESS_VARIABLE)
        return split_address(address)[0] if address else os.environ.get("MASTER_ADDR") or LOOPBACK


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeKeys:
    """Keys of one resize, 32 bytes each."""

    store: bytes = dataclasses.field(repr=False)
    """Key of the new world's store."""
    files: bytes = dataclasses.field(repr=False)
    """Key of the file servers."""

    @classmethod
    def of(cls, token: str, secret: RunSecret) -> ResizeKeys:
        """Keys of the resize with that token."""
        own = secret.derived(f"resize {token}")
        return cls(store=own.key("store"), files=own.key("files"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizePlan:
    """The plan that all processes of a resize share, in JSON's types."""

    token: str
    num_old: int
    former: list[int | None]
    joiners: list[int]
    """Rendezvous numbers of joining processes, in the order of their new ranks."""
    hosts: list[str]
    """By new rank."""
    host: str
    port: int
    """Port of the new world's store on rank 0; 0 for one rank."""
    chunk_numel: int
    micro_batches: dict[str, int]
    """Largest micro-batch by name of the user states that ask for it."""
    accumulation: int | None
    """New ``gradient_accumulation_steps``, which keep the global batch; None: not configured."""
    step_counts: list[int]
    """By parameter in chunks."""
    num_chunks: int
    timeline: str
    """Accesses of the old ranks' last step, as JSON; empty: no step was made (see ``_expect`` in resizing.py)."""
    on_device: list[int] = dataclasses.field(default_factory=list)
    """Parameters that stay on devices (see ``DeviceShards``)."""
    secret: str = dataclasses.field(default="", repr=False)
    """Hexadecimal secret of a resize without joining processes. Empty if a process joins: keys then follow from the
    run's secret, which is never sent.
    """

    def keys(self, options: ResizeOptions) -> ResizeKeys:
        """Keys of the resize's services.

        Raises:
            SecretError: the file of the run's secret is missing or refused.
        """
        return ResizeKeys.of(self.token, RunSecret.from_hex(self.secret) if self.secret else options.run_secret())

    def reach_world(self, keys: ResizeKeys, whom: str, timeout_seconds: float) -> None:
        """Connects this process to the store of the new world. From now on others notice at once if it ends.

        Raises:
            RankFailure: the leader has ended.
        """
        if self.port > 0:
            reach_world(self.host, self.port, keys.store, timeout_seconds, whom)

    def forget_world(self) -> None:
        """Leaves that store: this process does not enter the new world."""
        forget_world(self.host, self.port)

    def giving_up(self, whom: str) -> contextlib.AbstractContextManager[None]:
        """Context that ends the waits of all others in that store if it raises."""
        return giving_up(self.host, self.port, whom)

    def new_rank(self, old: int | None, joiner: int | None = None) -> int | None:
        """New rank of an old rank or of a joining process; None: it leaves."""
        if joiner is not None:
            joining = [rank for rank, former in enumerate(self.former) if former is None]
            return joining[self.joiners.index(joiner)]
        return self.former.index(old) if old in self.former else None

    def place(self, rank: int, keys: ResizeKeys) -> RankPlace:
        """RankPlace of a new rank in the new world."""
        here = [index for index, host in enumerate(self.hosts) if host == self.hosts[rank]]
        return RankPlace(
            rank=rank,
            world_size=len(self.former),
            local_rank=here.index(rank),
            local_world_size=len(here),
            host=self.host,
            port=self.port,
            key=keys.store,
        )

    def passing_place(self, keys: ResizeKeys, old: int | None, joiner: int | None = None) -> PassingPlace:
        """RankPlace of a process in the transfer between devices: new ranks in order, then leaving ranks."""
        size = len(self.former) + len(self._leaving)
        rank = self._passing_rank(old, joiner)
        return PassingPlace(rank=rank, size=size, host=self.host, port=self.port, key=keys.store)

    @property
    def passing_sources(self) -> dict[int, int]:
        """Rank in :meth:`passing_place` by old rank."""
        return {old: self._passing_rank(old) for old in range(self.num_old)}

    def _passing_rank(self, old: int | None, joiner: int | None = None) -> int:
        rank = self.new_rank(old, joiner)
        return len(self.former) + self._leaving.index(old) if rank is None else rank

    @property
    def _leaving(self) -> list[int | None]:
        return [old for old in range(self.num_old) if old not in self.former]

    @property
    def all_stay(self) -> bool:
        """True if no rank leaves, so the participants are the new ranks."""
        return not self._leaving


def make_plan(
    session: Session,
    former: list[int | None],
    joiners: Mapping[int, Mapping[str, Any]],
    hosts: list[str],
    old_hosts: list[str],
    options: ResizeOptions,
    micro_batches: dict[str, int],
) -> ResizePlan:
    """The plan, made by the leader.

    Args:
        session: of the leader.
        former: old rank by new rank; None: a process joins.
        joiners: descriptions of joining processes by number.
        hosts: by new rank.
        old_hosts: by old rank.
        options: of the resize.
        micro_batches: limits that all ranks allow.
    """
    is_alone = {*hosts, *old_hosts} == {socket.gethostname()}
    host = LOOPBACK if is_alone else own_address(options.towards())
    token = uuid.uuid4().hex
    secret = options.run_secret() if joiners else RunSecret.random()
    key = ResizeKeys.of(token, secret).store
    port = serve_world(host, key, session.config.rank_timeout_seconds) if len(former) > 1 else 0
    trained = [spec.trained for spec in session.params_now().chunked]
    return ResizePlan(
        token=token,
        secret="" if joiners else secret.hex(),
        num_old=len(session.ranks.members),
        former=former,
        joiners=list(joiners),
        hosts=hosts,
        host=host,
        port=port,
        micro_batches=micro_batches,
        accumulation=accumulation_for(
            session.config.gradient_accumulation_steps, len(session.ranks.members), len(former)
        ),
        chunk_numel=session.chunk_numel,
        step_counts=[session.runtime.step_count(p) if is_trained else 0 for p, is_trained in enumerate(trained)],
        num_chunks=session.layout.num_chunks,
        timeline=timeline_to_json(accesses) if (accesses := session.runtime.timeline()) else "",
    )


def accumulation_for(steps: int | None, num_old: int, num_new: int) -> int | None:
    """Accumulation steps of the new ranks, for which the core reserves room; ``steps`` are the old ranks'."""
    return None if steps is None else max(steps * num_old // num_new, 1)


def description(session: Session, user_state: Mapping[str, UserState]) -> dict[str, Any]:
    """A process's host and memory, and facts that must agree on all processes."""
    of_each = ("profile", "plan", "plan_cache", "gradient_accumulation_steps")  # may differ between processes
    shared = session.config.model_copy(update=dict.fromkeys(of_each))
    params = session.params_now()
    chunked = [f"{s.name} {tuple(s.param.shape)} {s.compute_dtype} {s.trained}" for s in params.chunked]
    managed = [f"{m.name} {tuple(m.param.shape)} {m.param.dtype} stays with PyTorch" for m in params.managed]
    return {
        "host": socket.gethostname(),
        MEMORY: dataclasses.asdict(MemoryFacts.of(session)),
        "the configuration": repr(shared),
        "the model's parameters, in order,": "; ".join(chunked + managed),
        "what is carried": repr(sorted(user_state)),
    }


def check_joiners(
    session: Session, joiners: Mapping[int, Mapping[str, Any]], user_state: Mapping[str, UserState]
) -> None:
    """Raises ResizeError if a joining process differs from this one."""
    own = description(session, user_state)
    for number, said in joiners.items():
        for what in own.keys() - {"host", MEMORY}:
            if said[what] != own[what]:
                raise ResizeError(
                    f"process {number} that joins differs in {what} {said[what][:100]!r} instead of "
                    f"{own[what][:100]!r}; start it with the same script and configuration"
                )


@contextlib.contextmanager
def all_or_none(session: Session, what: str) -> Iterator[None]:
    """If the block fails on one rank, all ranks raise ResizeError and can go on. An interrupted rank raises its
    interrupt.
    """
    failure: BaseException | None = None
    try:
        yield
    except (_C.RankFailure, GeneratorExit):
        raise
    except BaseException as error:
        failure = error
    try:
        with session.guard("resize"):
            failed = failed_ranks(session.ranks, failure)
    except Exception as error:
        if failure is not None and is_interrupt(failure):
            raise failure from error
        raise
    if failure is not None and is_interrupt(failure):
        raise failure
    if failed:
        raise ResizeError(f"{what}, and the ranks are as they were: {failed}") from failure


def together(session: Session, said: str) -> list[bytes]:
    """The messages of all old ranks, by rank."""
    if len(session.ranks.members) == 1:
        return [said.encode()]
    with session.guard("resize"):
        return session.ranks.control.exchange(said.encode(), "the resize")

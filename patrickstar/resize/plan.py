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
from patrickstar.config import Config
from patrickstar.elastic.phases import Phase
from patrickstar.elastic.rendezvous import ADDRESS_VARIABLE, CONNECT_SECONDS, Rendezvous, ResizeError, run_secret_at
from patrickstar.elastic.transfers import own_address
from patrickstar.planning.step_plan import timeline_to_json
from patrickstar.ranks.addresses import LOOPBACK, split_address
from patrickstar.ranks.failures import is_interrupt
from patrickstar.ranks.passing import PassingPlace
from patrickstar.ranks.run_secret import RunSecret
from patrickstar.ranks.world import Place
from patrickstar.ranks.world_store import serve_world
from patrickstar.resize.memory import MemoryFacts
from patrickstar.session.rank_sync import failed_ranks
from patrickstar.session.session import Session

REFUSAL = "refusal"
"""Key of a message that replaces an invitation and carries the reason for the refusal."""
MEMORY = "memory"
"""What a process that joins says of it: :class:`MemoryFacts`."""


class Carried(Protocol):
    """What goes along: a schedule of PyTorch's, a sampler, anything with a state of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes the state on a process that joins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeOptions:
    """What old ranks and processes that join give alike."""

    rendezvous: Rendezvous | str | None
    carried: Mapping[str, Carried]
    folder: str
    """In which this process's folder of a resize is: nobody else names it."""
    timeout_seconds: float
    """For each wait."""
    note_phase: Callable[[Phase], None]

    @classmethod
    def of(
        cls,
        default_seconds: float,
        rendezvous: Rendezvous | str | None,
        carried: Mapping[str, Carried] | None,
        folder: str,
        timeout_seconds: float | None,
        note_phase: Callable[[Phase], None],
    ) -> ResizeOptions:
        """Arguments of ``Engine.resize`` and ``Engine.join``."""
        seconds = default_seconds if timeout_seconds is None else timeout_seconds
        return cls(
            rendezvous=rendezvous,
            carried=dict(carried or {}),
            folder=folder,
            timeout_seconds=seconds,
            note_phase=note_phase,
        )

    def meeting_place(self) -> Rendezvous:
        """Where processes meet."""
        at, limit = self.rendezvous, min(self.timeout_seconds, CONNECT_SECONDS)
        return at if isinstance(at, Rendezvous) else Rendezvous.at(at, timeout_seconds=limit)

    def run_secret(self) -> RunSecret:
        """The secret of the run with that meeting place."""
        at = self.rendezvous
        return at.secret if isinstance(at, Rendezvous) else run_secret_at(at)

    def towards(self) -> str:
        """A host that all processes reach: that of the rendezvous, else of the old ranks' store."""
        if isinstance(self.rendezvous, Rendezvous):
            return self.rendezvous.host
        address = self.rendezvous or os.environ.get(ADDRESS_VARIABLE)
        return split_address(address)[0] if address else os.environ.get("MASTER_ADDR") or LOOPBACK


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeKeys:
    """Keys of 32 bytes each, of one resize."""

    store: bytes = dataclasses.field(repr=False)
    """The key of the new world's store."""
    files: bytes = dataclasses.field(repr=False)
    """The key of the servers of files."""

    @classmethod
    def of(cls, token: str, secret: RunSecret) -> ResizeKeys:
        """The keys of the resize with that token."""
        own = secret.derived(f"resize {token}")
        return cls(store=own.key("store"), files=own.key("files"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizePlan:
    """What all processes of a resize know when they are gathered; JSON's types."""

    token: str
    num_old: int
    former: list[int | None]
    guests: list[int]
    """Numbers at the rendezvous of the processes that join, in the order of their new ranks."""
    hosts: list[str]
    """By new rank."""
    host: str
    port: int
    """Where rank 0 serves the store of the new world; 0 for one rank."""
    chunk_numel: int
    micro_batches: dict[str, int]
    """By name of what is carried: the most samples that a micro-batch may have, where it asks for that."""
    accumulation: int | None
    """``gradient_accumulation_steps`` from now on, with which the global batch is kept; None: nobody has said it."""
    step_counts: list[int]
    """Of each parameter in chunks."""
    num_chunks: int
    timeline: str
    """The moments of the old ranks' last step, as JSON, with which the new ones begin where they have as many chunks;
    "": there was no step.
    """
    on_device: list[int] = dataclasses.field(default_factory=list)
    """Parameters that stay on devices ([Note: shards on devices])."""
    secret: str = dataclasses.field(default="", repr=False)
    """Hexadecimal secret of a resize that nobody joins. "": somebody joins, and keys follow from the run's secret,
    which is never sent.
    """

    def keys(self, options: ResizeOptions) -> ResizeKeys:
        """Keys of the services in this resize.

        Raises:
            SecretError: the file of the run's secret is missing or refused.
        """
        return ResizeKeys.of(self.token, RunSecret.from_hex(self.secret) if self.secret else options.run_secret())

    def new_rank(self, old: int | None, guest: int | None = None) -> int | None:
        """Of an old rank, or of a process that joins; None: it leaves."""
        if guest is not None:
            joining = [rank for rank, former in enumerate(self.former) if former is None]
            return joining[self.guests.index(guest)]
        return self.former.index(old) if old in self.former else None

    def place(self, rank: int, keys: ResizeKeys) -> Place:
        """Of a new rank."""
        here = [index for index, host in enumerate(self.hosts) if host == self.hosts[rank]]
        return Place(
            rank=rank,
            world_size=len(self.former),
            local_rank=here.index(rank),
            local_world_size=len(here),
            host=self.host,
            port=self.port,
            key=keys.store,
        )

    def passing_place(self, keys: ResizeKeys, old: int | None, guest: int | None = None) -> PassingPlace:
        """Of a process among all that take part: new ranks in their order, then those that leave."""
        size = len(self.former) + len(self._leaving)
        rank = self._passing_rank(old, guest)
        return PassingPlace(rank=rank, size=size, host=self.host, port=self.port, key=keys.store)

    @property
    def passing_sources(self) -> dict[int, int]:
        """By old rank, its :meth:`passing_place`'s rank."""
        return {old: self._passing_rank(old) for old in range(self.num_old)}

    def _passing_rank(self, old: int | None, guest: int | None = None) -> int:
        rank = self.new_rank(old, guest)
        return len(self.former) + self._leaving.index(old) if rank is None else rank

    @property
    def _leaving(self) -> list[int | None]:
        return [old for old in range(self.num_old) if old not in self.former]

    @property
    def all_stay(self) -> bool:
        """So that those who take part are the new ranks."""
        return not self._leaving


def make_plan(
    session: Session,
    former: list[int | None],
    guests: Mapping[int, Mapping[str, Any]],
    options: ResizeOptions,
    micro_batches: dict[str, int],
) -> ResizePlan:
    """The leader's.

    Args:
        session: of it.
        former: by new rank, the old one, or None for one that joins.
        guests: what these said of themselves, by their numbers.
        options: of the resize.
        micro_batches: what all ranks allow.
    """
    here = socket.gethostname()
    joining = iter([said["host"] for said in guests.values()])
    hosts = [here if rank is not None else next(joining) for rank in former]
    host = LOOPBACK if set(hosts) == {here} else own_address(options.towards())
    token = uuid.uuid4().hex
    secret = options.run_secret() if guests else RunSecret.random()
    key = ResizeKeys.of(token, secret).store
    port = serve_world(host, key, session.config.rank_timeout_seconds) if len(former) > 1 else 0
    trained = [spec.trained for spec in session.params_now().chunked]
    return ResizePlan(
        token=token,
        secret="" if guests else secret.hex(),
        num_old=len(session.ranks.members),
        former=former,
        guests=list(guests),
        hosts=hosts,
        host=host,
        port=port,
        micro_batches=micro_batches,
        accumulation=_accumulation(session.config, len(session.ranks.members), len(former)),
        chunk_numel=session.chunk_numel,
        step_counts=[session.runtime.step_count(p) if is_trained else 0 for p, is_trained in enumerate(trained)],
        num_chunks=session.layout.num_chunks,
        timeline=timeline_to_json(moments) if (moments := session.runtime.timeline()) else "",
    )


def _accumulation(config: Config, num_old: int, num_new: int) -> int | None:
    """Of a step on the new ranks: what the core keeps room for."""
    steps = config.gradient_accumulation_steps
    return None if steps is None else max(steps * num_old // num_new, 1)


def description(session: Session, carried: Mapping[str, Carried]) -> dict[str, Any]:
    """What a process says of itself: its host, and what must be the same on all."""
    of_each = ("profile", "plan", "plan_cache", "gradient_accumulation_steps")  # or of a number of ranks
    shared = session.config.model_copy(update=dict.fromkeys(of_each))
    params = session.params_now()
    chunked = [f"{s.name} {tuple(s.param.shape)} {s.compute_dtype} {s.trained}" for s in params.chunked]
    managed = [f"{m.name} {tuple(m.param.shape)} {m.param.dtype} stays with PyTorch" for m in params.managed]
    return {
        "host": socket.gethostname(),
        MEMORY: dataclasses.asdict(MemoryFacts.of(session)),
        "the configuration": repr(shared),
        "the model's parameters, in order,": "; ".join(chunked + managed),
        "what is carried": repr(sorted(carried)),
    }


def check_guests(session: Session, guests: Mapping[int, Mapping[str, Any]], carried: Mapping[str, Carried]) -> None:
    """Raises ResizeError where one that joins says something else."""
    own = description(session, carried)
    for number, said in guests.items():
        for what in own.keys() - {"host", MEMORY}:
            if said[what] != own[what]:
                raise ResizeError(
                    f"process {number} that joins differs in {what} {said[what][:100]!r} instead of "
                    f"{own[what][:100]!r}; start it with the same script and configuration"
                )


@contextlib.contextmanager
def all_or_none(session: Session, what: str) -> Iterator[None]:
    """Where what is inside fails on a rank with an error, all ranks raise ResizeError and can go on. A rank that was
    interrupted raises the interrupt itself.
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
    """What each old rank says, by rank."""
    if len(session.ranks.members) == 1:
        return [said.encode()]
    with session.guard("resize"):
        return session.ranks.control.exchange(said.encode(), "the resize")

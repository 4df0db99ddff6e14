"""Another number of ranks for an engine that goes on training: ``Engine.resize``, and the change that joiners share.

All processes go through the phases of ``patrickstar.elastic.ResizePhase``. Before the decision (``Rendezvous.decide``)
no engine is changed. Old ranks publish copies of the parts that others need. Each receiver checks that they are in its
folder, or fetches them. After the decision each rank sets aside the parts that it keeps and closes its core, because a
core is built for a number of ranks. It reopens with the new ranks. The module, its ``Parameter`` objects, the engine,
the optimizer and random number generators stay. A joining process starts with its own single-rank engine, whose values
are discarded.

After the decision no process can go back, and an engine is whole again only at the end of the change. So signals are
deferred from before the decision to that end; a joining process defers them from before its answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.elastic.movement import assign_ranks
from patrickstar.elastic.phases import Resized, ResizePhase
from patrickstar.elastic.rendezvous import Decision, Rendezvous, ResizeError
from patrickstar.elastic.sampler import OfRanks
from patrickstar.elastic.transfers import FileServer
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.messages import reading
from patrickstar.resize.devices import on_all_devices, params_on_device, pass_on
from patrickstar.resize.memory import (
    MemoryFacts,
    allowed_micro_batches,
    check_copies,
    check_expected_room,
    check_room,
    device_rooms,
    least_of_all,
)
from patrickstar.resize.plan import (
    MEMORY,
    ResizeOptions,
    ResizePlan,
    UserState,
    all_or_none,
    check_joiners,
    make_plan,
    together,
)
from patrickstar.resize.reopening import DecidedResize, change
from patrickstar.resize.shards import (
    HeldShards,
    Shards,
    choose_params,
    publish,
    write_state,
)
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.registry import open_sessions
from patrickstar.session.session import Session
from patrickstar.state.save_load import check_between_steps


def resize_session(session: Session, num_ranks: int, leaving: Sequence[int] | None, options: ResizeOptions) -> Resized:
    """Implements ``Engine.resize``. Collective over all ranks of the session."""
    _check_begin(session, options)
    session.saves.finish()  # a failure would be lost with the present ranks; all of them have it
    with contextlib.ExitStack() as until_changed:
        said = f"{num_ranks} ranks, leaving {leaving}, user state {sorted(options.user_state)}"
        session.ranks.check_agreement("the resize", said)
        former = assign_ranks(len(session.ranks.members), num_ranks, leaving)
        with all_or_none(session, "the resize was not begun"):
            options.note_phase(ResizePhase.GATHER)
            check_user_state(options.user_state, num_ranks)
            check_room(session, num_ranks)
            allowed = allowed_micro_batches(session, num_ranks, options.user_state)
        known = _known_of_all(session, allowed)
        meeting: Rendezvous | None = None
        plan: ResizePlan | None = None
        with all_or_none(session, "the ranks were not gathered"):
            if None in former:
                options.run_secret()  # fails early on a rank without the secret
            if session.ranks.control.rank == 0:
                meeting = options.meeting_place() if None in former else None
                plan = _planned_by_leader(session, former, known, meeting, options, until_changed)
        plan = _shared_plan(session, plan)
        if meeting is not None:
            until_changed.enter_context(meeting.beating(plan.token))
        move = _Move(session, plan, options, known, meeting)
        try:
            move.publish()
            move.receive(until_changed)
            move.decide()
        except BaseException:
            move.give_up()
            raise
        finally:
            move.close_server()
        if move.new is None:
            move.leave()
        held = HeldShards(move.shards, move.on_devices, move.rank, move.new)
        decided = DecidedResize(
            plan=plan, keys=move.keys, options=options, shards=move.shards, connected=move.connected
        )
        return change(session, decided, held, move.new)


def _check_begin(session: Session, options: ResizeOptions) -> None:
    check_supported(session, "resize")
    limit = session.config.rank_timeout_seconds
    if not 0 < options.timeout_seconds < limit:
        raise ValueError(
            f"timeout_seconds is {options.timeout_seconds:g}; give more than 0 and less than rank_timeout_seconds, "
            f"{limit:g}, for which ranks wait for the one that leads"
        )
    check_between_steps(session, "resize")


@dataclasses.dataclass(frozen=True)
class _Known:
    """Facts that the old ranks have exchanged before the plan."""

    allowed: dict[str, int]
    """Largest micro-batch that fits on every rank, by name of the user state that asks for it."""
    facts: list[MemoryFacts]
    """By old rank."""
    on_device: list[int]
    """Parameters that all old ranks have on their devices."""


def _known_of_all(session: Session, allowed: dict[str, int]) -> _Known:
    allowed = least_of_all(together(session, json.dumps(allowed)))
    session.runtime.drop_derivable()  # makes room for arriving values
    facts = _shared_facts(session)
    return _Known(allowed, facts, on_all_devices(together(session, json.dumps(params_on_device(session)))))


def _planned_by_leader(
    session: Session,
    former: list[int | None],
    known: _Known,
    meeting: Rendezvous | None,
    options: ResizeOptions,
    until_changed: contextlib.ExitStack,
) -> ResizePlan:
    """Gathers the joiners, if there are any, and plans with them."""
    joiners: dict[int, dict[str, Any]] = {}
    if meeting is not None:
        joiners = meeting.gather(former.count(None), options.timeout_seconds)
        until_changed.callback(meeting.send_away, joiners, "the ranks that train gave the resize up")
    staying = _staying(former, known.facts, joiners)
    try:
        check_joiners(session, joiners, options.user_state)
        _check_memory(session, staying, former, known.facts)
    except (ResizeError, _C.MemoryBudgetError) as error:
        if meeting is not None:
            meeting.send_away(joiners, str(error))
        raise
    hosts, others = [one.host for one in staying], [one.host for one in known.facts]
    plan = make_plan(session, former, joiners, hosts, others, options, known.allowed)
    rooms = device_rooms(known.facts, staying)
    return dataclasses.replace(plan, on_device=choose_params(session, plan, known.on_device, rooms))


class _Move:
    """One old rank's part of a planned resize, up to the decision."""

    connected: ChunkCommunicators | None = None
    """Communicators of the new ranks."""

    def __init__(
        self, session: Session, plan: ResizePlan, options: ResizeOptions, known: _Known, meeting: Rendezvous | None
    ):
        self._session, self._plan, self._options = session, plan, options
        self._facts, self._meeting = known.facts, meeting
        self.rank = session.ranks.control.rank
        self.new, self.keys = plan.new_rank(self.rank), plan.keys(options)
        self._whom = f"old rank {self.rank}'s process"
        self.shards = Shards(session, plan, self.new, options.folder, self.keys.files)
        self.on_devices = self.shards.on_devices(self.rank, self.new)
        self._server: FileServer | None = None

    def publish(self) -> None:
        """Publishes copies of the parts that others need."""
        session, plan = self._session, self._plan
        with session.guard("resize"):
            plan.reach_world(self.keys, self._whom, session.config.rank_timeout_seconds)
        with all_or_none(session, "shards were not published"), plan.giving_up(self._whom):
            self._options.note_phase(ResizePhase.PUBLISH)
            copied = [self.shards.copied_bytes(rank, plan.new_rank(rank)) for rank in range(plan.num_old)]
            check_copies(self._facts, copied)
            publish(session, self.shards, self.rank)
            if self.rank == 0:
                write_state(session, self.shards.state_path, self._options.user_state)

    def receive(self, until_changed: contextlib.ExitStack) -> None:
        """Checks that all ranks, joiners too, have what they need. Then signals are deferred."""
        session, plan, options, meeting = self._session, self._plan, self._options, self._meeting
        self._server = self.shards.serve(options, self.rank)
        told = together(session, self._server.address if self._server is not None else "")
        addresses = [address.decode() for address in told]
        with all_or_none(session, "not all that is needed is there"), plan.giving_up(self._whom):
            options.note_phase(ResizePhase.CHECK)
            if meeting is not None:
                for number in plan.joiners:
                    meeting.invite(number, {"plan": dataclasses.asdict(plan), "addresses": addresses})
                meeting.await_at_work(plan.joiners, options.timeout_seconds)
            place = plan.passing_place(self.keys, self.rank)
            self.connected = pass_on(session, plan, self.shards.moves, self.on_devices, place, options)
            if self.new is not None:
                self.shards.files.reach(self.new, addresses, options.timeout_seconds)
            if meeting is not None:
                meeting.answers(plan.joiners, options.timeout_seconds)
            until_changed.enter_context(deferred_signals())

    def decide(self) -> None:
        """Decides for the resize, from which no process can go back."""
        self._options.note_phase(ResizePhase.DECIDE)
        with all_or_none(self._session, "the resize was given up"):
            if self._meeting is not None:
                self._meeting.decide(self._plan.token, Decision.RESIZE)
        # If a rank gets here, every rank does: all_or_none has exchanged that none failed.

    def give_up(self) -> None:
        """Undoes what was published, before the decision."""
        if self.connected is not None:
            self.connected.close()
        self._plan.forget_world()
        if self._meeting is not None:
            with contextlib.suppress(RuntimeError):
                self._meeting.decide(self._plan.token, Decision.STAY)
        self.shards.remove()  # on every rank, since the leader may be gone

    def close_server(self) -> None:
        if self._server is not None:
            self._server.close()

    def leave(self) -> None:
        """Removes what only a rank that goes on needs. Call after :meth:`close_server`."""
        self._plan.forget_world()
        if self._server is not None:
            self.shards.remove_given(self.rank, self._server)


def _shared_plan(session: Session, plan: ResizePlan | None) -> ResizePlan:
    said = together(session, "" if plan is None else json.dumps(dataclasses.asdict(plan)))
    return ResizePlan(**json.loads(said[0]))


def _shared_facts(session: Session) -> list[MemoryFacts]:
    """By old rank."""
    told = together(session, json.dumps(dataclasses.asdict(MemoryFacts.of(session))))
    with reading("memory before a resize"):
        return [MemoryFacts(**json.loads(message)) for message in told]


def _staying(
    former: Sequence[int | None], facts: Sequence[MemoryFacts], joiners: Mapping[int, Mapping[str, Any]]
) -> list[MemoryFacts]:
    """Memory facts by new rank."""
    joining = iter([MemoryFacts(**said[MEMORY]) for said in joiners.values()])
    return [next(joining) if old is None else facts[old] for old in former]


def _check_memory(
    session: Session, staying: Sequence[MemoryFacts], former: Sequence[int | None], facts: Sequence[MemoryFacts]
) -> None:
    check_expected_room(session, staying, [facts[old] for old in range(len(facts)) if old not in former])


def check_supported(session: Session, call: str) -> None:
    """Raises StateError if an engine of this kind cannot be resized."""
    session.check_ready()
    config = session.config
    if session.owner.keeps_ranks is not None:
        raise _C.StateError(f"{call}: {session.owner.keeps_ranks}")
    if len(session.chunk_ranks.members) != len(session.ranks.members) or config.sequence_parallel.size > 1:
        raise _C.StateError(f"{call} with tensor_parallel or sequence_parallel is not supported yet; save a checkpoint")
    if session.matrices.names is not None:
        raise _C.StateError(f"{call} with tensor_parallel is not supported yet; save a checkpoint")
    if config.expert_parallel.size > 1:
        raise _C.StateError(f"{call} with expert_parallel is not supported yet; save a checkpoint")
    if len(open_sessions()) > 1:
        raise _C.StateError(f"{call} while {len(open_sessions())} engines are open in this process; close the others")
    if session.plan_of_params.quantized:
        raise _C.StateError(f"{call} with quantised weights is not supported yet; save a checkpoint")
    if session.compiled.is_compiled:
        raise _C.StateError(f"{call} of a compiled module is not supported yet; save a checkpoint, or do not compile")


def check_user_state(user_state: Mapping[str, UserState], num_ranks: int) -> None:
    """Raises ValueError if a user state cannot be shared by ``num_ranks``."""
    for item in user_state.values():
        if isinstance(item, OfRanks):
            item.check_ranks(num_ranks)

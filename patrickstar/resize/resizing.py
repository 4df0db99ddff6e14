"""Another number of ranks for an engine that goes on training: ``Engine.resize`` and ``Engine.join``.

[Note: order of a resize] All processes go through the phases of ``patrickstar.elastic.Phase``. Before the decision
([Note: decision of a resize]) nothing of an engine is changed: old ranks write copies of what others will need, and
whoever needs them checks that they are in its folder, or fetches its pieces of them. After it each rank sets aside what
it keeps, closes its core, and reopens it with the new ranks: the core is made for a number of ranks. The module, its
``Parameter`` objects, the engine, the optimizer and random number generators stay what they are.

[Note: a plan for other ranks] The new core begins with the moments of the old ranks' last step, if they made one and
have as many chunks (of small models, numbers of ranks differ in what they leave of chunks): what a step does with them
is the same, and tides are alike. So states go to devices as they come, and the
first step replays a plan. Where it differs, it fetches on demand as any step does. Times of the old steps are of no
use: updates and messages take others.

A process that joins has an engine of its own alone, whose values count for nothing, and goes through the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.elastic.movement import assign_ranks
from patrickstar.elastic.phases import Phase, Resized
from patrickstar.elastic.rendezvous import Decision, Rendezvous, ResizeError
from patrickstar.elastic.transfers import FileServer
from patrickstar.engine.engine_state import check_between_steps
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.invitations import REFUSAL
from patrickstar.engine.resize_agreement import all_or_none, together
from patrickstar.engine.resize_change import change, check_carried, check_supported
from patrickstar.engine.resize_devices import on_all_devices, params_on_device
from patrickstar.engine.resize_handover import write_state
from patrickstar.engine.resize_passing import pass_on
from patrickstar.engine.resize_plan import MEMORY, ResizeOptions, ResizePlan, check_guests, make_plan
from patrickstar.engine.resize_room import (
    MemoryFacts,
    allowed_micro_batches,
    check_copies,
    check_expected_room,
    check_room,
    device_rooms,
    least_of_all,
)
from patrickstar.engine.resize_shards import Held, Shards, choose_params, publish
from patrickstar.engine.session import Session
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.messages import reading
from patrickstar.ranks.world_store import forget_world


def resize_session(session: Session, num_ranks: int, leaving: Sequence[int] | None, options: ResizeOptions) -> Resized:
    """What ``Engine.resize`` describes. All ranks of the session call it."""
    check_supported(session, "resize")
    limit = session.config.rank_timeout_seconds
    if not 0 < options.timeout_seconds < limit:
        raise ValueError(
            f"timeout_seconds is {options.timeout_seconds:g}; give more than 0 and less than rank_timeout_seconds, "
            f"{limit:g}, for which ranks wait for the one that leads"
        )
    check_between_steps(session, "resize")
    ranks = session.ranks
    control, is_leader = ranks.control, ranks.control.rank == 0
    with contextlib.ExitStack() as until_changed:
        said = f"{num_ranks} ranks, leaving {leaving}, carried {sorted(options.carried)}"
        ranks.check_agreement("the resize", said)
        former = assign_ranks(len(ranks.members), num_ranks, leaving)
        num_joining = former.count(None)
        meeting: Rendezvous | None = None
        plan: ResizePlan | None = None
        with all_or_none(session, "the resize was not begun"):
            options.note_phase(Phase.GATHER)
            check_carried(options.carried, num_ranks)
            check_room(session, num_ranks)
            allowed = allowed_micro_batches(session, num_ranks, options.carried)
        allowed = least_of_all(together(session, json.dumps(allowed)))
        session.runtime.drop_derivable()  # so that what comes has room
        facts = _shared_facts(session)
        on_device = on_all_devices(together(session, json.dumps(params_on_device(session))))
        with all_or_none(session, "the ranks were not gathered"):
            if num_joining > 0:
                options.run_secret()  # before anything waits: each rank has it
            if is_leader:
                guests: dict[int, dict[str, Any]] = {}
                if num_joining > 0:
                    meeting = options.meeting_place()
                    guests = meeting.gather(num_joining, options.timeout_seconds)
                    try:
                        check_guests(session, guests, options.carried)
                        _check_memory(session, _staying(former, facts, guests), former, facts)
                    except (ResizeError, _C.MemoryBudgetError) as error:
                        _send_away(meeting, guests, str(error))
                        raise
                else:
                    _check_memory(session, _staying(former, facts, {}), former, facts)
                plan = make_plan(session, former, guests, options, allowed)
                rooms = device_rooms(facts, _staying(former, facts, guests))
                plan = dataclasses.replace(plan, on_device=choose_params(session, plan, on_device, rooms))
        plan = _shared_plan(session, plan)
        if is_leader and meeting is not None:
            until_changed.enter_context(meeting.beating(plan.token))

        new, keys = plan.new_rank(control.rank), plan.keys(options)
        shards = Shards(session, plan, new, options.folder, keys.files)
        on_devices = shards.on_devices(control.rank, new)
        server: FileServer | None = None
        connected: ChunkCommunicators | None = None
        is_decided = False
        try:
            with all_or_none(session, "shards were not published"):
                options.note_phase(Phase.PUBLISH)
                check_copies(facts, [shards.copied_bytes(rank, plan.new_rank(rank)) for rank in range(plan.num_old)])
                publish(session, shards, control.rank)
                if is_leader:
                    write_state(session, shards.state_path, options.carried)
            server = shards.serve(options, control.rank)
            told = together(session, server.address if server is not None else "")
            addresses = [address.decode() for address in told]
            with all_or_none(session, "not all that is needed is there"):
                options.note_phase(Phase.CHECK)
                if is_leader and meeting is not None:
                    for number in plan.guests:
                        meeting.invite(number, {"plan": dataclasses.asdict(plan), "addresses": addresses})
                place = plan.passing_place(keys, control.rank)
                connected = pass_on(session, plan, shards, on_devices, place, options)
                if new is not None:
                    shards.files.reach(new, addresses, options.timeout_seconds)
                if is_leader and meeting is not None:
                    meeting.answers(plan.guests, options.timeout_seconds)
                until_changed.enter_context(deferred_signals())  # [Note: signals in a resize]

            options.note_phase(Phase.DECIDE)
            with all_or_none(session, "the resize was given up"):
                if meeting is not None:
                    meeting.decide(plan.token, Decision.RESIZE)
            is_decided = True  # by the leader as well: all have told each other that nothing failed
        finally:
            if not is_decided:
                if connected is not None:
                    connected.close()
                if is_leader:
                    forget_world(plan.host, plan.port)
                if meeting is not None:
                    with contextlib.suppress(RuntimeError):
                        meeting.decide(plan.token, Decision.STAY)
                        _send_away(meeting, plan.guests, "the ranks that train gave the resize up")
                shards.remove()  # whoever comes first: the leader may be gone
            if server is not None:
                server.close()
        if new is None and server is not None:
            shards.remove_given(control.rank, server)
        held = Held(shards, on_devices, control.rank, new)
        return change(session, plan, keys, shards, held, new, options, connected)


def _send_away(meeting: Rendezvous, guests: Iterable[int], why: str) -> None:
    """Tells those that wait for an invitation that none comes; who has one waits for the decision."""
    for number in guests:
        meeting.invite(number, {REFUSAL: why})


def _shared_plan(session: Session, plan: ResizePlan | None) -> ResizePlan:
    said = together(session, "" if plan is None else json.dumps(dataclasses.asdict(plan)))
    return ResizePlan(**json.loads(said[0]))


def _shared_facts(session: Session) -> list[MemoryFacts]:
    """By old rank."""
    told = together(session, json.dumps(dataclasses.asdict(MemoryFacts.of(session))))
    with reading("memory before a resize"):
        return [MemoryFacts(**json.loads(message)) for message in told]


def _staying(
    former: Sequence[int | None], facts: Sequence[MemoryFacts], guests: Mapping[int, Mapping[str, Any]]
) -> list[MemoryFacts]:
    """Of the processes by new rank."""
    joining = iter([MemoryFacts(**said[MEMORY]) for said in guests.values()])
    return [next(joining) if old is None else facts[old] for old in former]


def _check_memory(
    session: Session, staying: Sequence[MemoryFacts], former: Sequence[int | None], facts: Sequence[MemoryFacts]
) -> None:
    check_expected_room(session, staying, [facts[old] for old in range(len(facts)) if old not in former])

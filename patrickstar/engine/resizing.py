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
import functools
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patrickstar import _C
from patrickstar.elastic.movement import assign_ranks
from patrickstar.elastic.phases import Membership, Phase, Resized
from patrickstar.elastic.published import DEFAULT_FOLDER
from patrickstar.elastic.rendezvous import Decision, Rendezvous, ResizeError
from patrickstar.elastic.sampler import OfRanks
from patrickstar.elastic.transfers import FileServer
from patrickstar.engine.axes import mesh_of
from patrickstar.engine.divided_matrices import make_matrices
from patrickstar.engine.engine_state import check_between_steps
from patrickstar.engine.open_session import open_sessions
from patrickstar.engine.rank_sync import check_same_config, common_budgets
from patrickstar.engine.resize_agreement import all_or_none, together
from patrickstar.engine.resize_devices import (
    on_all_devices,
    params_on_device,
    prepare_to_receive,
)
from patrickstar.engine.resize_handover import (
    check_state,
    managed_states,
    reached_state,
    state_path,
    take_state,
    write_state,
)
from patrickstar.engine.resize_passing import pass_on
from patrickstar.engine.resize_plan import (
    MEMORY,
    Carried,
    ResizeOptions,
    ResizePlan,
    check_guests,
    description,
    make_plan,
)
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
from patrickstar.machine.budgets import make_budgets
from patrickstar.module.first_rank_values import check_same_model
from patrickstar.planning.step_plan import timeline_from_json
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups, forget_world, move_to_world, open_ranks
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading

_REFUSAL = "refusal"  # a key of an invitation


def resize_session(session: Session, num_ranks: int, leaving: Sequence[int] | None, options: ResizeOptions) -> Resized:
    """What ``Engine.resize`` describes. All ranks of the session call it."""
    _check_supported(session, "resize")
    limit = session.config.rank_timeout_seconds
    if not 0 < options.timeout_seconds < limit:
        raise ValueError(
            f"timeout_seconds is {options.timeout_seconds:g}; give more than 0 and less than rank_timeout_seconds, "
            f"{limit:g}, for which ranks wait for the one that leads"
        )
    check_between_steps(session, "resize")
    ranks = session.ranks
    control, is_leader = ranks.control, ranks.control.rank == 0
    with contextlib.ExitStack() as until_decided:
        options.note_phase(Phase.GATHER)
        said = f"{num_ranks} ranks, leaving {leaving}, carried {sorted(options.carried)}"
        ranks.check_agreement("the resize", said)
        former = assign_ranks(len(ranks.members), num_ranks, leaving)
        num_joining = former.count(None)
        meeting: Rendezvous | None = None
        plan: ResizePlan | None = None
        with all_or_none(session, "the resize was not begun"):
            _check_carried(options.carried, num_ranks)
            check_room(session, num_ranks)
            allowed = allowed_micro_batches(session, num_ranks, options.carried)
        allowed = least_of_all(together(session, json.dumps(allowed)))
        session.runtime.drop_derivable()  # so that what comes has room
        facts = _shared_facts(session)
        on_device = on_all_devices(together(session, json.dumps(params_on_device(session))))
        with all_or_none(session, "the ranks were not gathered"):
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
            until_decided.enter_context(meeting.beating(plan.token))

        options.note_phase(Phase.PUBLISH)
        new = plan.new_rank(control.rank)
        shards = Shards(session, plan, new, options.folder)
        on_devices = shards.on_devices(control.rank, new)
        server: FileServer | None = None
        connected: ChunkCommunicators | None = None
        is_decided = False
        try:
            with all_or_none(session, "shards were not published"):
                check_copies(facts, [shards.copied_bytes(rank, plan.new_rank(rank)) for rank in range(plan.num_old)])
                publish(session, shards, control.rank)
                if is_leader:
                    write_state(session, state_path(options.folder, plan.token), options.carried)
            server = shards.serve(options, plan.token, control.rank)
            told = together(session, server.address if server is not None else "")
            addresses = [address.decode() for address in told]
            options.note_phase(Phase.CHECK)
            with all_or_none(session, "not all that is needed is there"):
                if is_leader and meeting is not None:
                    for number in plan.guests:
                        meeting.invite(number, {"plan": dataclasses.asdict(plan), "addresses": addresses})
                place = plan.passing_place(control.rank)
                connected = pass_on(session, plan, shards, on_devices, place, options)
                if new is not None:
                    shards.files.reach(new, addresses, options.timeout_seconds)
                if is_leader and meeting is not None:
                    meeting.answers(plan.guests, options.timeout_seconds)

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
        return _change(session, plan, shards, held, new, options, connected)


def join_session(session: Session, options: ResizeOptions) -> Resized:
    """What ``Engine.join`` describes: of a process whose session is on one rank."""
    _check_supported(session, "join")
    check_between_steps(session, "join")
    if len(session.ranks.members) > 1:
        raise _C.StateError(
            f"join on an engine of {len(session.ranks.members)} ranks; a process that joins begins alone, with "
            "WORLD_SIZE 1 or not set"
        )
    meeting = options.meeting_place()
    prepare_to_receive(session)
    options.note_phase(Phase.GATHER)
    number = meeting.arrive(description(session, options.carried))
    with meeting.beating(number), contextlib.ExitStack() as unless_joined:
        options.note_phase(Phase.PUBLISH)
        invitation = meeting.invitation(number, options.timeout_seconds)
        if _REFUSAL in invitation:
            raise ResizeError(f"this process did not join: {invitation[_REFUSAL]}")
        plan = ResizePlan(**invitation["plan"])
        options.note_phase(Phase.CHECK)
        rank = plan.new_rank(None, number)
        assert rank is not None
        problem: str | None = None
        connected: ChunkCommunicators | None = None
        folder = options.folder or (plan.folder if Path(plan.folder).is_dir() else DEFAULT_FOLDER)
        shards = Shards(session, plan, rank, folder)
        on_devices = shards.on_devices(None, rank)
        try:
            _check_carried(options.carried, len(plan.former))
            connected = pass_on(session, plan, shards, on_devices, plan.passing_place(None, number), options)
            if connected is not None:
                unless_joined.callback(connected.close)
            shards.files.reach(rank, invitation["addresses"], options.timeout_seconds)
            state = reached_state(folder, plan.token, rank, invitation["addresses"][0], options.timeout_seconds)
            check_state(state, options.carried)
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        meeting.answer(number, problem)
        options.note_phase(Phase.DECIDE)
        decision = meeting.decision(plan.token, options.timeout_seconds)
        if decision is Decision.STAY or problem is not None:
            shards.remove_reached(rank)
            raise ResizeError(f"this process did not join: {problem or 'the ranks that train gave the resize up'}")
        unless_joined.pop_all()
    return _change(session, plan, shards, Held(shards, on_devices, None, rank), rank, options, connected, state)


def _change(
    session: Session,
    plan: ResizePlan,
    shards: Shards,
    held: Held,
    new: int | None,
    options: ResizeOptions,
    connected: ChunkCommunicators | None,
    state: dict[str, Any] | None = None,
) -> Resized:
    """After the decision; see [Note: order of a resize].

    Args:
        connected: what the new ranks have opened already.
        state: what a process that joins takes over.
    """
    try:
        options.note_phase(Phase.CLOSE)
        managed = managed_states(session) if state is None else state["managed"]
        vacated = session.vacate(lambda: held.set_aside(session))
        total = shards.num_bytes(shards.moves)
        if new is None:
            session.closed = True
            return Resized(
                membership=Membership.LEFT, rank=-1, num_ranks=len(plan.former), received_bytes=0, total_bytes=total
            )

        options.note_phase(Phase.OPEN)
        was = session.ranks.context
        update = {"gradient_accumulation_steps": plan.accumulation}
        config = session.config = session.config.model_copy(update=update)
        move_to_world(plan.place(new))
        ranks = session.ranks = open_ranks(
            device_type=was.device.type,
            timeout_seconds=config.rank_timeout_seconds,
            device_index=was.device.index,
            connected=connected,
        )
        with ranks.guard("resize"):
            check_same_config(ranks, config)
            mesh = MeshRanks(ranks, mesh_of(config, len(ranks.members)))
            chunk_ranks = ChunkRanks.along(mesh, Axis.DATA, Axis.SEQUENCE)
            here = ranks.context
            held_bytes = _held_on_host(ranks, vacated.memory.num_bytes)
            mine = make_budgets(config, here.device, here.local_world_size, here.num_device_ranks, held_bytes)
            budgets = common_budgets(ranks, mine)
            matrices = make_matrices(config, mesh)
            check_same_model(ranks, session.plan_of_params)

            options.note_phase(Phase.BUILD)
            session.reopen(
                mesh,
                chunk_ranks,
                matrices,
                budgets,
                plan.chunk_numel,
                vacated,
                functools.partial(_expect, session, plan),
                lambda: held.fill(session),
            )
            for param, count in enumerate(plan.step_counts):
                if shards.arrays[param] > 1:
                    session.runtime.set_step_count(param, count)
            for param, states in zip(session.managed.params, managed, strict=True):
                if states:
                    session.states.set_optimizer_state(param.param, states)
            if state is not None:
                take_state(session, state, options.carried)
            for name, most in plan.micro_batches.items():
                options.carried[name].allow_micro_batch(most)
            for item in options.carried.values():
                if isinstance(item, OfRanks):
                    item.set_ranks(new, len(plan.former))

            options.note_phase(Phase.CONFIRM)
            ranks.meet()
            shards.remove()
    except BaseException as error:
        shards.remove()  # nobody can go on with them
        if connected is not None:
            connected.close()
        session.abandon(error)
        raise
    received = [move for move in shards.moves if move.target == new]
    return Resized(
        membership=Membership.RANK,
        rank=new,
        num_ranks=len(plan.former),
        received_bytes=shards.num_bytes(received),
        total_bytes=total,
    )


def _held_on_host(ranks: RankGroups, num_bytes: int) -> int:
    """Of all ranks on this host, what they have kept of their former cores' memory: ``num_bytes`` on this one."""
    here = socket.gethostname()
    if len(ranks.members) == 1:
        return num_bytes
    told = ranks.control.exchange(json.dumps([here, num_bytes]).encode(), "memory that is used again")
    with reading("memory that is used again"):
        return sum(int(size) for host, size in map(json.loads, told) if host == here)


def _send_away(meeting: Rendezvous, guests: Iterable[int], why: str) -> None:
    """Tells those that wait for an invitation that none comes; who has one waits for the decision."""
    for number in guests:
        meeting.invite(number, {_REFUSAL: why})


def _shared_plan(session: Session, plan: ResizePlan | None) -> ResizePlan:
    said = together(session, "" if plan is None else json.dumps(dataclasses.asdict(plan)))
    return ResizePlan(**json.loads(said[0]))


def _shared_facts(session: Session) -> list[MemoryFacts]:
    """By old rank."""
    told = together(session, json.dumps(dataclasses.asdict(MemoryFacts.of(session))))
    with reading("memory before a resize"):
        return [MemoryFacts(**json.loads(message)) for message in told]


def _expect(session: Session, plan: ResizePlan) -> None:
    """[Note: a plan for other ranks]."""
    if plan.timeline and plan.num_chunks == session.layout.num_chunks:
        session.runtime.adopt_timeline(timeline_from_json(plan.timeline, plan.num_chunks))


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


def _check_supported(session: Session, call: str) -> None:
    session.check_whole()
    config = session.config
    if session.keeps_ranks is not None:
        raise _C.StateError(f"{call}: {session.keeps_ranks}")
    if len(session.chunk_ranks.members) != len(session.ranks.members) or config.sequence_parallel.size > 1:
        raise _C.StateError(f"{call} with tensor_parallel or sequence_parallel is not supported yet; save a checkpoint")
    if session.matrices.names is not None:
        raise _C.StateError(f"{call} with tensor_parallel is not supported yet; save a checkpoint")
    if len(open_sessions()) > 1:
        raise _C.StateError(f"{call} while {len(open_sessions())} engines are open in this process; close the others")
    if session.quantized:
        raise _C.StateError(f"{call} with quantised weights is not supported yet; save a checkpoint")
    if session.compiled.is_compiled:
        raise _C.StateError(f"{call} of a compiled module is not supported yet; save a checkpoint, or do not compile")


def _check_carried(carried: Mapping[str, Carried], num_ranks: int) -> None:
    for item in carried.values():
        if isinstance(item, OfRanks):
            item.check_ranks(num_ranks)

"""A process that joins ranks which train: ``Engine.join`` ([Note: order of a resize], resizing.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from patrickstar import _C
from patrickstar.elastic.phases import Phase, Resized
from patrickstar.elastic.rendezvous import Decision, Rendezvous, ResizeError
from patrickstar.engine.engine_state import check_between_steps
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.invitations import Invitation, read_invitation
from patrickstar.engine.resize_change import change, check_carried, check_supported
from patrickstar.engine.resize_devices import DeviceShards, prepare_to_receive
from patrickstar.engine.resize_handover import check_state, reached_state
from patrickstar.engine.resize_passing import pass_on
from patrickstar.engine.resize_plan import ResizeKeys, ResizeOptions, description
from patrickstar.engine.resize_shards import Held, Shards
from patrickstar.engine.session import Session
from patrickstar.ranks.addresses import AllowedHosts
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.failures import first_line, is_interrupt


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Everything that a process has prepared before the decision."""

    shards: Shards
    on_devices: DeviceShards
    connected: ChunkCommunicators | None
    state: dict[str, Any]


def join_session(session: Session, options: ResizeOptions) -> Resized:
    """Implements ``Engine.join`` for a session on one rank."""
    check_supported(session, "join")
    check_between_steps(session, "join")
    if len(session.ranks.members) > 1:
        raise _C.StateError(
            f"join on an engine of {len(session.ranks.members)} ranks; a process that joins begins alone, with "
            "WORLD_SIZE 1 or not set"
        )
    limit = session.config.rank_timeout_seconds
    if not 0 < options.timeout_seconds <= limit:
        raise ValueError(
            f"timeout_seconds is {options.timeout_seconds:g}; give more than 0 and at most rank_timeout_seconds, "
            f"{limit:g}, the longest that any process of the run waits"
        )
    meeting = options.meeting_place()
    allowed = AllowedHosts.around(meeting.host)
    prepare_to_receive(session)
    options.note_phase(Phase.GATHER)
    number = meeting.arrive(description(session, options.carried))
    with contextlib.ExitStack() as until_joined:
        with meeting.beating(number), contextlib.ExitStack() as unless_joined:
            options.note_phase(Phase.PUBLISH)
            invitation = read_invitation(meeting.invitation(number, options.timeout_seconds), number, allowed)
            plan, keys = invitation.plan, invitation.plan.keys(options)
            rank = plan.new_rank(None, number)
            assert rank is not None
            options.note_phase(Phase.CHECK)
            prepared = _prepare(session, invitation, keys, number, options, unless_joined, meeting)
            until_joined.enter_context(deferred_signals())  # [Note: signals in a resize]
            meeting.answer(number, None)
            options.note_phase(Phase.DECIDE)
            if meeting.decision(plan.token, options.timeout_seconds) is Decision.STAY:
                raise ResizeError("this process did not join: the ranks that train gave the resize up")
            unless_joined.pop_all()
        held = Held(prepared.shards, prepared.on_devices, None, rank)
        return change(
            session, plan, keys, prepared.shards, held, rank, options, prepared.connected, state=prepared.state
        )


def _prepare(
    session: Session,
    invitation: Invitation,
    keys: ResizeKeys,
    number: int,
    options: ResizeOptions,
    unless_joined: contextlib.ExitStack,
    meeting: Rendezvous,
) -> _Prepared:
    """Has all that this process needs, or tells the leader why not. ``unless_joined`` gets what undoes it.

    Raises:
        ResizeError: in the place of what went wrong, but for interrupts.
    """
    plan, limit = invitation.plan, options.timeout_seconds
    rank = plan.new_rank(None, number)
    assert rank is not None
    try:
        check_carried(options.carried, len(plan.former))
        shards = Shards(session, plan, rank, options.folder, keys.files)
        unless_joined.callback(shards.remove_reached, rank)
        on_devices = shards.on_devices(None, rank)
        connected = pass_on(session, plan, shards, on_devices, plan.passing_place(keys, None, number), options)
        if connected is not None:
            unless_joined.callback(connected.close)
        shards.files.reach(rank, invitation.addresses, limit)
        state = reached_state(shards.files.folder, keys.files, rank, invitation.addresses[0], limit)
        check_state(state, options.carried)
    except BaseException as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(RuntimeError):  # the store is gone
            meeting.answer(number, problem)
        if is_interrupt(error):
            raise
        raise ResizeError(f"this process did not join: {problem}") from error
    return _Prepared(shards, on_devices, connected, state)

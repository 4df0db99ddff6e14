"""A process that joins ranks which train (``Engine.join``), and the check of the invitation that it receives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from patrickstar import _C
from patrickstar.elastic.phases import Resized, ResizePhase
from patrickstar.elastic.rendezvous import REFUSAL, Decision, Rendezvous, ResizeError
from patrickstar.elastic.resize_folder import is_token
from patrickstar.elastic.sampler import OfBatch
from patrickstar.ranks.addresses import AllowedHosts, split_address
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.failures import first_line, is_interrupt
from patrickstar.resize.devices import DeviceShards, pass_on, prepare_to_receive
from patrickstar.resize.plan import ResizeKeys, ResizeOptions, ResizePlan, UserState, description
from patrickstar.resize.reopening import DecidedResize, change
from patrickstar.resize.resizing import check_supported, check_user_state
from patrickstar.resize.shards import HeldShards, Shards, check_state, reached_state
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.session import Session
from patrickstar.state.save_load import check_between_steps

_MOST = 2**63 - 1
_MOST_RANKS = 2**20
_MOST_NAME = 255
_Check = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Results of a process's preparation before the decision."""

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
    number = meeting.announce()
    with contextlib.ExitStack() as until_joined:
        with meeting.beating(number), contextlib.ExitStack() as unless_joined:
            unless_joined.callback(meeting.withdraw, number)
            options.note_phase(ResizePhase.GATHER)
            meeting.arrive(number, description(session, options.user_state))
            options.note_phase(ResizePhase.PUBLISH)
            invitation = read_invitation(meeting.invitation(number, options.timeout_seconds), number, allowed)
            plan, keys = invitation.plan, invitation.plan.keys(options)
            rank = plan.new_rank(None, number)
            assert rank is not None
            prepared = _prepare(session, invitation, keys, number, options, unless_joined, meeting)
            until_joined.enter_context(deferred_signals())  # until the change is over, as in resize_session
            meeting.answer(number, None)
            options.note_phase(ResizePhase.DECIDE)
            if meeting.decision(plan.token, options.timeout_seconds) is Decision.STAY:
                raise ResizeError("this process did not join: the ranks that train gave the resize up")
            unless_joined.pop_all()
        held = HeldShards(prepared.shards, prepared.on_devices, None, rank)
        decided = DecidedResize(
            plan=plan, keys=keys, options=options, shards=prepared.shards, connected=prepared.connected
        )
        return change(session, decided, held, rank, prepared.state)


def _prepare(
    session: Session,
    invitation: Invitation,
    keys: ResizeKeys,
    number: int,
    options: ResizeOptions,
    unless_joined: contextlib.ExitStack,
    meeting: Rendezvous,
) -> _Prepared:
    """Prepares everything that this process needs, or sends the leader the reason for failing.

    Args:
        unless_joined: receives callbacks that undo the preparation.

    Raises:
        ResizeError: replaces any error except interrupts.
    """
    plan, limit = invitation.plan, options.timeout_seconds
    rank = plan.new_rank(None, number)
    assert rank is not None
    whom = f"joining process {number}"
    try:
        unless_joined.callback(plan.forget_world)
        with plan.giving_up(whom):
            plan.reach_world(keys, whom, session.config.rank_timeout_seconds)
            meeting.begin(number)
            options.note_phase(ResizePhase.CHECK)
            check_user_state(_without_batches(options.user_state), len(plan.former))
            shards = Shards(session, plan, rank, options.folder, keys.files)
            unless_joined.callback(shards.remove_reached, rank)
            on_devices, place = shards.on_devices(None, rank), plan.passing_place(keys, None, number)
            connected = pass_on(session, plan, shards.moves, on_devices, place, options)
            if connected is not None:
                unless_joined.callback(connected.close)
            shards.files.reach(rank, invitation.addresses, limit)
            state = reached_state(shards.files.folder, keys.files, rank, invitation.addresses[0], limit)
            check_state(state, options.user_state)
    except BaseException as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(RuntimeError):  # the store is gone
            meeting.answer(number, problem)
        if is_interrupt(error):
            raise
        raise ResizeError(f"this process did not join: {problem}") from error
    return _Prepared(shards, on_devices, connected, state)


def _without_batches(user_state: Mapping[str, UserState]) -> dict[str, UserState]:
    """User state that does not take its batch from the ranks that train, which have checked theirs."""
    return {name: item for name, item in user_state.items() if not isinstance(item, OfBatch) or item.batches.is_fixed}


@dataclasses.dataclass(frozen=True)
class Invitation:
    """The leader's message with which one process can join.

    All fields are checked before the process acts on them: types, ranges, and the token, which is part of a path. Hosts
    must lie within the run's networks. The message names no path on this machine.
    """

    plan: ResizePlan
    addresses: list[str]
    """``host:port`` of the old ranks' file servers by rank; empty: no server."""


def read_invitation(said: Mapping[str, Any], number: int, allowed: AllowedHosts) -> Invitation:
    """The invitation of process ``number``.

    Raises:
        ResizeError: the training ranks refuse the process, or a field is missing, unknown or out of range.
    """
    if REFUSAL in said:
        raise ResizeError(f"this process did not join: {said[REFUSAL]}")
    try:
        fields, addresses = dict(said["plan"]), said["addresses"]
        _check_names(fields)
        for name, check in _CHECKS.items():
            if not check(fields[name]):
                raise ValueError(f"{name} is {repr(fields[name])[:100]}")
        plan = ResizePlan(**fields)
        _check_ranks(plan, number)
        allowed.check(plan.host)
        if not _list_of(_is_text)(addresses) or len(addresses) != plan.num_old:
            raise ValueError(f"addresses are {str(addresses)[:100]}")
        for address in filter(None, addresses):
            allowed.check(split_address(address)[0])
    except (ValueError, KeyError, TypeError) as error:
        raise ResizeError(
            f"this process did not join: the invitation is refused ({type(error).__name__}: {error}); start it with "
            "the version of PatrickStar of the ranks that train"
        ) from error
    return Invitation(plan, addresses)


def _check_names(fields: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(ResizePlan)}
    if fields.keys() != known:
        raise ValueError(f"unknown or missing fields: {', '.join(sorted(map(str, fields.keys() ^ known)))[:200]}")


def _check_ranks(plan: ResizePlan, number: int) -> None:
    joining = plan.former.count(None)
    if len(plan.hosts) != len(plan.former) or joining != len(plan.joiners) or number not in plan.joiners:
        raise ValueError(
            f"{len(plan.former)} ranks, of which {joining} join: {plan.joiners}, on {len(plan.hosts)} hosts"
        )
    staying = [old for old in plan.former if old is not None]
    if len(set(staying)) != len(staying) or any(old >= plan.num_old for old in staying):
        raise ValueError(f"former ranks are {plan.former}")


def _is_number(least: int, most: int = _MOST) -> _Check:
    return lambda value: type(value) is int and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_NAME


def _list_of(check: _Check, most: int | None = None) -> _Check:
    return lambda value: isinstance(value, list) and (most is None or len(value) <= most) and all(map(check, value))


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_CHECKS: dict[str, _Check] = {
    "token": is_token,
    "num_old": _is_number(1, _MOST_RANKS),
    "former": _list_of(_or_none(_is_number(0, _MOST_RANKS)), _MOST_RANKS),
    "joiners": _list_of(_is_number(1), _MOST_RANKS),
    "hosts": _list_of(_is_text, _MOST_RANKS),
    "host": _is_text,
    "port": _is_number(1, 2**16 - 1),
    "chunk_numel": _is_number(1),
    "micro_batches": lambda value: isinstance(value, dict) and all(map(_is_number(1), value.values())),
    "accumulation": _or_none(_is_number(1)),
    "step_counts": _list_of(_is_number(0)),
    "num_chunks": _is_number(0),
    "timeline": lambda value: isinstance(value, str),
    "on_device": _list_of(_is_number(0)),
    "secret": lambda value: value == "",
}

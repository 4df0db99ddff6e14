"""How values pass from device to device in a resize, before the decision ([Note: shards on devices])."""

from __future__ import annotations

import contextlib
import functools

from patrickstar import _C
from patrickstar.engine.resize_devices import DeviceShards
from patrickstar.engine.resize_plan import ResizeOptions, ResizePlan
from patrickstar.engine.resize_shards import Shards
from patrickstar.engine.session import Session
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, warm_up
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.passing import PassingPlace, connect_ahead, passing_communicator


def pass_on(
    session: Session,
    plan: ResizePlan,
    shards: Shards,
    on_devices: DeviceShards,
    place: PassingPlace,
    options: ResizeOptions,
) -> ChunkCommunicators | None:
    """All processes call this at the same point, before the decision. Where values pass between the new ranks alone,
    they do it in a communicator that these go on with; it is given, and whoever gets it closes it.
    """
    if not any(move.param in shards.sizes for move in shards.moves):
        return None
    limit, moves = options.timeout_seconds, shards.moves
    if not plan.guests:
        communicator = session.ranks.scatter
        sources = {old: old for old in range(plan.num_old)}
        targets = {new: _given(old) for new, old in enumerate(plan.former)}
        on_devices.reserve(session, moves, targets, communicator.rank)
        with session.guard("resize"):
            on_devices.pass_on(session, communicator, moves, sources, targets, limit)
        return None
    name, sources = f"resize {plan.token}", plan.passing_sources
    targets = {new: new for new in range(len(plan.former))}
    reserve = functools.partial(on_devices.reserve, session, moves, targets, place.rank)
    with contextlib.ExitStack() as unless_it_passes:
        try:
            if not plan.all_stay:
                with passing_communicator(name, place, session.device, reserve, timeout_seconds=limit) as communicator:
                    on_devices.pass_on(session, communicator, moves, sources, targets, limit)
                return None
            connected = connect_ahead(name, place, session.device, reserve, timeout_seconds=limit)
            unless_it_passes.callback(connected.close)
            on_devices.pass_on(session, connected.scatter, moves, sources, targets, limit)
            if session.device.type == "cuda":
                warm_up(connected.gather, connected.scatter, session.device, limit)
        except _C.RankFailure as error:  # of processes, some of which join: no rank has failed yet
            raise OSError(f"values did not pass from device to device: {first_line(error)}") from error
        unless_it_passes.pop_all()
    return connected


def _given(old: int | None) -> int:
    assert old is not None  # nobody joins
    return old

"""The second half of a change of ranks, after the decision: the old core closes, and one for the new ranks opens.

An engine is whole again only at the end (resizing.py). If a rank is lost meanwhile, the others end; or, where the
session says so, they are left without a core and may go on from copies (recovery.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.elastic.phases import Membership, Resized, ResizePhase
from patrickstar.elastic.run_batch import share
from patrickstar.machine.budgets import make_budgets
from patrickstar.module.first_rank_values import check_same_model
from patrickstar.parallel.axes import mesh_of
from patrickstar.parallel.sharded_matrices import make_matrices
from patrickstar.planning.step_plan import timeline_from_json
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups, open_ranks
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading
from patrickstar.ranks.world import move_to_world
from patrickstar.resize.plan import ResizeKeys, ResizeOptions, ResizePlan
from patrickstar.resize.shards import HeldShards, Shards, managed_states, take_state
from patrickstar.session.closing import abandon_session
from patrickstar.session.lifecycle import evict_all, reopen, suspend
from patrickstar.session.rank_sync import check_same_config, common_budgets
from patrickstar.session.session import LostRanks, Session

_ARRIVAL_SECONDS = 60.0  # from the first new rank to the last: all were ready when the change was decided


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidedResize:
    """A resize after its decision, as one process takes part in it."""

    plan: ResizePlan
    keys: ResizeKeys
    options: ResizeOptions
    shards: Shards
    """Shards of all ranks."""
    connected: ChunkCommunicators | None = None
    """Communicators that the new ranks have opened already."""


def change(
    session: Session, decided: DecidedResize, held: HeldShards, new: int | None, state: dict[str, Any] | None = None
) -> Resized:
    """Closes the old core and opens the new one, after the decision.

    Args:
        session: of this process.
        decided: the resize.
        held: sources of this process's new shards.
        new: its new rank; None: it leaves.
        state: for a joining process, the leader's.
    """
    with _ending_together(session, decided):
        decided.options.note_phase(ResizePhase.CLOSE)
        managed = managed_states(session) if state is None else state["managed"]
        evict_all(session, lambda: held.set_aside(session))
        if new is None:
            return left(session, decided.plan, decided.shards)
    return open_again(session, decided, functools.partial(held.fill, session), new, managed, state)


def left(session: Session, plan: ResizePlan, shards: Shards) -> Resized:
    """Ends a session without a core, whose process is no rank any more."""
    session.closed = True
    total = shards.num_bytes(shards.moves)
    return Resized(membership=Membership.LEFT, rank=-1, num_ranks=len(plan.former), received_bytes=0, total_bytes=total)


@contextlib.contextmanager
def _ending_together(session: Session, decided: DecidedResize) -> Iterator[None]:
    """After an error the session has no core, and its process is no rank."""
    try:
        yield
    except BaseException as error:
        decided.shards.remove()  # useless from now on
        if decided.connected is not None:
            decided.connected.close()
        if session.lost_ranks is LostRanks.GO_ON and isinstance(error, _C.RankFailure):
            suspend(session, error)
        else:
            abandon_session(session, error)
        raise


def open_again(
    session: Session,
    decided: DecidedResize,
    fill: Callable[[], None],
    new: int,
    managed: Sequence[dict[str, Any]],
    state: dict[str, Any] | None,
) -> Resized:
    """Opens a core of the new ranks, in a session without one. Arguments are those of :func:`change`, and:

    Args:
        fill: writes all values into the new core.
        managed: states of parameters that stay with PyTorch.
        state: beside shards; None: this process has it.
    """
    plan, options, shards = decided.plan, decided.options, decided.shards
    with _ending_together(session, decided):
        options.note_phase(ResizePhase.OPEN)
        was = session.ranks.context
        update = {"gradient_accumulation_steps": plan.accumulation}
        config = session.config = session.config.model_copy(update=update)
        arrival_seconds = min(options.timeout_seconds, _ARRIVAL_SECONDS)
        move_to_world(plan.place(new, decided.keys), config.rank_timeout_seconds, arrival_seconds)
        ranks = session.ranks = open_ranks(
            device_type=was.device.type,
            timeout_seconds=config.rank_timeout_seconds,
            device_index=was.device.index,
            connected=decided.connected,
        )
        with ranks.guard("resize"):
            check_same_config(ranks, config)
            mesh = MeshRanks(ranks, mesh_of(config, len(ranks.members)))
            chunk_ranks = ChunkRanks.along(mesh, Axis.DATA, Axis.SEQUENCE)
            here = ranks.context
            assert session.evicted is not None
            held_bytes = _held_on_host(ranks, session.evicted.memory.num_bytes)
            mine = make_budgets(config, here.device, here.local_world_size, here.num_device_ranks, held_bytes)
            budgets = common_budgets(ranks, mine)
            matrices = make_matrices(config, mesh)
            check_same_model(ranks, session.plan_of_params)

            options.note_phase(ResizePhase.BUILD)
            reopen(
                session,
                mesh,
                chunk_ranks,
                matrices,
                budgets,
                plan.chunk_numel,
                session.evicted,
                functools.partial(_expect, session, plan),
                fill,
            )
            for param, count in enumerate(plan.step_counts):
                if shards.arrays[param] > 1:
                    session.runtime.set_step_count(param, count)
            for param, states in zip(session.managed.params, managed, strict=True):
                if states:
                    session.states.set_optimizer_state(param.param, states)
            if state is not None:
                take_state(session, state, options.user_state)
            for name, most in plan.micro_batches.items():
                options.user_state[name].allow_micro_batch(most)
            share(options.user_state.values(), new, len(plan.former))

            options.note_phase(ResizePhase.CONFIRM)
            ranks.meet()
            shards.remove()
    received = [move for move in shards.moves if move.target == new]
    return Resized(
        membership=Membership.RANK,
        rank=new,
        num_ranks=len(plan.former),
        received_bytes=shards.num_bytes(received),
        total_bytes=shards.num_bytes(shards.moves),
    )


def _held_on_host(ranks: RankGroups, num_bytes: int) -> int:
    """Bytes that all ranks of this host keep of their former cores' memory; ``num_bytes`` are this rank's."""
    here = socket.gethostname()
    if len(ranks.members) == 1:
        return num_bytes
    told = ranks.control.exchange(json.dumps([here, num_bytes]).encode(), "memory that is used again")
    with reading("memory that is used again"):
        return sum(int(size) for host, size in map(json.loads, told) if host == here)


def _expect(session: Session, plan: ResizePlan) -> None:
    """Gives the new core the accesses of the old ranks' last step, if both have the same number of chunks.

    Steps use chunks alike on any number of ranks, and activation memory is similar. So states arrive at their tiers,
    and the first step replays a plan; where the step differs it fetches on demand. Small models differ in their number
    of chunks. Measured times are not reused, since updates and messages take other times.
    """
    if plan.timeline and plan.num_chunks == session.layout.num_chunks:
        session.runtime.adopt_timeline(timeline_from_json(plan.timeline, plan.num_chunks))

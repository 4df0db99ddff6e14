"""The change of a resize, after its decision: an engine's core is closed and opened again with the new ranks.

[Note: signals in a resize] From the decision on nobody goes back, and an engine is whole again only at the end of the
change. So signals are deferred (interrupts.py) from before the decision to the end of the change. A process that joins
defers them from before its answer, by which the leader decides.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Mapping
from typing import Any

from patrickstar import _C
from patrickstar.elastic.phases import Membership, Phase, Resized
from patrickstar.elastic.sampler import OfRanks
from patrickstar.engine.axes import mesh_of
from patrickstar.engine.divided_matrices import make_matrices
from patrickstar.engine.open_session import open_sessions
from patrickstar.engine.own_params import check_shared
from patrickstar.engine.rank_sync import check_same_config, common_budgets
from patrickstar.engine.resize_handover import managed_states, take_state
from patrickstar.engine.resize_plan import Carried, ResizeKeys, ResizeOptions, ResizePlan
from patrickstar.engine.resize_shards import Held, Shards
from patrickstar.engine.session import Session
from patrickstar.machine.budgets import make_budgets
from patrickstar.module.first_rank_values import check_same_model
from patrickstar.planning.step_plan import timeline_from_json
from patrickstar.ranks.chunk_communicators import ChunkCommunicators
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups, open_ranks
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading
from patrickstar.ranks.world import move_to_world


def check_supported(session: Session, call: str) -> None:
    """Raises StateError where an engine of this kind cannot be resized."""
    session.check_whole()
    config = session.config
    if session.owner.keeps_ranks is not None:
        raise _C.StateError(f"{call}: {session.owner.keeps_ranks}")
    if len(session.chunk_ranks.members) != len(session.ranks.members) or config.sequence_parallel.size > 1:
        raise _C.StateError(f"{call} with tensor_parallel or sequence_parallel is not supported yet; save a checkpoint")
    if session.matrices.names is not None:
        raise _C.StateError(f"{call} with tensor_parallel is not supported yet; save a checkpoint")
    if len(open_sessions()) > 1:
        raise _C.StateError(f"{call} while {len(open_sessions())} engines are open in this process; close the others")
    check_shared(session, call)
    if session.plan_of_params.quantized:
        raise _C.StateError(f"{call} with quantised weights is not supported yet; save a checkpoint")
    if session.compiled.is_compiled:
        raise _C.StateError(f"{call} of a compiled module is not supported yet; save a checkpoint, or do not compile")


def check_carried(carried: Mapping[str, Carried], num_ranks: int) -> None:
    """Raises ValueError where something that is carried cannot be shared by so many ranks."""
    for item in carried.values():
        if isinstance(item, OfRanks):
            item.check_ranks(num_ranks)


def change(
    session: Session,
    plan: ResizePlan,
    keys: ResizeKeys,
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
            session.closing.leave()
            return Resized(
                membership=Membership.LEFT, rank=-1, num_ranks=len(plan.former), received_bytes=0, total_bytes=total
            )

        options.note_phase(Phase.OPEN)
        was = session.ranks.context
        update = {"gradient_accumulation_steps": plan.accumulation}
        config = session.config = session.config.model_copy(update=update)
        move_to_world(plan.place(new, keys), config.rank_timeout_seconds)
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
        session.closing.abandon(error)
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
    """Bytes that all ranks of this host have kept of their former cores' memory; ``num_bytes`` are this rank's."""
    here = socket.gethostname()
    if len(ranks.members) == 1:
        return num_bytes
    told = ranks.control.exchange(json.dumps([here, num_bytes]).encode(), "memory that is used again")
    with reading("memory that is used again"):
        return sum(int(size) for host, size in map(json.loads, told) if host == here)


def _expect(session: Session, plan: ResizePlan) -> None:
    """[Note: a plan for other ranks]."""
    if plan.timeline and plan.num_chunks == session.layout.num_chunks:
        session.runtime.adopt_timeline(timeline_from_json(plan.timeline, plan.num_chunks))

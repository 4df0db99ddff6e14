"""Going on after ranks were lost: a change of ranks whose source are copies (``Engine.recover``).

Old ranks that are left agree on the copies to go on from (``elastic/survivors.py``), and publish the shards that others
need: their own, and those of a lost rank before them. Nothing is read from the core of the broken step. Then the core
closes, and one for fewer ranks opens, as in a resize. Without copies of all shards the new core has zeros, and the
caller loads a checkpoint.

A rank that is lost meanwhile makes the others begin again, with a new roll call: copies stay until later ones exist.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C
from patrickstar.elastic.movement import kept
from patrickstar.elastic.phases import Recovered, RecoverySource, ResizePhase
from patrickstar.elastic.published import OpenFile, Piece
from patrickstar.elastic.run_batch import check_any_batch
from patrickstar.elastic.survivors import RollCall, Verdict
from patrickstar.elastic.transfers import FileServer, own_address
from patrickstar.ranks.addresses import LOOPBACK
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.messages import reading
from patrickstar.ranks.world import end_world
from patrickstar.ranks.world_store import serve_world
from patrickstar.resize.copies import Copies, Copy, ShardCopy
from patrickstar.resize.plan import ResizeKeys, ResizeOptions, ResizePlan, UserState, accumulation_for
from patrickstar.resize.reopening import DecidedResize, left, open_again
from patrickstar.resize.shards import IN_MEMORY, Range, Shards, arrays_of, write_parts
from patrickstar.session.lifecycle import suspend
from patrickstar.session.session import Session


@dataclasses.dataclass(frozen=True)
class _Held:
    """Copies on this process, by old rank."""

    copy: Copy | None
    shards: Mapping[int, ShardCopy]


def recover_session(
    session: Session, copies: Copies, call: RollCall, number: int, options: ResizeOptions, error: BaseException
) -> Recovered:
    """Implements ``Engine.recover``. For all processes that are left.

    Args:
        session: in any state after ``error``.
        copies: of this process.
        call: the roll call.
        number: of the recovery, the same on all processes.
        options: as of a resize.
        error: that the lost rank has caused here.

    Raises:
        RankFailure: another rank was lost; call it again with the next number. Or the others go on without this rank.
    """
    session.ranks.leave(error)
    end_world()  # a rank that waits for this one in a call of torch.distributed notices
    verdict = call.hold(number, copies.report())
    old = verdict.world.index(copies.name)
    plan = _shared_plan(session, call, verdict, copies, options)
    keys, new = plan.keys(options), plan.new_rank(old)
    plan.reach_world(keys, f"old rank {old}'s process", session.config.rank_timeout_seconds)
    held = _held(copies, verdict, old)
    shards = Shards(session, plan, new, options.folder, keys.files)
    server: FileServer | None = None
    try:
        with _together(call, "published"):
            options.note_phase(ResizePhase.PUBLISH)
            for source, shard in held.shards.items():
                shards.files.write(source, functools.partial(_fill_files, shard))
            server = _serve(shards, options, keys, list(held.shards))
        addresses = _addresses(call, server, list(held.shards), plan.num_old)
        with _together(call, "reached"):
            options.note_phase(ResizePhase.CHECK)
            if new is not None and held.copy is not None:
                shards.files.reach(new, addresses, options.timeout_seconds)
    except BaseException:
        shards.remove()
        plan.forget_world()
        raise
    finally:
        if server is not None:
            server.close()
    options.note_phase(ResizePhase.CLOSE)
    suspend(session, error)
    source = RecoverySource.CHECKPOINT if held.copy is None else RecoverySource.COPIES
    num_lost = len(verdict.lost)
    if new is None:
        plan.forget_world()
        for one in held.shards if server is not None else ():
            shards.remove_given(one, server)
        return Recovered(resized=left(session, plan, shards), source=source, num_lost=num_lost)
    state = None if held.copy is None else copy.deepcopy(held.copy.state)
    fill = functools.partial(_fill_core, session, shards, new, held.shards.get(old))
    managed = [{} for _ in session.managed.params] if state is None else state["managed"]
    decided = DecidedResize(plan=plan, keys=keys, options=options, shards=shards)
    resized = open_again(session, decided, fill, new, managed, state)
    if held.copy is not None:
        held.copy.restore_rest(session)
    copies.forget_but(verdict.generation)
    return Recovered(resized=resized, source=source, num_lost=num_lost)


def _shared_plan(
    session: Session, call: RollCall, verdict: Verdict, copies: Copies, options: ResizeOptions
) -> ResizePlan:
    """The plan of the first survivor, on all."""
    text = ""
    if call.name == verdict.survivors[0]:
        text = json.dumps(dataclasses.asdict(_make_plan(session, verdict, copies, options)))
    told = call.exchange("plan", text)
    with reading("the plan of the ranks that are left"):
        return ResizePlan(**json.loads(told[0]))


def _make_plan(session: Session, verdict: Verdict, copies: Copies, options: ResizeOptions) -> ResizePlan:
    num_new = _most_ranks(len(verdict.survivors), options.user_state)
    num_old = len(verdict.world)
    former: list[int | None] = [verdict.world.index(name) for name in verdict.survivors[:num_new]]
    hosts = list(verdict.hosts[:num_new])
    host = LOOPBACK if len(set(hosts)) == 1 else own_address(options.towards())
    token = uuid.uuid4().hex
    key = ResizeKeys.of(token, options.run_secret()).store
    port = serve_world(host, key, session.config.rank_timeout_seconds) if num_new > 1 else 0
    found = None if verdict.generation is None else copies.of(verdict.generation)
    counts = [0] * len(session.params_now().chunked) if found is None else found.step_counts
    accumulated = session.config.gradient_accumulation_steps if found is None else found.accumulation
    return ResizePlan(
        token=token,
        num_old=num_old,
        former=former,
        joiners=[],
        hosts=hosts,
        host=host,
        port=port,
        micro_batches={},
        accumulation=accumulation_for(accumulated, num_old, num_new),
        chunk_numel=session.chunk_numel,
        step_counts=counts,
        num_chunks=0,
        timeline="",
    )


def _most_ranks(num_left: int, user_state: Mapping[str, UserState]) -> int:
    """The most of so many ranks that can share the user state."""
    problem = ""
    for num_ranks in range(num_left, 0, -1):
        try:
            check_any_batch(user_state.values(), num_ranks)
        except ValueError as error:
            problem = problem or str(error)
            continue
        return num_ranks
    raise _C.StateError(f"no number of ranks up to {num_left} can go on: {problem}")


def _held(copies: Copies, verdict: Verdict, old: int) -> _Held:
    if verdict.generation is None:
        return _Held(None, {})
    found = copies.of(verdict.generation)
    before = (old - 1) % len(verdict.world)
    lost = {before: found.mirrored} if before in verdict.lost else {}
    return _Held(found, {old: found.own, **lost})


@contextlib.contextmanager
def _together(call: RollCall, what: str) -> Any:
    """If the block fails on one process, all raise RankFailure."""
    problem = ""
    try:
        yield
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
    told = [text for text in call.exchange(what, problem) if text]
    if told:
        raise _C.RankFailure(f"the ranks that are left could not go on: {'; '.join(told)}")


def _fill_files(shard: ShardCopy, pieces: list[Piece], files: list[OpenFile]) -> None:
    for descriptor, num_bytes in files:
        if num_bytes > 0:
            os.posix_fallocate(descriptor, 0, num_bytes)
    for piece in pieces:
        move = piece.move
        values, at = shard.elements(move.param, piece.array, move.begin, move.end), piece.at
        while len(values) > 0:
            written = os.pwrite(files[piece.file][0], values, at)
            values, at = values[written:], at + written


def _serve(shards: Shards, options: ResizeOptions, keys: ResizeKeys, sources: list[int]) -> FileServer:
    files = {file.name: shards.files.path(file) for source in sources for file in shards.files.of_source(source)}
    return FileServer(own_address(options.towards()), keys.files, files, options.timeout_seconds)


def _addresses(call: RollCall, server: FileServer | None, sources: list[int], num_old: int) -> list[str]:
    """Addresses of file servers by old rank."""
    address = "" if server is None else server.address
    found = [""] * num_old
    with reading("addresses of shards"):
        for text in call.exchange("addresses", json.dumps([address, sources])):
            said, theirs = json.loads(text)
            for source in theirs:
                found[source] = said
    return found


def _fill_core(session: Session, shards: Shards, new: int, own: ShardCopy | None) -> None:
    """Writes a new rank's parts: from its own copy and files, or zeros without a copy."""
    kinds = arrays_of(session)
    sources: dict[tuple[int, int], list[Range]] = {}
    largest = max((end - begin for begin, end in shards.new[new]), default=0)
    zeros = _C.HostMapping(max(largest, 1) * torch.float32.itemsize)
    for param, part in enumerate(shards.new[new]):
        for array in range(shards.arrays[param]):
            begin, end = part if own is None else kept(part, own.parts[param])
            if begin < end:
                address = zeros.address if own is None else own.address(param, array, begin)
                sources[param, array] = [(param, kinds[array], begin, end, IN_MEMORY, address)]
    if own is None:
        ranges = [
            one
            for param, (begin, _) in enumerate(shards.new[new])
            for one in sources.get((param, 0), [(param, kinds[0], begin, begin, IN_MEMORY, 0)])
        ]
        session.runtime.write_ranges(ranges, [])
        return
    write_parts(session, shards, new, sources)

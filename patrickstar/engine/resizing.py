"""Another number of ranks for an engine that goes on training: ``Engine.resize`` and ``Engine.join``.

[Note: order of a resize] All processes go through the phases of ``patrickstar.elastic.Phase``. Before the decision
([Note: decision of a resize]) nothing of an engine is changed: old ranks write copies of what others will need, and
whoever joins checks that it can take part. After it each rank sets aside what it keeps, closes its core, and reopens it
with the new ranks: the core is made for a number of ranks. The module, its ``Parameter`` objects, the engine, the
optimizer and random number generators stay what they are.

A process that joins has an engine of its own alone, whose values count for nothing, and goes through the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from patrickstar import _C
from patrickstar.checkpoint.rng import rng_states, set_rng_states
from patrickstar.elastic.movement import Move, Part, assign_ranks, find_moves, kept
from patrickstar.elastic.phases import Membership, Phase, Resized
from patrickstar.elastic.published import PublishedShards
from patrickstar.elastic.rendezvous import Decision, Rendezvous, ResizeError
from patrickstar.elastic.sampler import OfRanks
from patrickstar.engine.axes import mesh_of
from patrickstar.engine.divided_matrices import make_matrices
from patrickstar.engine.engine_state import check_between_steps
from patrickstar.engine.open_session import open_sessions
from patrickstar.engine.rank_sync import check_same_config, common_budgets, failed_ranks
from patrickstar.engine.session import Session
from patrickstar.machine.budgets import make_budgets
from patrickstar.machine.engine_options import state_scheme
from patrickstar.module.first_rank_values import check_same_model
from patrickstar.module.preprocess import make_layout
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import Place, move_to_world, open_ranks
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.mesh import Axis, MeshRanks

_REFUSAL = "refusal"  # a key of an invitation


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
    timeout_seconds: float
    note_phase: Callable[[Phase], None]

    def meeting_place(self) -> Rendezvous:
        """Where processes meet."""
        return self.rendezvous if isinstance(self.rendezvous, Rendezvous) else Rendezvous.at(self.rendezvous)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
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
    chunk_numel: int
    step_counts: list[int]
    """Of each parameter in chunks."""
    folder: str

    def new_rank(self, old: int | None, guest: int | None = None) -> int | None:
        """Of an old rank, or of a process that joins; None: it leaves."""
        if guest is not None:
            joining = [rank for rank, former in enumerate(self.former) if former is None]
            return joining[self.guests.index(guest)]
        return self.former.index(old) if old in self.former else None

    def place(self, rank: int) -> Place:
        """Of a new rank."""
        here = [index for index, host in enumerate(self.hosts) if host == self.hosts[rank]]
        return Place(
            rank=rank,
            world_size=len(self.former),
            local_rank=here.index(rank),
            local_world_size=len(here),
            host=self.host,
            port=self.port,
        )


class _Shards:
    """Who has which parts before and after, and the files in which they travel."""

    def __init__(self, session: Session, plan: _Plan):
        params = session.params_now()
        old = _parts(session, params, plan.chunk_numel, plan.num_old)
        self.new = _parts(session, params, plan.chunk_numel, len(plan.former))
        self.old = old
        self.moves = find_moves(old, self.new, plan.former)
        trained = [spec.trained for spec in params.chunked]
        self.arrays = {
            index: len(_arrays(session)) if trained[index] and count > 0 else 1
            for index, count in enumerate(plan.step_counts)
        }
        self.files = PublishedShards(plan.folder, plan.token, self.moves, self.arrays)

    def num_bytes(self, moves: Sequence[Move]) -> int:
        """That these moves take."""
        return sum(move.numel * self.arrays[move.param] for move in moves) * torch.float32.itemsize


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
        said = f"{num_ranks} ranks, leaving {leaving}, carried {sorted(options.carried)}, in {options.folder}"
        ranks.check_agreement("the resize", said)
        former = assign_ranks(len(ranks.members), num_ranks, leaving)
        num_joining = former.count(None)
        meeting: Rendezvous | None = None
        plan: _Plan | None = None
        with _all_or_none(session, "the resize was not begun"):
            _check_carried(options.carried, num_ranks)
            _check_room(session, num_ranks)
        with _all_or_none(session, "the ranks were not gathered"):
            if is_leader:
                guests: dict[int, dict[str, Any]] = {}
                if num_joining > 0:
                    meeting = options.meeting_place()
                    guests = meeting.gather(num_joining, options.timeout_seconds)
                    try:
                        _check_guests(session, guests, options.carried)
                    except ResizeError as error:
                        _send_away(meeting, guests, str(error))
                        raise
                plan = _make_plan(session, former, guests, options.folder)
        plan = _shared_plan(session, plan)
        if is_leader and meeting is not None:
            until_decided.enter_context(meeting.beating(plan.token))

        options.note_phase(Phase.PUBLISH)
        shards = _Shards(session, plan)
        is_decided = False
        try:
            with _all_or_none(session, "shards were not published"):
                shards.files.write(control.rank, lambda *what: _own_values(session, shards.old[control.rank], *what))
                if is_leader:
                    _write_state(session, plan, options.carried)
            options.note_phase(Phase.CHECK)
            with _all_or_none(session, "processes that were to join cannot"):
                if is_leader and meeting is not None:
                    for number in plan.guests:
                        meeting.invite(number, dataclasses.asdict(plan))
                    meeting.answers(plan.guests, options.timeout_seconds)

            options.note_phase(Phase.DECIDE)
            with _all_or_none(session, "the resize was given up"):
                if meeting is not None:
                    meeting.decide(plan.token, Decision.RESIZE)
            is_decided = True  # by the leader as well: all have told each other that nothing failed
        finally:
            if not is_decided:
                if meeting is not None:
                    with contextlib.suppress(RuntimeError):
                        meeting.decide(plan.token, Decision.STAY)
                        _send_away(meeting, plan.guests, "the ranks that train gave the resize up")
                _remove_files(shards, plan)  # whoever comes first: the leader may be gone
        return _change(session, plan, shards, control.rank, plan.new_rank(control.rank), options)


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
    options.note_phase(Phase.GATHER)
    number = meeting.arrive(_description(session, options.carried))
    with meeting.beating(number):
        options.note_phase(Phase.PUBLISH)
        invitation = meeting.invitation(number, options.timeout_seconds)
        if _REFUSAL in invitation:
            raise ResizeError(f"this process did not join: {invitation[_REFUSAL]}")
        plan = _Plan(**invitation)
        options.note_phase(Phase.CHECK)
        rank = plan.new_rank(None, number)
        assert rank is not None
        problem: str | None = None
        try:
            _check_carried(options.carried, len(plan.former))
            shards = _Shards(session, plan)
            shards.files.check(sorted({move.source for move in shards.moves if move.target == rank}))
            state = _read_state(plan)
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        meeting.answer(number, problem)
        options.note_phase(Phase.DECIDE)
        decision = meeting.decision(plan.token, options.timeout_seconds)
    if decision is Decision.STAY or problem is not None:
        raise ResizeError(f"this process did not join: {problem or 'the ranks that train gave the resize up'}")
    return _change(session, plan, shards, None, rank, options, state)


def _change(
    session: Session,
    plan: _Plan,
    shards: _Shards,
    old: int | None,
    new: int | None,
    options: ResizeOptions,
    state: dict[str, Any] | None = None,
) -> Resized:
    """After the decision; see [Note: order of a resize]. ``state``: what a process that joins takes over."""
    try:
        options.note_phase(Phase.CLOSE)
        held = _Held(session, shards, old, new)
        managed = _managed_states(session) if state is None else state["managed"]
        former = session.vacate()
        total = shards.num_bytes(shards.moves)
        if new is None:
            session.closed = True
            return Resized(
                membership=Membership.LEFT, rank=-1, num_ranks=len(plan.former), received_bytes=0, total_bytes=total
            )

        options.note_phase(Phase.OPEN)
        was, config = session.ranks.context, session.config
        move_to_world(plan.place(new))
        ranks = session.ranks = open_ranks(
            device_type=was.device.type,
            timeout_seconds=config.rank_timeout_seconds,
            device_index=was.device.index,
        )
        with ranks.guard("resize"):
            check_same_config(ranks, config)
            mesh = MeshRanks(ranks, mesh_of(config, len(ranks.members)))
            chunk_ranks = ChunkRanks.along(mesh, Axis.DATA, Axis.SEQUENCE)
            here = ranks.context
            mine = make_budgets(config, here.device, here.local_world_size, here.num_device_ranks)
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
                former,
                lambda param: held.fill(session, param, 0),
            )
            for param, count in enumerate(plan.step_counts):
                for array in range(1, shards.arrays[param]):
                    held.fill(session, param, array)
                if shards.arrays[param] > 1:
                    session.runtime.set_step_count(param, count)
            for param, states in zip(session.managed.params, managed, strict=True):
                if states:
                    session.states.set_optimizer_state(param.param, states)
            if state is not None:
                _take_state(session, state, options.carried)
            for item in options.carried.values():
                if isinstance(item, OfRanks):
                    item.set_ranks(new, len(plan.former))

            options.note_phase(Phase.CONFIRM)
            ranks.meet()
            if new == 0:
                _remove_files(shards, plan)
    except BaseException as error:
        _remove_files(shards, plan)  # nobody can go on with them
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


class _Held:
    """What a process has of its new shards: what it keeps, in memory of its own, and others' files."""

    def __init__(self, session: Session, shards: _Shards, old: int | None, new: int | None):
        """While the old core is open; ``old``, ``new``: this process's ranks, None: it is none."""
        self._shards = shards
        self._parts = shards.new[new] if new is not None else []
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._kept_at: dict[int, int] = {}
        self._moves: dict[int, list[Move]] = {}
        for move in shards.moves:
            if move.target == new:
                self._moves.setdefault(move.param, []).append(move)
        if old is None or new is None:
            return
        for param, part in enumerate(self._parts):
            begin, end = kept(part, shards.old[old][param])
            self._kept_at[param] = begin
            for array in range(shards.arrays[param]) if begin < end else ():
                self._kept[param, array] = _own_values(session, shards.old[old], param, array, begin, end)

    def fill(self, session: Session, param: int, array: int) -> None:
        """Writes this rank's part of an array of a parameter, and lets go of it."""
        begin, end = self._parts[param]
        values = torch.empty(max(end - begin, 1), dtype=torch.float32)  # an address also where there is no part
        own = self._kept.pop((param, array), None)
        if own is not None:
            values[self._kept_at[param] - begin :][: own.numel()] = own
        for move in self._moves.get(param, ()):
            values[move.begin - begin :][: move.numel] = self._shards.files.read(move, array)
        # The core takes the whole parameter's address and reads this rank's part of it.
        address = values.data_ptr() - begin * torch.float32.itemsize
        session.runtime.write_values(param, _arrays(session)[array], address, _C.Tier.HOST)


def _own_values(session: Session, parts: Sequence[Part], param: int, array: int, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of this rank's part, float32, in memory of their own."""
    first, last = parts[param]
    values = torch.empty(last - first, dtype=torch.float32)
    session.runtime.read_own_values(param, _arrays(session)[array], values.data_ptr())
    return values[begin - first : end - first].clone()


def _arrays(session: Session) -> tuple[_C.ArrayKind, ...]:
    """What travels of a parameter that was updated; of others, the first of them."""
    return (_C.ArrayKind.MASTER, *session.states.arrays.values())


def _parts(session: Session, params: Any, chunk_numel: int, num_ranks: int) -> list[list[Part]]:
    """By rank and parameter: a pure function of the parameters, the size of chunks and the number of ranks."""
    scheme = state_scheme(session.config.optimizer, num_ranks)
    found = []
    for rank in range(num_ranks):
        layout = make_layout(params, chunk_numel, num_ranks, rank, scheme)
        shards = (layout.shard_of(param) for param in range(len(params.chunked)))
        found.append([(begin, begin + numel) for begin, numel, _ in shards])
    return found


def _send_away(meeting: Rendezvous, guests: Iterable[int], why: str) -> None:
    """Tells those that wait for an invitation that none comes; who has one waits for the decision."""
    for number in guests:
        meeting.invite(number, {_REFUSAL: why})


# Agreement among old ranks, and with those that join.


@contextlib.contextmanager
def _all_or_none(session: Session, what: str) -> Iterator[None]:
    """Where what is inside fails on a rank with an error, all ranks raise ResizeError and can go on."""
    failure: Exception | None = None
    try:
        yield
    except _C.RankFailure:
        raise
    except Exception as error:
        failure = error
    with session.guard("resize"):
        failed = failed_ranks(session.ranks, failure)
    if failed:
        raise ResizeError(f"{what}, and the ranks are as they were: {failed}") from failure


def _together(session: Session, said: str) -> list[bytes]:
    if len(session.ranks.members) == 1:
        return [said.encode()]
    with session.guard("resize"):
        return session.ranks.control.exchange(said.encode(), "the resize")


def _shared_plan(session: Session, plan: _Plan | None) -> _Plan:
    said = _together(session, "" if plan is None else json.dumps(dataclasses.asdict(plan)))
    return _Plan(**json.loads(said[0]))


def _make_plan(
    session: Session, former: list[int | None], guests: Mapping[int, Mapping[str, Any]], folder: str
) -> _Plan:
    here = socket.gethostname()
    joining = iter([said["host"] for said in guests.values()])
    hosts = [here if rank is not None else next(joining) for rank in former]
    host = "127.0.0.1" if set(hosts) == {here} else here
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    trained = [spec.trained for spec in session.params_now().chunked]
    return _Plan(
        token=uuid.uuid4().hex,
        num_old=len(session.ranks.members),
        former=former,
        guests=list(guests),
        hosts=hosts,
        host=host,
        port=port,
        chunk_numel=session.chunk_numel,
        step_counts=[session.runtime.step_count(p) if is_trained else 0 for p, is_trained in enumerate(trained)],
        folder=folder,
    )


def _description(session: Session, carried: Mapping[str, Carried]) -> dict[str, Any]:
    shared = session.config.model_copy(update={"profile": None, "plan": None, "plan_cache": None})
    params = session.params_now()
    chunked = [f"{s.name} {tuple(s.param.shape)} {s.compute_dtype} {s.trained}" for s in params.chunked]
    managed = [f"{m.name} {tuple(m.param.shape)} {m.param.dtype} stays with PyTorch" for m in params.managed]
    return {
        "host": socket.gethostname(),
        "the configuration": repr(shared),
        "the model's parameters, in order,": "; ".join(chunked + managed),
        "what is carried": repr(sorted(carried)),
    }


def _check_guests(session: Session, guests: Mapping[int, Mapping[str, Any]], carried: Mapping[str, Carried]) -> None:
    own = _description(session, carried)
    for number, said in guests.items():
        for what in own.keys() - {"host"}:
            if said[what] != own[what]:
                raise ResizeError(
                    f"process {number} that joins differs in {what} {said[what][:100]!r} instead of "
                    f"{own[what][:100]!r}; start it with the same script and configuration"
                )


def _check_supported(session: Session, call: str) -> None:
    session.check_whole()
    config = session.config
    if len(session.chunk_ranks.members) != len(session.ranks.members) or config.sequence_parallel.size > 1:
        raise _C.StateError(f"{call} with tensor_parallel or sequence_parallel is not supported yet; save a checkpoint")
    if session.matrices.names is not None:
        raise _C.StateError(f"{call} with tensor_parallel is not supported yet; save a checkpoint")
    if len(open_sessions()) > 1:
        raise _C.StateError(f"{call} while {len(open_sessions())} engines are open in this process; close the others")
    if session.compiled.is_compiled:
        raise _C.StateError(f"{call} of a compiled module is not supported yet; save a checkpoint, or do not compile")


def _check_carried(carried: Mapping[str, Carried], num_ranks: int) -> None:
    for item in carried.values():
        if isinstance(item, OfRanks):
            item.check_ranks(num_ranks)


def _check_room(session: Session, num_ranks: int) -> None:
    """A rank's share of parameters and optimizer states is not more than both budgets together, where the configuration
    gives both: others are measured when ranks are opened. That is needed, and not always enough.
    """
    config = session.config
    if config.device_memory is None or config.host_memory is None:
        return
    scheme = state_scheme(config.optimizer, num_ranks)
    layout = make_layout(session.params_now(), session.chunk_numel, num_ranks, 0, scheme)
    needed = sum(layout.chunk(chunk)["home_bytes"] for chunk in range(layout.num_chunks))
    there = config.device_memory + config.host_memory
    if needed > there:
        raise _C.MemoryBudgetError(
            f"each of {num_ranks} ranks has {needed} bytes of parameters and optimizer states, and device_memory "
            f"({config.device_memory}) and host_memory ({config.host_memory}) are {there} together; keep more ranks, "
            f"or begin again with a host_memory of at least {needed - config.device_memory} bytes"
        )


# The state beside shards: of a process that joins.


def _state_path(plan: _Plan) -> Path:
    return Path(plan.folder) / f"patrickstar-{plan.token}-state"


def _remove_files(shards: _Shards, plan: _Plan) -> None:
    shards.files.remove()
    _state_path(plan).unlink(missing_ok=True)


def _managed_states(session: Session) -> list[dict[str, Any]]:
    return [dict(session.states.optimizer_state(managed.param) or {}) for managed in session.managed.params]


def _write_state(session: Session, plan: _Plan, carried: Mapping[str, Carried]) -> None:
    state = {
        "num_steps": session.num_steps,
        "outcome": dataclasses.asdict(session.outcome),
        "scaler": dict(session.scaler.state()) if session.scaler is not None else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in session.param_groups],
        "managed": _managed_states(session),
        "rng": rng_states(session.device),
        "carried": {name: item.state_dict() for name, item in carried.items()},
    }
    with _state_path(plan).open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read_state(plan: _Plan) -> dict[str, Any]:
    return torch.load(_state_path(plan), map_location="cpu", weights_only=True)


def _take_state(session: Session, state: dict[str, Any], carried: Mapping[str, Carried]) -> None:
    session.num_steps = state["num_steps"]
    session.outcome = type(session.outcome)(**state["outcome"])
    if session.scaler is not None:
        session.scaler.set_state(**state["scaler"])
    for group, saved in zip(session.param_groups, state["groups"], strict=True):
        group.update(saved)
    for name, item in carried.items():
        item.load_state_dict(state["carried"][name])
    set_rng_states(state["rng"], session.device)

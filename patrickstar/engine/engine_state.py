"""An engine as a source and a sink of shards, and the order of its saving and loading.

A rank alone holds whole tensors, row-major; of several ranks each holds ranges of what is in chunks, in memory order.
What all of them have alike (buffers, parameters that stay with PyTorch) the first one gives.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.memory import Scratch, tensor_of
from patrickstar.checkpoint.peers import Peers, phase
from patrickstar.checkpoint.reader import Checkpoint
from patrickstar.checkpoint.rng import rng_states, set_rng_states
from patrickstar.checkpoint.shards import ADAM_STATES, Kind, TensorRange, TensorShard, is_row_major
from patrickstar.checkpoint.training_state import TrainingState
from patrickstar.checkpoint.writer import SaveOptions, save
from patrickstar.config import check_loss_scaler_state
from patrickstar.engine.session import Session, Stage
from patrickstar.engine.state_parts import Frozen, LoadOptions, Names, Part, leave_out_others
from patrickstar.module.chunked_parameter import ChunkedParameter, ParamHandle
from patrickstar.module.compiled.dynamo import without_wrappers
from patrickstar.optimizer.state import checked_group

logger = logging.getLogger("patrickstar")

_ARRAYS: dict[str, _C.ArrayKind] = {
    "master": _C.ArrayKind.MASTER,
    "frozen": _C.ArrayKind.MASTER,
    "exp_avg": _C.ArrayKind.MOMENTUM,
    "exp_avg_sq": _C.ArrayKind.VARIANCE,
}


class Scheduler(Protocol):
    """A learning-rate scheduler of PyTorch."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state, kept in the checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the state that :meth:`state_dict` gave when the checkpoint was saved."""


class RankPeers:
    """The ranks of an engine, as checkpoints talk to them: over its control group."""

    def __init__(self, session: Session):
        self._control = session.ranks.control
        self.rank = self._control.rank
        self.size = self._control.size

    def exchange(self, message: bytes) -> list[bytes]:
        """Gives every rank all ranks' messages, by rank."""
        return self._control.exchange(message)


class EngineSource:
    """What an engine holds on this rank."""

    def __init__(self, session: Session, frozen: Frozen = Frozen.SAVED):
        self._session = session
        self._frozen = frozen
        self._rank = session.ranks.control.rank
        self._sharded = session.ranks.control.size > 1
        self._scratch = Scratch()

    def shards(self) -> Iterator[TensorShard]:
        """Parameters, states of those that were ever updated, persistent buffers, random number generators."""
        yield from self.values()
        for name, param in named_params(self._session.module):
            if step_count(self._session, param) > 0:
                for kind in ADAM_STATES:
                    read = functools.partial(self._read_moment, param, kind)
                    yield from self._held(name, kind, param, torch.float32, read)
        for name, state in rng_states(self._session.device).items():
            yield _shard(f"rank{self._rank}.{name}", "rng", state.shape, state.dtype, lambda state=state: state)

    def values(self) -> Iterator[TensorShard]:
        """Of them, parameters and buffers."""
        for name, param in named_params(self._session.module):
            if self._frozen is Frozen.LEFT_OUT and not param.requires_grad:
                continue
            kind = _kind(param)
            dtype = torch.float32 if kind == "master" else param.dtype
            yield from self._held(name, kind, param, dtype, functools.partial(self._read_value, param, dtype))
        for name, buffer in persistent_buffers(self._session.module) if self._rank == 0 else ():
            yield _shard(name, "buffer", buffer.shape, buffer.dtype, functools.partial(_flat, buffer, buffer.dtype))

    def _held(
        self, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype, read_whole: Callable[[], torch.Tensor]
    ) -> Iterator[TensorShard]:
        if not self._sharded:
            yield _shard(name, kind, param.shape, dtype, read_whole)
        elif isinstance(param, ChunkedParameter):
            held = _own_range(self._session, name, kind, param, dtype)
            if held.numel > 0:
                read = functools.partial(self._read_own, param._patrickstar, kind, held.numel, dtype)
                yield TensorShard(**vars(held), read=read)
        elif self._rank == 0:
            yield _shard(name, kind, param.shape, dtype, read_whole)

    def _read_own(self, handle: ParamHandle, kind: Kind, numel: int, dtype: torch.dtype) -> torch.Tensor:
        values = tensor_of(self._scratch.take(numel * torch.float32.itemsize), torch.float32)
        self._session.runtime.read_own_values(handle.id, _ARRAYS[kind], values.data_ptr())
        return _flat(values, dtype)

    def _read_value(self, param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(param, ChunkedParameter):
            return _flat(param.detach().as_subclass(torch.Tensor), dtype)
        return self._read_array(param._patrickstar, _C.ArrayKind.MASTER, dtype)

    def _read_moment(self, param: nn.Parameter, kind: Kind) -> torch.Tensor:
        if isinstance(param, ChunkedParameter):
            return self._read_array(param._patrickstar, _ARRAYS[kind], torch.float32)
        return _flat(self._session.managed.state_of(param)[kind], torch.float32)

    def _read_array(self, handle: ParamHandle, kind: _C.ArrayKind, dtype: torch.dtype) -> torch.Tensor:
        memory_order = tuple(sorted(range(len(handle.shape)), key=lambda dim: -handle.stride[dim]))
        if not is_row_major(tuple(handle.shape), memory_order):
            return _flat(self._session.observer.read_values(handle, kind), dtype)
        values = tensor_of(self._scratch.take(handle.shape.numel() * torch.float32.itemsize), torch.float32)
        self._session.runtime.read_values(handle.id, kind, values.data_ptr())
        return _flat(values, dtype)


class EngineSink:
    """Takes what an engine on one rank holds."""

    def __init__(self, session: Session, part: Part = Part.EVERYTHING):
        self._session = session
        self._with_states = part is Part.EVERYTHING
        self.left_out: set[tuple[str, str]] = set()
        """Keys of tensors that are not wanted."""
        self._sharded = session.ranks.control.size > 1
        self._params = dict(named_params(session.module))
        self._buffers = dict(persistent_buffers(session.module))
        self._managed_states: dict[str, dict[str, torch.Tensor]] = {}

    def wanted(self) -> Iterator[TensorRange]:
        """All parameters, the states of trainable ones, and buffers, but for :attr:`left_out`."""
        yield from (item for item in self._all() if item.key not in self.left_out)

    def _all(self) -> Iterator[TensorRange]:
        for name, param in self._params.items():
            yield self._range(name, _kind(param), param, param.dtype)
            if self._with_states and _has_states(param):
                for kind in ADAM_STATES:
                    yield self._range(name, kind, param, torch.float32)
        for name, buffer in self._buffers.items():
            yield _range(name, "buffer", buffer.shape, buffer.dtype)

    def _range(self, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype) -> TensorRange:
        if self._sharded and isinstance(param, ChunkedParameter):
            return _own_range(self._session, name, kind, param, dtype)
        return _range(name, kind, param.shape, dtype)

    def write(self, wanted: TensorRange, values: torch.Tensor) -> None:
        """Puts the elements of one wanted range where the engine holds them; see ``ShardSink.write``."""
        if wanted.order is not None:
            self._write_own(wanted, values)
            return
        values = values.view(wanted.shape)
        if wanted.name in self._buffers:
            with torch.no_grad():
                self._buffers[wanted.name].copy_(values)
            return
        param = self._params[wanted.name]
        if isinstance(param, ChunkedParameter):
            self._session.observer.write_values(param._patrickstar, _ARRAYS[wanted.kind], values)
        elif wanted.kind in ADAM_STATES:
            self._managed_states.setdefault(wanted.name, {})[wanted.kind] = values.clone()
        else:
            with torch.no_grad():
                param.data.copy_(values)

    def _write_own(self, wanted: TensorRange, values: torch.Tensor) -> None:
        values = values.to(torch.float32).contiguous()
        handle = self._params[wanted.name]._patrickstar
        # The core takes the whole parameter's address and reads this rank's part of it.
        address = values.data_ptr() - wanted.begin * torch.float32.itemsize
        self._session.runtime.write_values(handle.id, _ARRAYS[wanted.kind], address, _C.Tier.HOST)

    def set_step_counts(self, counts: Mapping[str, int]) -> None:
        """After all values: how often each parameter was updated. One that never was has no states. Where states are
        not wanted, counts are not either.
        """
        if not self._with_states:
            return
        for name, param in self._params.items():
            count = counts.get(name, 0)
            if not _has_states(param) or count == step_count(self._session, param) == 0:
                continue
            if isinstance(param, ChunkedParameter) and count > 0:
                self._session.runtime.set_step_count(param._patrickstar.id, count)
            else:
                states = {"step": torch.tensor(float(count)), **self._managed_states.pop(name, {})}
                self._session.states.set_optimizer_state(param, states if count > 0 else {})


def _own_range(session: Session, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype) -> TensorRange:
    """The part of a parameter in a chunk that this rank holds, in memory order."""
    handle = param._patrickstar
    begin, numel, _ = session.layout.shard_of(handle.id)
    order = tuple(sorted(range(len(handle.shape)), key=lambda dim: -handle.stride[dim]))
    shape = tuple(handle.shape)
    return TensorRange(name=name, kind=kind, shape=shape, dtype=dtype, begin=begin, end=begin + numel, order=order)


def save_session(
    session: Session,
    directory: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    lr_scheduler: Scheduler | None,
    options: SaveOptions | None = None,
    frozen: Frozen = Frozen.SAVED,
) -> Path:
    """Saves the checkpoint that ``Engine.save_checkpoint`` describes, and returns its folder."""
    session.check_whole()
    check_between_steps(session, "save_checkpoint")
    options = options or SaveOptions(peers=RankPeers(session))
    with phase(options.peers, f"nothing was saved in {os.fspath(directory)}"):
        state = _state_of(session, client_state, lr_scheduler).to_json()
    tag = f"global_step{session.num_steps}" if tag is None else tag
    return save(directory, tag, EngineSource(session, frozen), state, options)


def _state_of(
    session: Session, client_state: Mapping[str, Any] | None, lr_scheduler: Scheduler | None
) -> TrainingState:
    return TrainingState(
        num_steps=session.num_steps,
        step_counts={
            name: count for name, param in named_params(session.module) if (count := step_count(session, param)) > 0
        },
        groups=_describe_groups(session),
        loss_scaler=dict(session.scaler.state()) if session.scaler is not None else None,
        lr_scheduler=lr_scheduler.state_dict() if lr_scheduler is not None else None,
        extra_states={name: child.get_extra_state() for name, child in _with_extra_state(session.module)},
        client_state=dict(client_state or {}),
    )


def load_session(
    session: Session,
    directory: str | os.PathLike[str],
    tag: str | None,
    lr_scheduler: Scheduler | None,
    peers: Peers | None = None,
    options: LoadOptions | None = None,
) -> tuple[Path, dict[str, Any]]:
    """See ``Engine.load_checkpoint``; ``options``: None for everything."""
    options = options or LoadOptions()
    check_between_steps(session, "load_checkpoint")
    peers = peers or RankPeers(session)
    sink = EngineSink(session, options.part)
    with contextlib.ExitStack() as held:
        with phase(peers, "no checkpoint was loaded"):
            checkpoint = held.enter_context(Checkpoint.find(directory, tag))
            state = TrainingState.from_json(checkpoint.manifest.state)
            if options.names is Names.COMMON:
                leave_out_others(checkpoint, sink)
            checkpoint.check(sink, peers.rank, peers.size)
            _check_state(session, checkpoint, state, lr_scheduler, options)
            same_ranks = peers.size == checkpoint.manifest.num_ranks
            rng = checkpoint.rng_states(peers.rank) if same_ranks else {}
        session.loaded_in_part = str(checkpoint.path)
        with phase(peers, f"{checkpoint.path} was loaded in part, and the engine's state is mixed; load another one"):
            checkpoint.load(sink)
            sink.set_step_counts(state.step_counts)
            _set_state(session, state, options.part)
            if lr_scheduler is not None:
                lr_scheduler.load_state_dict(state.lr_scheduler)
            goes_on = options.part is not Part.MODULE  # a run, and not its weights in another one
            if goes_on and same_ranks:
                set_rng_states(rng, session.device)
            elif goes_on:
                logger.info("%s: random numbers go on as they are, the number of ranks is another", checkpoint.path)
        session.loaded_in_part = None
        if goes_on:
            session.run_log.resume()
        if peers.rank == 0:
            said = f"resumed from %s, step {state.num_steps}" if goes_on else "the model's values are those of %s"
            logger.info(said, checkpoint.path)
        if options.part is Part.EVERYTHING:
            _warn_of_frozen(session, checkpoint, state)
    return checkpoint.path, state.client_state


def check_between_steps(session: Session, call: str) -> None:
    """Raises StateError when there are gradients that no step has used."""
    session.check_open()
    if session.matrices.names is not None:
        raise _C.StateError(f"{call}: checkpoints of divided matrices are not built yet; keep engine.state_dict()")
    if session.stage is Stage.BACKWARDED or session.runtime.gradients_pending():
        raise _C.StateError(
            f"{call} between backward and step: gradients are not part of a checkpoint; call it after "
            "optimizer.step() or optimizer.zero_grad()"
        )


def step_count(session: Session, param: nn.Parameter) -> int:
    """How often a parameter was updated."""
    if isinstance(param, ChunkedParameter):
        return session.runtime.step_count(param._patrickstar.id) if param._patrickstar.trainable else 0
    return int(session.managed.state_of(param).get("step", 0))


def named_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names in a checkpoint: those in a module of which nothing is compiled."""
    for name, param in module.named_parameters():
        yield without_wrappers(name), param


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that are part of a ``state_dict``, by name."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield without_wrappers(f"{prefix}.{name}".lstrip(".")), buffer


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield without_wrappers(name), child


def _describe_groups(session: Session) -> list[dict[str, Any]]:
    names = {param: name for name, param in named_params(session.module)}
    return [
        {
            "params": [names[param] for param in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in session.param_groups
    ]


def _check_state(
    session: Session,
    checkpoint: Checkpoint,
    state: TrainingState,
    scheduler: Scheduler | None,
    options: LoadOptions,
) -> None:
    """Whether it can be loaded; raises CheckpointError before anything is written."""
    if options.part is Part.EVERYTHING:
        _check_optimizer(session, checkpoint, state)
    if scheduler is not None and state.lr_scheduler is None:
        raise CheckpointError(f"{checkpoint.path} was saved without lr_scheduler; load it without one")
    extra = {name for name, _ in _with_extra_state(session.module)}
    if extra != set(state.extra_states) and options.names is Names.SAME:
        raise CheckpointError(f"{checkpoint.path} is of another model: its modules with extra state are others")


def _check_optimizer(session: Session, checkpoint: Checkpoint, state: TrainingState) -> None:
    stored, present = [group["params"] for group in state.groups], [g["params"] for g in _describe_groups(session)]
    if stored != present:
        raise CheckpointError(
            f"{checkpoint.path} has parameter groups of {[len(group) for group in stored]} parameters, or others than "
            f"this engine's of {[len(group) for group in present]}; build the engine with the same model_parameters"
        )
    try:
        for index, group in enumerate(state.groups):
            checked_group(group["options"], f"parameter group {index}")
        if session.scaler is not None and state.loss_scaler is not None:
            check_loss_scaler_state(session.config, state.loss_scaler)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}; load another checkpoint") from error
    for kind in ADAM_STATES:
        if {name for name, role in checkpoint.manifest.tensors if role == kind} != set(state.step_counts):
            raise CheckpointError(f"{checkpoint.path}: its step counts and {kind} are not of the same parameters")


def _warn_of_frozen(session: Session, checkpoint: Checkpoint, state: TrainingState) -> None:
    params = named_params(session.module)
    left_out = [name for name, param in params if state.step_counts.get(name, 0) > 0 and not _has_states(param)]
    if left_out:
        logger.warning(
            "%s: %d parameters were trained in it and are frozen here (%s%s): their values are loaded, their states "
            "are not; call requires_grad_(True) before load_checkpoint to go on training them",
            checkpoint.path,
            len(left_out),
            ", ".join(left_out[:3]),
            ", ..." if len(left_out) > 3 else "",
        )


def _set_state(session: Session, state: TrainingState, part: Part) -> None:
    session.stage = Stage.IDLE
    if part is not Part.MODULE:
        session.num_steps = state.num_steps
    if part is Part.EVERYTHING:
        _set_optimizer(session, state)
    for name, child in _with_extra_state(session.module):
        if name in state.extra_states:
            child.set_extra_state(state.extra_states[name])


def _set_optimizer(session: Session, state: TrainingState) -> None:
    for group, saved in zip(session.param_groups, state.groups, strict=True):
        group.update({key: value for key, value in saved["options"].items() if key != "params"})
    if session.scaler is not None and state.loss_scaler is not None:
        session.scaler.set_state(**state.loss_scaler)


def _kind(param: nn.Parameter) -> Kind:
    if not isinstance(param, ChunkedParameter):
        return "managed"
    return "master" if param._patrickstar.trainable else "frozen"


def _has_states(param: nn.Parameter) -> bool:
    if isinstance(param, ChunkedParameter):
        return param._patrickstar.trainable
    return param.requires_grad


def _range(name: str, kind: Kind, shape: torch.Size, dtype: torch.dtype) -> TensorRange:
    return TensorRange(name=name, kind=kind, shape=tuple(shape), dtype=dtype, begin=0, end=shape.numel())


def _shard(name: str, kind: Kind, shape: torch.Size, dtype: torch.dtype, read: Any) -> TensorShard:
    return TensorShard(name=name, kind=kind, shape=tuple(shape), dtype=dtype, begin=0, end=shape.numel(), read=read)


def _flat(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, row-major, in one dimension."""
    with _C.HostAllocations(), torch.no_grad():
        return values.detach().to("cpu", dtype).contiguous().view(-1)

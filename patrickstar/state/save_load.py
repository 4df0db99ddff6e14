"""Saving and loading of an engine's checkpoint: order of the steps, and the checks before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.blocks import KEY as BLOCKS
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign import ForeignCheckpoint, Receiver, open_checkpoint
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.reader import Checkpoint
from patrickstar.checkpoint.rng import set_rng_states
from patrickstar.checkpoint.shards import STATE_KINDS
from patrickstar.checkpoint.training_state import TrainingState
from patrickstar.checkpoint.writer import SaveOptions, Saving, save
from patrickstar.config import check_loss_scaler_state, rule_of
from patrickstar.module.compiled.dynamo import without_wrappers
from patrickstar.optimizer.state import checked_group
from patrickstar.session.optimizer_step import give_up_step
from patrickstar.session.session import Session
from patrickstar.session.step_state import StepStage
from patrickstar.session.wholeness import State
from patrickstar.state.engine_shards import EngineSink, EngineSource, has_states, state_kinds, step_count
from patrickstar.state.later_saves import save_later
from patrickstar.state.parts import Completion, Frozen, LoadOptions, Names, Part
from patrickstar.state.rank_peers import RankPeers
from patrickstar.state.sharded_checkpoints import (
    block_sink,
    described_blocks,
    further_names,
    make_sink,
    stored_params,
    whole_names,
)

logger = logging.getLogger("patrickstar")


class Scheduler(Protocol):
    """A learning-rate scheduler of PyTorch."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state for the checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores the state from the checkpoint."""


def save_session(
    session: Session,
    directory: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    lr_scheduler: Scheduler | None,
    options: SaveOptions | None = None,
    frozen: Frozen = Frozen.SAVED,
    completion: Completion = Completion.NOW,
) -> Path:
    """Saves the checkpoint that ``Engine.save_checkpoint`` describes, and returns its folder."""
    session.check_whole()
    check_between_steps(session, "save_checkpoint")
    session.saves.finish()
    options = options or SaveOptions(peers=RankPeers(session.ranks.control))
    with phase(options.peers, f"nothing was saved in {os.fspath(directory)}"):
        state = state_of(session, client_state, lr_scheduler).to_json()
        blocks = described_blocks(session)
        if blocks is not None:
            state[BLOCKS] = blocks
    tag = f"global_step{session.num_steps}" if tag is None else tag
    source = EngineSource(session, stored_params(session), frozen)
    if completion is Completion.LATER:
        return save_later(session, Saving(directory, tag, options), source, state)
    return save(directory, tag, source, state, options)


def state_of(session: Session, client_state: Mapping[str, Any] | None, lr_scheduler: Scheduler | None) -> TrainingState:
    """The state of the session's run, without tensors."""
    return TrainingState(
        num_steps=session.num_steps,
        step_counts={
            name: count
            for param, names in whole_names(session).items()
            if (count := step_count(session, param)) > 0
            for name in names
        },
        groups=_describe_groups(session),
        loss_scaler=dict(session.scaler.state()) if session.scaler is not None else None,
        lr_scheduler=lr_scheduler.state_dict() if lr_scheduler is not None else None,
        extra_states={name: child.get_extra_state() for name, child in with_extra_state(session.module)},
        client_state=dict(client_state or {}),
        optimizer=session.config.optimizer.type.value,
        further_names=further_names(session),
    )


def load_session(
    session: Session,
    directory: str | os.PathLike[str],
    tag: str | None,
    lr_scheduler: Scheduler | None,
    options: LoadOptions | None = None,
) -> tuple[Path, dict[str, Any]]:
    """See ``Engine.load_checkpoint``; ``options``: None for everything."""
    options = options or LoadOptions()
    session.check_open()
    drops_step = session.whole.state is not State.WHOLE or session.gradients.are_committed  # which zero_grad cannot
    if not drops_step:
        check_between_steps(session, "load_checkpoint")
    session.saves.finish()
    peers = RankPeers(session.ranks.control)
    sink = make_sink(session, options.part)
    with contextlib.ExitStack() as held:
        with phase(peers, "no checkpoint was loaded"):
            opened = open_checkpoint(directory, tag, functools.partial(_receiver, session, options.part))
            checkpoint = held.enter_context(opened)
            state = TrainingState.from_json(checkpoint.manifest.state)
            if options.names is Names.COMMON:
                _leave_out_others(checkpoint, sink)
            checkpoint.check(sink, peers.rank, peers.size)
            _check_state(session, checkpoint, state, lr_scheduler, options)
            same_ranks = peers.size == checkpoint.manifest.num_ranks
            rng = checkpoint.rng_states(peers.rank) if same_ranks else {}
        if drops_step:
            give_up_step(session)
        session.whole.break_up(f"load_checkpoint left a mixed state: {checkpoint.path} was loaded in part")
        with phase(peers, f"{checkpoint.path} was loaded in part, and the engine's state is mixed; load another one"):
            own = block_sink(session, options.part, checkpoint.described_blocks)
            if own is None or options.names is Names.COMMON or isinstance(checkpoint, ForeignCheckpoint):
                checkpoint.load(sink)
            else:
                checkpoint.load_as_stored(own)
            sink.set_step_counts(
                {param: state.step_counts.get(names[0], 0) for param, names in whole_names(session).items()}
            )
            _set_state(session, state, options.part)
            if lr_scheduler is not None:
                lr_scheduler.load_state_dict(state.lr_scheduler)
            goes_on = options.part is not Part.MODULE  # a run, and not its weights in another one
            if goes_on and same_ranks:
                set_rng_states(rng, session.device)
        session.whole.mend()
        if goes_on:
            session.run_log.resume()
        if peers.rank == 0:
            said = f"resumed from %s, step {state.num_steps}" if goes_on else "the model's values are those of %s"
            logger.info(said, checkpoint.path)
            if goes_on and (left_out := checkpoint.left_out(peers.size)):
                logger.info("%s: %s", checkpoint.path, left_out)
        if options.part is Part.EVERYTHING:
            _warn_of_frozen(session, checkpoint, state)
    return checkpoint.path, state.client_state


def _receiver(session: Session, part: Part) -> Receiver:
    groups = _describe_groups(session) if part is Part.EVERYTHING else None
    params = frozenset(name for names in whole_names(session).values() for name in names)
    return Receiver(groups=groups, aliases=further_names(session), params=params)


def _leave_out_others(checkpoint: Checkpoint | ForeignCheckpoint, sink: EngineSink) -> None:
    """Drops the values that ``checkpoint`` or ``sink`` lacks from the other; the log names some."""
    stored, wanted = checkpoint.manifest.tensors, {item.key for item in sink.wanted()}
    sink.left_out = {key for key in wanted if key[1] == "value" and key not in stored}
    unwanted = {key for key in stored if key[1] == "value" and key not in wanted}
    tensors = {key: tensor for key, tensor in stored.items() if key not in unwanted}
    checkpoint.manifest = dataclasses.replace(checkpoint.manifest, tensors=tensors)
    for keys, where in ((sink.left_out, "not in it: they stay as they are"), (unwanted, "not in this model")):
        if keys:
            names = sorted(name for name, _ in keys)
            logger.info("%s: %d tensors are %s (%s, ...)", checkpoint.path, len(names), where, ", ".join(names[:3]))


def check_between_steps(session: Session, call: str) -> None:
    """Raises StateError if gradients are pending. Gradients of a failed step do not count."""
    session.check_open()
    has_gradients = session.stage is StepStage.BACKWARDED or session.runtime.gradients_pending()
    if has_gradients and session.whole.state is State.WHOLE:
        raise _C.StateError(
            f"{call} between backward and step: gradients are not part of a checkpoint; call it after "
            "optimizer.step() or optimizer.zero_grad()"
        )


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that keep a state of their own (``get_extra_state``), by name."""
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield without_wrappers(name), child


def _describe_groups(session: Session) -> list[dict[str, Any]]:
    names = whole_names(session)
    return [
        {
            "params": [name for param in group["params"] for name in names[param]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in session.optimizer.read_groups()
    ]


def _check_state(
    session: Session,
    checkpoint: Checkpoint | ForeignCheckpoint,
    state: TrainingState,
    scheduler: Scheduler | None,
    options: LoadOptions,
) -> None:
    """Raises CheckpointError, before anything is written, if the checkpoint cannot be loaded."""
    if options.part is Part.EVERYTHING:
        _check_optimizer(session, checkpoint, state)
    if scheduler is not None and state.lr_scheduler is None:
        raise CheckpointError(f"{checkpoint.path} was saved without lr_scheduler; load it without one")
    if scheduler is not None and isinstance(checkpoint, ForeignCheckpoint):
        others = set(state.lr_scheduler) - set(scheduler.state_dict())
        if others:
            raise CheckpointError(
                f"{checkpoint.path} has a schedule with {', '.join(sorted(map(str, others))[:3])}, which "
                f"{type(scheduler).__name__} lacks; load it without lr_scheduler"
            )
    extra = {name for name, _ in with_extra_state(session.module)}
    if extra != set(state.extra_states) and options.names is Names.SAME:
        raise CheckpointError(f"{checkpoint.path} is of another model: its modules with extra state are others")


def _check_optimizer(session: Session, checkpoint: Checkpoint | ForeignCheckpoint, state: TrainingState) -> None:
    stored, present = [group["params"] for group in state.groups], [g["params"] for g in _describe_groups(session)]
    if list(map(sorted, stored)) != list(map(sorted, present)):
        raise CheckpointError(
            f"{checkpoint.path} has parameter groups of {[len(group) for group in stored]} parameters, or others than "
            f"this engine's of {[len(group) for group in present]}; build the engine with the same model_parameters"
        )
    own = state_kinds(session)
    others = [
        kind for kind in STATE_KINDS if kind not in own and any(r == kind for _, r in checkpoint.manifest.tensors)
    ]
    if others:
        raise CheckpointError(
            f"{checkpoint.path} holds {others[0]} of parameters, {rule_of(session.config.optimizer.type).lacks}; give "
            "optimizer.type as the run that saved it had it, or load the module alone"
        )
    for kind in own:
        if {name for name, role in checkpoint.manifest.tensors if role == kind} != set(state.step_counts):
            raise CheckpointError(f"{checkpoint.path}: its step counts and {kind} are not of the same parameters")
    try:
        for index, group in enumerate(state.groups):
            checked_group(session.config.optimizer.type, group["options"], f"parameter group {index}")
        if session.scaler is not None and state.loss_scaler is not None:
            check_loss_scaler_state(session.config, state.loss_scaler)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}; load another checkpoint") from error


def _warn_of_frozen(session: Session, checkpoint: Checkpoint | ForeignCheckpoint, state: TrainingState) -> None:
    params = [(name, param) for param, names in whole_names(session).items() for name in names]
    left_out = [name for name, param in params if state.step_counts.get(name, 0) > 0 and not has_states(param)]
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
    session.course.end()
    if part is not Part.MODULE:
        session.num_steps = state.num_steps
    if part is Part.EVERYTHING:
        _set_optimizer(session, state)
    for name, child in with_extra_state(session.module):
        if name in state.extra_states:
            child.set_extra_state(state.extra_states[name])


def _set_optimizer(session: Session, state: TrainingState) -> None:
    for group, saved in zip(session.optimizer.read_groups(), state.groups, strict=True):
        group.update({key: value for key, value in saved["options"].items() if key != "params"})
    if session.scaler is not None and state.loss_scaler is not None:
        session.scaler.set_state(**state.loss_scaler)

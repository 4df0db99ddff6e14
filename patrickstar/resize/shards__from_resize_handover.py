"""What a process that joins takes over beside shards: steps, options of groups, loss scale, random numbers, and what is
carried. The leader writes it into a file, without pickle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.checkpoint.plain_state import read_plain_state, write_plain_state
from patrickstar.checkpoint.rng import rng_states, set_rng_states
from patrickstar.elastic.resize_folder import ResizeFolder
from patrickstar.elastic.sampler import OfOneRun
from patrickstar.elastic.transfers import fetch
from patrickstar.engine.resize_plan import Carried
from patrickstar.engine.session import Session
from patrickstar.ranks.private_files import create_private, open_private

STATE_NAME = "state"
"""The name of the leader's file, in its folder and in its ``FileServer``."""


def reached_name(new: int) -> str:
    """The name of the file that a new rank has fetched."""
    return f"{STATE_NAME}-for{new}"


def managed_states(session: Session) -> list[dict[str, Any]]:
    """The optimizer's of each parameter that stays with PyTorch, whole on each rank."""
    return [dict(session.states.optimizer_state(managed.param) or {}) for managed in session.managed.params]


def write_state(session: Session, path: Path, carried: Mapping[str, Carried]) -> None:
    """Writes the leader's file, of mode 0600.

    Raises:
        OSError: it cannot be written.
        CheckpointError: something that is carried has a state of other types than plain values and tensors.
    """
    state = {
        "num_steps": session.num_steps,
        "outcome": dataclasses.asdict(session.outcome),
        "scaler": dict(session.scaler.state()) if session.scaler is not None else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in session.optimizer.read_groups()],
        "managed": managed_states(session),
        "rng": rng_states(session.device),
        "carried": {name: item.state_dict() for name, item in carried.items()},
    }
    with os.fdopen(create_private(path), "wb") as file:
        write_plain_state(file, state, "the state that goes along with a resize")


def reached_state(folder: ResizeFolder, key: bytes, new: int, address: str, timeout_seconds: float) -> dict[str, Any]:
    """The leader's state, from its file where it is in ``folder``, else from its server at ``address``.

    Raises:
        OSError: it is neither there nor to be fetched.
        CheckpointError: it is damaged.
    """
    path = folder.file(STATE_NAME)
    if not path.exists():
        path = folder.file(reached_name(new))
        fetch(address, key, STATE_NAME, path, client=str(new), timeout_seconds=timeout_seconds)
    with os.fdopen(open_private(path), "rb") as file:
        return read_plain_state(file, "the state that goes along with a resize")


def check_state(state: dict[str, Any], carried: Mapping[str, Carried]) -> None:
    """Raises ValueError where something that is carried could not take what others have of it."""
    for name, item in carried.items():
        if isinstance(item, OfOneRun):
            item.check_state(state["carried"][name])


def take_state(session: Session, state: dict[str, Any], carried: Mapping[str, Carried]) -> None:
    """This session goes on from there, but for what stays with PyTorch (:func:`managed_states`)."""
    session.num_steps = state["num_steps"]
    session.outcome = type(session.outcome)(**state["outcome"])
    if session.scaler is not None:
        session.scaler.set_state(**state["scaler"])
    for group, saved in zip(session.optimizer.read_groups(), state["groups"], strict=True):
        group.update(saved)
    for name, item in carried.items():
        item.load_state_dict(state["carried"][name])
    set_rng_states(state["rng"], session.device)

"""Saves that a thread completes while training goes on.

The call copies this rank's shards into free host memory, as many as it has room for, and writes the others. A thread
writes the copies, agrees with the other ranks over a control group of its own, and publishes the checkpoint. Its bytes
are those of a save at the call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar import _C
from patrickstar.checkpoint.snapshot import Snapshot, take_snapshot
from patrickstar.checkpoint.writer import Saving
from patrickstar.session.session import Session
from patrickstar.sizes import show_seconds, show_size
from patrickstar.state.engine_shards import EngineSource
from patrickstar.state.rank_peers import RankPeers

logger = logging.getLogger("patrickstar")

_CALL = "a save in the background"


class _LentMemory:
    """Host memory of an engine, as ``checkpoint.snapshot.Memory``; at most ``most`` bytes in one save."""

    def __init__(self, runtime: _C.Runtime, most: int | None):
        self._runtime = runtime
        self._left = math.inf if most is None else most

    def take(self, num_bytes: int) -> int:
        if num_bytes > self._left:
            return 0
        address = self._runtime.take_host_memory(num_bytes)
        self._left -= num_bytes if address else 0
        return address

    def give_back(self, address: int) -> None:
        self._runtime.give_back_host_memory(address)


def save_later(session: Session, saving: Saving, source: EngineSource, state: Mapping[str, Any]) -> Path:
    """Returns the checkpoint's folder once ``source`` may change; ``session.saves`` completes it."""
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        held.enter_context(saving)
        memory = _LentMemory(session.runtime, session.config.checkpoint.host_memory)
        snapshot = take_snapshot(source, memory, saving.offsets)
        held.callback(snapshot.close)
        saving.write(snapshot.left)
        control = session.saves.control = session.saves.control or session.ranks.open_own_control(_CALL)
        saving.peers = RankPeers(control)
        rest = held.pop_all()
    session.saves.start(f"save of {saving.target.name}", lambda: _complete(saving, snapshot, state, rest))
    copied, left = (sum(shard.num_bytes for shard in shards) for shards in (snapshot.copied, snapshot.left))
    if session.ranks.control.rank == 0:
        logger.info(
            "%s: training goes on after %s (%s copied, %s written); a thread writes the copies",
            saving.target, show_seconds(time.perf_counter() - began), show_size(copied), show_size(left),
        )  # fmt: skip
    return saving.target


def _complete(saving: Saving, snapshot: Snapshot, state: Mapping[str, Any], rest: contextlib.ExitStack) -> None:
    with rest:
        saving.write(snapshot.copied)
        saving.publish(state)

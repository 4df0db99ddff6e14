"""Export of an engine's run in another program's format. All ranks read each tensor, and the first writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.runs import Run, RunFormat, export_run
from patrickstar.session.session import Session
from patrickstar.state.engine_shards import EngineSource
from patrickstar.state.rank_peers import RankPeers
from patrickstar.state.save_load import Scheduler, check_between_steps, state_of
from patrickstar.state.sharded_checkpoints import described_blocks, stored_params


def export_session_run(
    session: Session,
    directory: str | os.PathLike[str],
    form: RunFormat,
    client_state: Mapping[str, Any] | None,
    lr_scheduler: Scheduler | None,
) -> Path:
    """Writes the folder that ``Engine.export_checkpoint`` describes, and returns its path."""
    session.check_whole()
    check_between_steps(session, "export_checkpoint")
    target = Path(directory).absolute()
    with phase(RankPeers(session.ranks.control), f"nothing was exported to {target}"):
        if described_blocks(session) is not None:
            raise CheckpointError(
                "this engine's matrices or experts are divided among ranks; call save_checkpoint, then "
                "patrickstar checkpoint export --format"
            )
        state = state_of(session, client_state, lr_scheduler)
        state.to_json()  # checks the user's values
    shards = [
        shard for shard in EngineSource(session, stored_params(session), whole=True).shards() if shard.kind != "rng"
    ]
    if session.ranks.control.rank == 0:
        try:
            export_run(Run(shards=shards, state=state), target, form)
        except CheckpointError as error:
            error.on_all_ranks = False  # other ranks learn of it from the guard
            raise
    else:
        with _C.HostAllocations():
            for shard in shards:
                shard.read()
    session.ranks.meet()
    return target

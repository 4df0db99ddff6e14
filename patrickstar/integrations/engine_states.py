"""The folder with an engine's states within a folder of the Trainer's or of Accelerate's."""

from __future__ import annotations

import os
from pathlib import Path

from patrickstar.checkpoint import latest_tag
from patrickstar.checkpoint.foreign import find_foreign

CHECKPOINT_FOLDER = "patrickstar"
"""Name of the folder that the engine saves to."""


def engine_states(folder: str | os.PathLike[str]) -> Path | None:
    """The folder that ``engine.load_checkpoint`` takes: PatrickStar's, or ``folder`` itself if it was written with
    DeepSpeed or FSDP. None: there are no such states.
    """
    path = Path(folder) / CHECKPOINT_FOLDER
    if path.is_dir() and latest_tag(path) is not None:
        return path
    foreign = find_foreign(folder)
    return Path(folder) if foreign is not None and foreign.is_readable else None

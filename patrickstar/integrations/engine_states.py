"""The folder with an engine's states within a folder of the Trainer's or of Accelerate's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from patrickstar.checkpoint import CheckpointError, latest_tag
from patrickstar.checkpoint.foreign import find_foreign

CHECKPOINT_FOLDER = "patrickstar"
"""Name of the folder that the engine saves to."""


def engine_states(folder: str | os.PathLike[str]) -> Path | None:
    """The folder that ``engine.load_checkpoint`` takes: PatrickStar's, or ``folder`` itself if it was written with
    DeepSpeed or FSDP. None: there are no such states.

    Raises:
        CheckpointError: the engine's save was interrupted.
    """
    if is_incomplete(folder):
        raise CheckpointError(
            f"{folder} has no optimizer states: its save was interrupted; resume from the checkpoint before it, or "
            f"remove its folder {CHECKPOINT_FOLDER} to begin with new states"
        )
    path = Path(folder) / CHECKPOINT_FOLDER
    if path.is_dir():
        return path
    foreign = find_foreign(folder)
    return Path(folder) if foreign is not None and foreign.is_readable else None


def is_incomplete(folder: str | os.PathLike[str]) -> bool:
    """True if the engine began to save its states into ``folder``, and none of its saves was completed."""
    path = Path(folder) / CHECKPOINT_FOLDER
    return path.is_dir() and latest_tag(path) is None


def last_complete(folders: Iterable[Path]) -> Path | None:
    """The checkpoint of the highest step among the Trainer's folders ``checkpoint-<step>``; None: there is none."""
    steps = {int(match[1]): path for path in folders if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    complete = [steps[step] for step in sorted(steps) if not is_incomplete(steps[step])]
    return complete[-1] if complete else None

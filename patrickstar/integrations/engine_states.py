"""The folder with an engine's states within a folder of the Trainer's or of Accelerate's."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import CheckpointError, latest_tag
from patrickstar.checkpoint.foreign import find_foreign
from patrickstar.engine.engine import Engine
from patrickstar.ranks.failures import first_line

CHECKPOINT_FOLDER = "patrickstar"
"""Name of the folder that the engine saves to."""
_LAST_FILE = "trainer_state.json"  # the Trainer writes it last


def save_states(engine: Engine, folder: str | os.PathLike[str], *, waits: bool) -> None:
    """Saves the engine's states into a folder of the Trainer's or of Accelerate's, after ``engine.wait_for_save``; all
    ranks must call it.

    Training goes on before they are complete, unless the folder has older states, or the first rank ``waits``.

    Raises:
        CheckpointError: they were not saved.
    """
    target = Path(folder) / CHECKPOINT_FOLDER
    waits = waits or target.exists()  # else new files of the host lie beside the engine's old states
    session = engine._session
    with session.guard("saving the engine's states"):
        (first, *_) = session.ranks.control.exchange(b"wait" if waits else b"", "whether a save is waited for")
    engine.save_checkpoint(target, wait=bool(first))


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


def leaves_no_complete(others_incomplete: Sequence[bool], limit: int | None) -> bool:
    """True if a limit on the number of checkpoints leaves none that is complete beside a new one. No save may run.

    Args:
        others_incomplete: for each folder beside the new one, older ones first.
        limit: newest ones that stay, the new one included; None: all.
    """
    if limit is None or not others_incomplete:
        return False
    return all(others_incomplete[max(len(others_incomplete) - limit + 1, 0) :])


def is_incomplete(folder: str | os.PathLike[str]) -> bool:
    """True if the engine began to save its states into ``folder``, and none of its saves was completed."""
    path = Path(folder) / CHECKPOINT_FOLDER
    return path.is_dir() and latest_tag(path) is None


def was_interrupted(folder: Path) -> bool:
    """True if the Trainer's save into its folder ``checkpoint-<step>`` was not completed."""
    return not (folder / _LAST_FILE).is_file() or is_incomplete(folder)


def last_complete(folders: Iterable[Path]) -> Path | None:
    """The checkpoint of the highest step among the Trainer's folders ``checkpoint-<step>``; None: there is none."""
    complete = [path for path in by_step(folders) if not was_interrupted(path)]
    return complete[-1] if complete else None


def by_step(folders: Iterable[Path]) -> list[Path]:
    """The Trainer's folders ``checkpoint-<step>``, older ones first."""
    steps = {int(match[1]): path for path in folders if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    return [steps[step] for step in sorted(steps)]


def read_optimizer_state(path: Path) -> Any:
    """Memory-maps an optimizer's state dict, without a copy.

    Raises:
        ValueError: the file is damaged, or holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({first_line(error)}): it is damaged, or was not written by a Trainer; resume from "
            "another checkpoint, or remove it to begin with a new optimizer"
        ) from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

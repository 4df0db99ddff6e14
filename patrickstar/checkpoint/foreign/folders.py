"""Recognises the checkpoint in a folder by its files."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.folder import LATEST, MAX_LATEST_BYTES, check_tag, read_small_file
from patrickstar.checkpoint.foreign.content import Content, ForeignCheckpoint, Receiver
from patrickstar.checkpoint.foreign.dcp import is_dcp, read_dcp
from patrickstar.checkpoint.foreign.deepspeed_universal import is_universal, read_universal
from patrickstar.checkpoint.foreign.deepspeed_zero import read_zero
from patrickstar.checkpoint.foreign.first_patrickstar import is_first_patrickstar, read_first_patrickstar
from patrickstar.checkpoint.manifest import MANIFEST_NAME
from patrickstar.checkpoint.reader import Checkpoint

_LATEST_FILES = (LATEST, "latest_universal")
_UNREADABLE = {
    "*model_states.pt": "a DeepSpeed checkpoint without files *_optim_states.pt: copy those too, or convert it with "
    "DeepSpeed's zero_to_fp32.py and load its weights in model_func",
    "pytorch_model_fsdp.bin": "FSDP's weights in one file (FULL_STATE_DICT): load them in model_func, or save with "
    "fsdp_state_dict_type: SHARDED_STATE_DICT",
    "optimizer.pt": "a folder of Hugging Face's Trainer: resume it with PatrickStarTrainer and resume_from_checkpoint",
}
"""Files of checkpoints that are recognised and not read, with the remedy."""


@dataclasses.dataclass(frozen=True)
class ForeignFolder:
    """A folder that another program wrote."""

    path: Path
    read: Callable[[Path, Receiver | None], Content]
    is_readable: bool = True
    """False: it is recognised, and :meth:`open` says what to do instead."""

    def open(self, receiver: Receiver | None = None) -> ForeignCheckpoint:
        """Reads all but the tensors' values. Raises CheckpointError."""
        try:
            return ForeignCheckpoint(self.read(self.path, receiver), receiver)
        except CheckpointError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} is of an unknown form ({type(error).__name__}: {error}); load another checkpoint"
            ) from error


def find_foreign(directory: str | os.PathLike[str], tag: str | None = None) -> ForeignFolder | None:
    """The other program's checkpoint of a tag, the latest, or ``directory`` itself; None: PatrickStar's, or none."""
    root = Path(directory)
    folders = [root, *_latest(root)] if tag is None else [root / check_tag(tag)]
    if any((folder / MANIFEST_NAME).is_file() for folder in folders):
        return None
    for folder in folders:
        reader = _reader(folder)
        if reader is not None:
            return ForeignFolder(folder, reader)
    for folder in folders:
        for pattern, remedy in _UNREADABLE.items():
            if any(folder.glob(pattern)):
                return ForeignFolder(folder, functools.partial(_refuse, remedy), is_readable=False)
    return None


def open_checkpoint(
    directory: str | os.PathLike[str], tag: str | None = None, receiver: Callable[[], Receiver] | None = None
) -> Checkpoint | ForeignCheckpoint:
    """Opens PatrickStar's or another program's checkpoint, of a tag or the latest.

    Args:
        directory: the folder that the checkpoint was saved to, or the checkpoint's own.
        tag: None: the latest.
        receiver: describes the model that is loaded; None: no model.

    Raises:
        CheckpointError: there is none, or it is damaged or cannot be read.
    """
    foreign = find_foreign(directory, tag)
    if foreign is None:
        return Checkpoint.find(directory, tag)
    return foreign.open(None if receiver is None else receiver())


def _latest(root: Path) -> list[Path]:
    """The folders that files ``latest`` name."""
    found = []
    for name in _LATEST_FILES:
        try:
            lines = read_small_file(root / name, MAX_LATEST_BYTES).decode().splitlines()
            found.append(root / check_tag(lines[0] if lines else ""))
        except (OSError, UnicodeDecodeError, CheckpointError):
            continue  # PatrickStar's own search says what is wrong
    return found


def _reader(folder: Path) -> Callable[[Path, Receiver | None], Content] | None:
    if is_first_patrickstar(folder):
        return read_first_patrickstar
    named: Callable[[Path], Content] | None = read_dcp if is_dcp(folder) else None
    if any(folder.glob("*_optim_states.pt")):
        named = read_zero
    if is_universal(folder):
        named = read_universal
    return None if named is None else lambda path, _: named(path)


def _refuse(remedy: str, path: Path, _: Receiver | None) -> Content:
    raise CheckpointError(f"{path} is {remedy}")

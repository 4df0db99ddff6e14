"""Checkpoints as folders: the engine's own, written by all ranks without a copy in memory, and Lightning's other state.

    last.ckpt/latest                  "global_step100": names the complete checkpoint
    last.ckpt/global_step100/         parameters, Adam states, buffers, random numbers (docs/checkpoints.md)
    last.ckpt/global_step100.loops    Lightning's own dict: loops, schedulers, callbacks, hyperparameters

The dict is written first and ``latest`` is replaced last. So after any interruption ``latest`` names a complete
checkpoint, the old or the new one. A thread of the engine writes its checkpoint while training goes on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint import Checkpoint, CheckpointError, TensorRange, latest_tag, tags
from patrickstar.checkpoint.folder import remove_checkpoint
from patrickstar.engine.engine import Engine
from patrickstar.module.compiled.dynamo import without_wrappers

_KEY = "patrickstar_checkpoint"
_VALUES = ("master", "frozen", "managed", "buffer")


class Folders:
    """Saves the folders of one run, beside training. A folder that another replaces stays until that is complete."""

    def __init__(self) -> None:
        self._newest: tuple[Path, str] | None = None
        """Folder and tag of the last save."""
        self._replaced: list[Callable[[], object]] = []
        """Removals that wait for it, on the first rank."""

    def save(
        self,
        engine: Engine,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        write: Callable[[dict[str, Any], Path], None] | None,
    ) -> None:
        """Saves a checkpoint folder; all ranks must call it. ``write`` saves Lightning's dict as a file; it is given on
        the first rank, and None on the others. Those wait in the engine for the first rank, whose failure ends their
        wait.

        Raises:
            CheckpointError: it was not saved, or the one before failed; or ``path`` is a file or a remote address.
        """
        if "://" in os.fspath(path):
            raise CheckpointError(
                f"{path} is a remote address, and folders are written to local or shared file systems; give a path, or "
                'PatrickStarStrategy(checkpoint_format="file")'
            )
        self.finish(engine)
        path = Path(path)
        tag = f"global_step{checkpoint['global_step']}"
        if write is not None:
            if path.is_file():
                raise CheckpointError(f"{path} is a file, and a folder is to be written there; give another path")
            path.mkdir(parents=True, exist_ok=True)
            write({**checkpoint, _KEY: tag}, _loops(path, tag))
        engine.save_checkpoint(path, tag, wait=False)
        self._newest = path, tag
        if write is not None:
            self._replaced += [functools.partial(_remove, path, old) for old in tags(path) if old != tag]

    def remove(self, removal: Callable[[], object]) -> None:
        """Does ``removal`` of an older checkpoint, on the first rank, once the last save is complete."""
        if self._is_complete():
            removal()
        else:
            self._replaced.append(removal)

    def finish(self, engine: Engine) -> None:
        """Waits for the last save. Removes what it replaced; if it failed, that stays.

        Raises:
            CheckpointError: it failed.
        """
        replaced, self._replaced = self._replaced, []
        engine.wait_for_save()
        if self._is_complete():
            for removal in replaced:
                removal()

    def _is_complete(self) -> bool:
        return self._newest is None or latest_tag(self._newest[0]) == self._newest[1]


def _remove(path: Path, tag: str) -> None:
    remove_checkpoint(path / tag)
    _loops(path, tag).unlink(missing_ok=True)


def find_loops(path: str | os.PathLike[str]) -> Path | None:
    """The file of Lightning's dict in a folder; None if ``path`` is no folder.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    if not Path(path).is_dir():
        return None
    tag = latest_tag(path)
    if tag is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; give another")
    return _loops(Path(path), tag)


def _loops(path: Path, tag: str) -> Path:
    return path / f"{tag}.loops"


def tag_of(checkpoint: Any) -> str | None:
    """The tag of the engine's checkpoint that belongs to a dict of Lightning's; None if it was saved as a file."""
    return checkpoint.get(_KEY)


def load_values(module: nn.Module, path: Path, tag: str) -> None:
    """Loads parameters and buffers into a module that is not trained.

    Raises:
        CheckpointError: one is missing, damaged, or has another shape.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    persistent = set(module.state_dict(keep_vars=True))
    with Checkpoint.find(path, tag) as checkpoint, torch.no_grad():
        for name, tensor in tensors.items():
            if name not in persistent:
                continue
            saved_name = without_wrappers(name)
            stored = next(filter(None, (checkpoint.tensor(saved_name, kind) for kind in _VALUES)), None)
            if stored is None or tuple(stored.shape) != tuple(tensor.shape):
                what = "missing" if stored is None else f"of shape {tuple(stored.shape)}"
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)}, and is {what} in {path}; load it into the module that "
                    "was saved"
                )
            whole = TensorRange(
                name=saved_name,
                kind="master",
                shape=tuple(stored.shape),
                dtype=stored.dtype,
                begin=0,
                end=stored.numel,
            )
            tensor.copy_(checkpoint.read(stored, whole).view(tensor.shape))

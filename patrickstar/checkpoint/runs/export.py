"""Exports runs: an engine's, or a checkpoint's without a model or an engine."""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
from pathlib import Path

from patrickstar import _C
from patrickstar.checkpoint.disk import Disk, replace_file
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.export import check_free
from patrickstar.checkpoint.folder import NewFolder
from patrickstar.checkpoint.foreign import ForeignCheckpoint
from patrickstar.checkpoint.reader import Checkpoint
from patrickstar.checkpoint.runs.run import Run
from patrickstar.checkpoint.runs.universal import write_universal
from patrickstar.checkpoint.stored_source import StoredSource
from patrickstar.checkpoint.training_state import TrainingState
from patrickstar.checkpoint.writer import begin


class RunFormat(enum.Enum):
    """Formats of other programs that hold a run."""

    DCP = "dcp"
    """torch.distributed.checkpoint's, with torchtitan's keys."""
    UNIVERSAL = "universal"
    """DeepSpeed's universal checkpoint."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"a run's format is {value!r}; give one of {', '.join(form.value for form in cls)}")


def export_run(run: Run, directory: str | os.PathLike[str], form: RunFormat, disk: Disk | None = None) -> Path:
    """Writes a run into a new folder, and returns it. The folder appears when it is complete.

    Args:
        run: read a tensor at a time.
        directory: absent or empty. For :attr:`RunFormat.UNIVERSAL` the file ``latest_universal`` beside it will name
            it.
        form: the format.
        disk: None: the file system.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, or the format cannot hold the run.
    """
    disk = disk or Disk()
    target = Path(directory).absolute()
    check_free(target)
    run.check()
    folder = NewFolder(disk, target, secrets.token_hex(4))
    with contextlib.ExitStack() as held:
        held.callback(folder.discard)
        try:
            begin(folder, target, held)
            with _C.HostAllocations():
                if form is RunFormat.DCP:
                    from patrickstar.checkpoint.runs.dcp import write_dcp  # takes a second to import

                    write_dcp(run, folder.path)
                else:
                    write_universal(run, folder.path, disk)
            folder.publish()
            folder.make_name_durable()
            if form is RunFormat.UNIVERSAL:
                name = target.parent / "latest_universal"
                replace_file(disk, name, target.name.encode(), name.with_name(f".{name.name}-{secrets.token_hex(4)}"))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"nothing was exported to {target}: {error}") from error
    return target


def export_stored_run(
    checkpoint: Checkpoint | ForeignCheckpoint, directory: str | os.PathLike[str], form: RunFormat
) -> Path:
    """:func:`export_run` of a checkpoint's run, without a model or an engine."""
    shards = [shard for shard in StoredSource(checkpoint).shards() if shard.kind != "rng"]
    run = Run(shards=shards, state=TrainingState.from_json(checkpoint.manifest.state))
    return export_run(run, directory, form)

"""A checkpoint as a source of whole tensors, for single-rank checkpoints and for exported weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.export import DEFAULT_MAX_FILE_BYTES, ExportOptions, export
from patrickstar.checkpoint.foreign import ForeignCheckpoint
from patrickstar.checkpoint.manifest import StoredTensor
from patrickstar.checkpoint.reader import Checkpoint
from patrickstar.checkpoint.shards import STATE_KINDS, TensorRange, TensorShard
from patrickstar.checkpoint.writer import Latest, SaveOptions, save


class StoredSource:
    """A checkpoint's tensors, as one rank would hold all of them. Memory: one tensor."""

    def __init__(self, checkpoint: Checkpoint | ForeignCheckpoint):
        self._checkpoint = checkpoint

    def shards(self) -> Iterator[TensorShard]:
        """Parameters, their states, buffers, and the random number generators of the first rank."""
        for stored in self._checkpoint.manifest.tensors.values():
            if stored.kind != "rng" or stored.name.startswith("rank0."):
                yield self._whole(stored)

    def values(self) -> Iterator[TensorShard]:
        """Parameters and buffers only."""
        yield from (shard for shard in self.shards() if shard.kind != "rng" and shard.kind not in STATE_KINDS)

    def _whole(self, stored: StoredTensor) -> TensorShard:
        fields = {"name": stored.name, "kind": stored.kind, "shape": stored.shape, "dtype": stored.dtype}
        wanted = TensorRange(**fields, begin=0, end=stored.numel)  # type: ignore[arg-type]
        return TensorShard(**vars(wanted), read=functools.partial(self._checkpoint.read, stored, wanted))


def merge(checkpoint: Checkpoint | ForeignCheckpoint, target: str | os.PathLike[str]) -> Path:
    """Rewrites a checkpoint as one rank would have saved it, with whole tensors that any safetensors reader can read.
    Returns its folder.

    Args:
        checkpoint: saved by any number of ranks.
        target: the folder of the new checkpoint; must not exist.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder exists or cannot be written.
    """
    path = Path(target).absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists; give the name of a new folder")
    options = SaveOptions(latest=Latest.AS_BEFORE)
    return save(path.parent, path.name, StoredSource(checkpoint), checkpoint.manifest.state, options)


def export_checkpoint(
    checkpoint: Checkpoint | ForeignCheckpoint,
    target: str | os.PathLike[str],
    dtype: torch.dtype | None = torch.float32,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    texts: Mapping[str, str] | None = None,
    form: Callable[[list[TensorShard]], list[TensorShard]] = list,
) -> Path:
    """Writes the weights in Hugging Face's format, without a model or an engine, and returns the folder.

    Args:
        checkpoint: saved by any number of ranks.
        target: absent, or an empty folder.
        dtype: dtype of floating point parameters; None: the stored one.
        max_file_bytes: limit of one file's tensors.
        texts: more files by name, such as a ``config.json``, which no checkpoint holds.
        form: makes the files' tensors from the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder cannot be written.
    """
    options = ExportOptions(dtype=dtype, max_file_bytes=max_file_bytes, texts=texts or {})
    return export(target, form(list(StoredSource(checkpoint).values())), options)

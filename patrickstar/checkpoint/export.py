"""Exports weights in Hugging Face's format: ``model-00001-of-0000N.safetensors`` with whole tensors, and an index.

There is no all-gather: each tensor's position in its file is known in advance, and each rank writes the ranges that it
holds. Memory, besides the source's: one shard, and its copy in the file's dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.disk import Disk, created, opened, write_all
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.folder import NewFolder
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.checkpoint.peers import OneRank, Peers, phase
from patrickstar.checkpoint.safetensors_format import DTYPES, FileTensor, dtype_name, make_header, split_into_files
from patrickstar.checkpoint.shards import TensorShard, is_row_major
from patrickstar.checkpoint.writer import begin

INDEX_NAME = "model.safetensors.index.json"
DEFAULT_MAX_FILE_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of :func:`export`: dtype, file sizes, names and further files."""

    dtype: torch.dtype | None = torch.float32
    """Dtype of floating point parameters; None: each keeps its own."""
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    """Limit of one file's tensors; a larger tensor gets a file of its own."""
    rename: Callable[[str], str] = str
    """Maps a parameter's name to its name in the files."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """More files, by name, such as a ``config.json``."""
    peers: Peers = dataclasses.field(default_factory=OneRank)
    """The ranks that export together, on one file system."""
    disk: Disk = dataclasses.field(default_factory=Disk)
    """The file system calls; tests replace them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Position of a whole tensor."""

    file: str
    offset: int
    dtype: torch.dtype


def export(
    directory: str | os.PathLike[str], shards: Sequence[TensorShard], options: ExportOptions | None = None
) -> Path:
    """Writes the values of all ranks' shards into a new folder, and returns it. All ranks must call it.

    Args:
        directory: absent or empty; it appears when it is complete.
        shards: this rank's values and buffers.
        options: None for the defaults.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write, or the shards do not cover whole tensors.
    """
    options = options or ExportOptions()
    peers, disk = options.peers, options.disk
    target = Path(directory).absolute()
    what = f"nothing was exported to {target}"
    is_first = peers.rank == 0
    with contextlib.ExitStack() as held:
        with phase(peers, what) as turn:
            if is_first:
                check_free(target)
            turn.say = {"token": secrets.token_hex(4), "shards": [_describe(shard, options) for shard in shards]}
        folder = NewFolder(disk, target, turn.heard[0]["token"])
        try:
            with phase(peers, what):
                files = _plan([record for said in turn.heard for record in said["shards"]], options.max_file_bytes)
                if is_first:
                    begin(folder, target, held)
                    _write_frame(disk, folder.path, files, options.texts)
            with phase(peers, what):
                _write_values(disk, folder.path, shards, _places(files), options)
            with phase(peers, what):
                if is_first:
                    folder.publish()
            with phase(peers, f"{target} is complete, but may not outlast a power cut"):
                if is_first:
                    folder.make_name_durable()
        finally:
            if is_first:
                folder.discard()
    return target


def check_free(target: Path) -> None:
    """Raises CheckpointError unless the folder is absent or empty."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no empty folder; export to a new one")


def _describe(shard: TensorShard, options: ExportOptions) -> dict[str, Any]:
    dtype = file_dtype(shard, options.dtype)
    return {
        "name": options.rename(shard.name),
        "shape": list(shard.shape),
        "dtype": dtype_name(dtype, str(shard)),
        "begin": shard.begin,
        "end": shard.end,
    }


def file_dtype(shard: TensorShard, dtype: torch.dtype | None) -> torch.dtype:
    """A shard's dtype in a file, if :attr:`ExportOptions.dtype` is ``dtype``."""
    keeps = dtype is None or shard.kind == "buffer" or not shard.dtype.is_floating_point
    return shard.dtype if keeps else dtype


def _plan(records: Iterable[Mapping[str, Any]], max_file_bytes: int) -> dict[str, list[FileTensor]]:
    """Tensors by file; equal on every rank."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        parts.setdefault(record["name"], []).append(record)
    tensors = [_whole(name, found) for name, found in parts.items()]
    members = split_into_files([tensor.num_bytes for tensor in tensors], max_file_bytes)
    names = [f"model-{index + 1:05d}-of-{len(members):05d}.safetensors" for index in range(len(members))]
    if len(members) == 1:
        names = ["model.safetensors"]
    return {name: [tensors[index] for index in indices] for name, indices in zip(names, members, strict=True)}


def _whole(name: str, parts: Sequence[Mapping[str, Any]]) -> FileTensor:
    shape, dtype = parts[0]["shape"], parts[0]["dtype"]
    end = 0
    for part in sorted(parts, key=lambda part: (part["begin"], part["end"])):
        if (part["shape"], part["dtype"]) != (shape, dtype) or part["begin"] != end:
            raise CheckpointError(f"{name}: element {min(end, part['begin'])} is in no shard, or in two that disagree")
        end = part["end"]
    if end != math.prod(shape):
        raise CheckpointError(f"{name}: {end} of its {math.prod(shape)} elements are in shards")
    return FileTensor(key=name, dtype=DTYPES[dtype], shape=tuple(shape), num_bytes=end * DTYPES[dtype].itemsize)


def _places(files: Mapping[str, Sequence[FileTensor]]) -> dict[str, _Place]:
    places = {}
    for file, tensors in files.items():
        offset = len(make_header(tensors))
        for tensor in tensors:
            places[tensor.key] = _Place(file=file, offset=offset, dtype=tensor.dtype)
            offset += tensor.num_bytes
    return places


def _write_frame(disk: Disk, folder: Path, files: Mapping[str, Sequence[FileTensor]], texts: Mapping[str, str]) -> None:
    """Writes headers, the index and further files."""
    for file, tensors in files.items():
        with created(disk, folder / file) as fd:
            write_all(disk, fd, memoryview(make_header(tensors)))
    if len(files) > 1:
        total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
        weight_map = {tensor.key: file for file, tensors in files.items() for tensor in tensors}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        texts = {**texts, INDEX_NAME: index}
    for name, text in texts.items():
        with created(disk, folder / name) as fd:
            write_all(disk, fd, memoryview(text.encode()))


def _write_values(
    disk: Disk, folder: Path, shards: Sequence[TensorShard], places: Mapping[str, _Place], options: ExportOptions
) -> None:
    by_file: dict[str, list[TensorShard]] = {}
    for shard in shards:
        by_file.setdefault(places[options.rename(shard.name)].file, []).append(shard)
    for file, members in by_file.items():
        with opened(disk, folder / file) as fd:
            for shard in members:
                place = places[options.rename(shard.name)]
                with _C.HostAllocations():
                    values = shard.read().to(place.dtype)
                    for start, piece in _row_major_runs(shard, values):
                        write_all(disk, fd, bytes_of(piece), place.offset + start * place.dtype.itemsize)


def _row_major_runs(shard: TensorShard, values: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """A shard's values as contiguous runs of the row-major tensor, each with the index of its first element."""
    if is_row_major(shard.shape, shard.order):
        return [(shard.begin, values)]
    order = shard.order or ()
    coordinates = torch.unravel_index(
        torch.arange(shard.begin, shard.end, device="cpu"), [shard.shape[dim] for dim in order]
    )
    positions = torch.zeros(shard.numel, dtype=torch.int64, device="cpu")
    for dim, coordinate in zip(order, coordinates, strict=True):
        positions += coordinate * math.prod(shard.shape[dim + 1 :])
    positions, source = positions.sort()
    values = values[source]
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), shard.numel]
    return [(int(positions[a]), values[a:b]) for a, b in zip(edges, edges[1:], strict=False) if b > a]

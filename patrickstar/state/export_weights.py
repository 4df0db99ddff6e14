"""Export of an engine's weights, as a Hugging Face folder or in buckets: names and forms as its files have them."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.export import ExportOptions, check_free, export, file_dtype
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.shards import TensorShard
from patrickstar.module.chunked_parameter import whole_shape
from patrickstar.module.compiled.dynamo import unwrapped, without_wrappers
from patrickstar.module.observed_buffers import persistent_buffers
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.session import Session
from patrickstar.sizes import parse_size
from patrickstar.state.engine_shards import EngineSource, buffer_shards, named_params
from patrickstar.state.file_tensors import FileTensors
from patrickstar.state.rank_peers import RankPeers
from patrickstar.state.whole_values import whole_shards

Bucket = list[tuple[str, torch.Tensor]]
"""Tensors of a model by their names in files."""


def export_session(
    session: Session, directory: str | os.PathLike[str], dtype: torch.dtype | None, max_file_bytes: int
) -> Path:
    """Writes the folder that ``Engine.export_weights`` describes, and returns its path."""
    session.check_whole()
    target = Path(directory).absolute()
    options = ExportOptions(dtype=dtype, max_file_bytes=max_file_bytes, texts=_config_text(session.module, dtype))
    if session.matrices.names is not None:
        shards = whole_shards(session)
        tensors = FileTensors(session.module, {shard.name: shard.shape for shard in shards})
        return _export_whole(session, target, tensors, shards, options)
    params, tensors = _params_and_tensors(session)
    shards = list(EngineSource(session, params.items(), whole=tensors.converts).values())
    if tensors.converts:
        return _export_whole(session, target, tensors, shards, options)
    kept = tensors.names
    options = dataclasses.replace(options, rename=kept.__getitem__, peers=RankPeers(session.ranks.control))
    return export(target, [shard for shard in shards if shard.name in kept], options)


def send_session(
    session: Session,
    receive: Callable[[Bucket], object],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    bucket_bytes: int | str,
) -> None:
    """Passes the weights to ``receive`` as ``Engine.export_to`` describes."""
    most = parse_size(bucket_bytes) if isinstance(bucket_bytes, str) else bucket_bytes
    if most is None or most < 1:
        raise ValueError(f'export_to: bucket_bytes is {bucket_bytes!r}; give bytes, or a size such as "1GiB"')
    with deferred_signals() as signals, session.guard("export_to"), signals.allowed():
        session.ranks.meet()
        session.check_whole()
        made_in = session.config.compute_dtype if dtype is None else dtype
        target = session.device if device is None else torch.device(device)
        _send(_whole_tensors(session, made_in), receive, made_in, target, most)


def _whole_tensors(session: Session, dtype: torch.dtype) -> list[TensorShard]:
    """All tensors of files, whole on each rank; ranks read them together."""
    if session.matrices.names is not None:
        shards = whole_shards(session)
        return FileTensors(session.module, {shard.name: shard.shape for shard in shards}).made_of(shards, dtype)
    params, tensors = _params_and_tensors(session)
    values = EngineSource(session, params.items(), whole=True).values()
    shards = [shard for shard in values if shard.kind != "buffer"]
    return tensors.made_of([*shards, *buffer_shards(session)], dtype)


def _send(
    shards: list[TensorShard],
    receive: Callable[[Bucket], object],
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int,
) -> None:
    bucket: Bucket = []
    num_bytes = 0
    for shard in shards:
        tensor = shard.read().to(device, file_dtype(shard, dtype), copy=True).view(shard.shape)
        if bucket and num_bytes + tensor.nbytes > bucket_bytes:
            receive(bucket)
            bucket, num_bytes = [], 0
        bucket.append((shard.name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        receive(bucket)


def _params_and_tensors(session: Session) -> tuple[dict[str, nn.Parameter], FileTensors]:
    """Parameters by their names in files, and the tensors of files."""
    names = _export_names(session.module)
    params = {names.get(name, name): param for name, param in named_params(session.module)}
    shapes = {name: whole_shape(param) for name, param in params.items()}
    shapes |= {name: buffer.shape for name, buffer in persistent_buffers(session.module)}
    return params, FileTensors(session.module, shapes)


def _export_whole(
    session: Session, target: Path, tensors: FileTensors, shards: list[TensorShard], options: ExportOptions
) -> Path:
    """Exports converted tensors: all ranks assemble each full parameter, and the first rank writes them."""
    with phase(RankPeers(session.ranks.control), f"nothing was exported to {target}"):
        check_free(target)
    if session.ranks.control.rank > 0:
        tensors.read_all(shards)
        return target
    try:
        return export(target, tensors.made_of(shards, options.dtype), options)
    except CheckpointError as error:
        error.on_all_ranks = False  # other ranks learn of it from the guard
        raise


def _export_names(module: nn.Module) -> dict[str, str]:
    """Maps a tied parameter's first name to the name that Hugging Face keeps: one outside of ``_tied_weights_keys``."""
    tied = getattr(module, "_tied_weights_keys", None) or ()
    patterns = [re.compile(pattern) for pattern in tied]
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(without_wrappers(name))
    return {
        found[0]: next((name for name in found if not any(pattern.search(name) for pattern in patterns)), found[0])
        for found in aliases.values()
        if len(found) > 1
    }


def _config_text(module: nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    """``config.json`` of a Hugging Face model, as its ``save_pretrained`` writes it."""
    config = getattr(module, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [type(unwrapped(module)).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    return {"config.json": config.to_json_string(use_diff=True)}

"""Export of an engine's weights as a Hugging Face folder: names and forms of its files, and the configuration."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from pathlib import Path

import torch
from torch import nn

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.export import ExportOptions, check_free, export
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.shards import TensorShard
from patrickstar.module.compiled.dynamo import unwrapped, without_wrappers
from patrickstar.session.own_params import check_shared
from patrickstar.session.session import Session
from patrickstar.state.engine_shards import EngineSource, named_params, persistent_buffers
from patrickstar.state.file_tensors import FileTensors
from patrickstar.state.save_load import RankPeers
from patrickstar.state.whole_values import whole_shards


def export_session(
    session: Session, directory: str | os.PathLike[str], dtype: torch.dtype | None, max_file_bytes: int
) -> Path:
    """Writes the folder that ``Engine.export_weights`` describes, and returns its path."""
    session.check_whole()
    check_shared(session, "export_weights")
    target = Path(directory).absolute()
    options = ExportOptions(dtype=dtype, max_file_bytes=max_file_bytes, texts=_config_text(session.module, dtype))
    if session.matrices.names is not None:
        shards = whole_shards(session)
        tensors = FileTensors(session.module, {shard.name: shard.shape for shard in shards})
        return _export_whole(session, target, tensors, shards, options)
    names = _export_names(session.module)
    params = {names.get(name, name): param for name, param in named_params(session.module)}
    held = [*params.items(), *persistent_buffers(session.module)]
    tensors = FileTensors(session.module, {name: tensor.shape for name, tensor in held})
    shards = list(EngineSource(session, params.items(), whole=tensors.converts).values())
    if tensors.converts:
        return _export_whole(session, target, tensors, shards, options)
    kept = tensors.names
    options = dataclasses.replace(options, rename=kept.__getitem__, peers=RankPeers(session))
    return export(target, [shard for shard in shards if shard.name in kept], options)


def _export_whole(
    session: Session, target: Path, tensors: FileTensors, shards: list[TensorShard], options: ExportOptions
) -> Path:
    """Exports converted tensors: all ranks assemble each full parameter, and the first rank writes them."""
    with phase(RankPeers(session), f"nothing was exported to {target}"):
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

"""DeepSpeed's universal checkpoints, which ``ds_to_universal.py`` writes.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     whole tensors
    zero/<parameter>/step.pt                                the number of updates, if ZeRO-1 or ZeRO-2 was converted
    zero/optimizer_state.pt                                 parameter groups
    *_model_states.pt                                       copied from the checkpoint that was converted

A tensor's file has a dict with the tensor as ``param``, or of ZeRO-3 the flat tensor itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.content import Content, mapping_in, tensor_in
from patrickstar.checkpoint.foreign.deepspeed_model import ModelStates
from patrickstar.checkpoint.foreign.deepspeed_zero import add_groups
from patrickstar.checkpoint.foreign.safe_files import load_file
from patrickstar.checkpoint.shards import STATE_KINDS

_FOLDER, _OPTIMIZER = "zero", "optimizer_state.pt"


def is_universal(folder: Path) -> bool:
    """True if the folder has the files of a universal checkpoint."""
    return (folder / _FOLDER / _OPTIMIZER).is_file() or any((folder / _FOLDER).glob("*/fp32.pt"))


def read_universal(folder: Path) -> Content:
    """Reads a universal checkpoint.

    Raises:
        CheckpointError: a file is missing, damaged, or of another layout.
    """
    content = Content(path=folder, origin="a DeepSpeed universal checkpoint")
    model = ModelStates(folder)
    path = folder / _FOLDER / _OPTIMIZER
    optimizer = mapping_in(load_file(path), str(path))
    for shapes in model.param_shapes:
        for name, shape in shapes.items():
            _add(content, name, shape, functools.partial(_common_step, optimizer, path))
    groups = optimizer.get("param_groups") or []
    add_groups(content, groups if isinstance(groups, (list, tuple)) else [], model.param_shapes, path)
    model.add_to(content)
    content.not_taken.append("the loss scale")
    return content


def _add(content: Content, name: str, shape: tuple[int, ...], common_step: Any) -> None:
    folder = _folder_of(content.path, name)
    for kind, file in (("master", "fp32.pt"), *((kind, f"{kind}.pt") for kind in STATE_KINDS)):
        path = folder / file
        if kind != "master" and not path.exists():
            continue
        tensor = _tensor(path)
        if tensor.numel() != math.prod(shape):
            raise CheckpointError(
                f"{path}: {kind} of {name} has {tensor.numel()} elements, its shape {list(shape)} has "
                f"{math.prod(shape)}; load another checkpoint"
            )
        content.add(name, kind, shape, tensor.dtype, functools.partial(_read, path, shape))
    if any((name, kind) in content.tensors for kind in STATE_KINDS):
        path = folder / "step.pt"
        content.count(name, load_file(path) if path.exists() else common_step(), path)


def _folder_of(folder: Path, name: str) -> Path:
    """The folder of a parameter. Raises CheckpointError if its name would lead elsewhere."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{folder}: {name[:200]!r} names no parameter; do not use the checkpoint")
    return folder / _FOLDER / name


def _tensor(path: Path) -> torch.Tensor:
    value = load_file(path)
    return tensor_in(value.get("param") if isinstance(value, Mapping) else value, str(path))


def _read(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    return _tensor(path).view(shape)


def _common_step(optimizer: Mapping[str, Any], path: Path) -> Any:
    """The step of all parameters, where ZeRO-3 was converted. Raises CheckpointError."""
    base = mapping_in(optimizer.get("optimizer_state_dict"), f"{path}: optimizer_state_dict")
    states = mapping_in(base.get("state"), f"{path}: state")
    steps = [state["step"] for state in states.values() if isinstance(state, Mapping) and "step" in state]
    groups = optimizer.get("param_groups")
    steps += [group.get("step") for group in groups if isinstance(group, Mapping)] if groups else []
    if not steps:
        raise CheckpointError(f"{path} has no number of updates; convert the checkpoint again")
    return steps[0]

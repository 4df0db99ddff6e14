"""The first PatrickStar's files: ``model-<rank>.pt`` and ``optimizer-<rank>.pt``, its ranks' state dicts.

    model-<rank>.pt       float32 values of the parameters in this rank's chunks; parameters that stay with PyTorch, and
                          buffers, on every rank
    optimizer-<rank>.pt   states by the parameter's index: exp_avg and exp_avg_sq of those in model-<rank>.pt alone

Indices count all parameters of the model, also empty ones that the engine added, and no file names them. A rank's
states are in the order of its parameters, and so of their names; the model tells parameters from buffers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.content import Content, Receiver, list_in, mapping_in, tensor_in
from patrickstar.checkpoint.foreign.safe_files import load_file

_KINDS = ("exp_avg", "exp_avg_sq")


def is_first_patrickstar(folder: Path) -> bool:
    """True if the folder has the files of the first rank."""
    return (folder / "model-0.pt").is_file() and (folder / "optimizer-0.pt").is_file()


def read_first_patrickstar(folder: Path, receiver: Receiver | None) -> Content:
    """Reads a folder. Without ``receiver`` states are left out where buffers may be taken for parameters.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    ranks = _ranks(folder)
    content = Content(path=folder, origin=f"a checkpoint of the first PatrickStar, of {ranks} ranks")
    content.not_taken.append("the loss scale")
    names: list[str] = []
    groups: Sequence[Any] = []
    for rank in range(ranks):
        values = _add_values(content, folder / f"model-{rank}.pt")
        path = folder / f"optimizer-{rank}.pt"
        saved = mapping_in(load_file(path), str(path))
        groups = list_in(saved.get("param_groups"), f"{path}: param_groups")
        states = _states(saved, path)
        owners = _owners(values, states, receiver, path)
        if owners is None:
            content.not_taken.append(f"states in {path.name}, since no model says which tensors are buffers")
            continue
        for name, state in zip(owners, states, strict=True):
            if name not in names:  # else it stays with PyTorch, and is on every rank
                names.append(name)
                _add_state(content, name, state, path)
    if len(groups) != 1:
        raise CheckpointError(f"{folder}: its optimizer has {len(groups)} groups, not one; load another checkpoint")
    content.group(names, groups[0])
    content.num_steps = max(content.step_counts.values(), default=0)
    return content


def _add_values(content: Content, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a rank's model, of which the content lacked some. Raises CheckpointError."""
    held = mapping_in(load_file(path), str(path))
    values = {str(name): tensor_in(value, f"{path}: {name}") for name, value in held.items()}
    for name, value in values.items():
        if (name, "value") not in content.tensors:
            content.add(name, "master", value.shape, value.dtype, functools.partial(_same, value))
    return values


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _ranks(folder: Path) -> int:
    """Number of ranks. Raises CheckpointError if a file is missing."""
    found = {
        stem: {int(match[1]) for path in folder.iterdir() if (match := re.fullmatch(rf"{stem}-(\d+)\.pt", path.name))}
        for stem in ("model", "optimizer")
    }
    ranks = max(max(held) for held in found.values()) + 1
    for stem, held in found.items():
        missing = sorted(set(range(ranks)) - held)
        if missing:
            raise CheckpointError(f"{folder} has no file {stem}-{missing[0]}.pt; copy the files of all {ranks} ranks")
    return ranks


def _states(saved: Mapping[Any, Any], path: Path) -> list[Mapping[str, Any]]:
    """States with tensors, by the parameter's index. Raises CheckpointError."""
    held = mapping_in(saved.get("state"), f"{path}: state")
    if not all(type(index) is int for index in held):
        raise CheckpointError(f"{path}: its states are not by index; load another checkpoint")
    states = [mapping_in(held[index], f"{path}: the state of parameter {index}") for index in sorted(held)]
    return [state for state in states if "exp_avg" in state]


def _owners(
    values: Mapping[str, torch.Tensor], states: Sequence[Mapping[str, Any]], receiver: Receiver | None, path: Path
) -> list[str] | None:
    """The parameters that states belong to, in their order; None: several choices are possible.

    Raises:
        CheckpointError: no choice is.
    """
    if receiver is None or receiver.groups is None:
        choices = [[name for name, value in values.items() if value.is_floating_point()]]
    else:
        first = dict.fromkeys(receiver.aliases.get(name, name) for name in values)
        params = [name for name in first if name in receiver.params]
        trained = {name for group in receiver.groups for name in group["params"]}
        choices = [params, [name for name in params if name in trained]]
    for names in choices:
        if len(names) == len(states):
            return [_checked(name, values, state, path) for name, state in zip(names, states, strict=True)]
    if len(choices) == 1:
        return None
    raise CheckpointError(
        f"{path} has states of {len(states)} parameters, and {path.name.replace('optimizer', 'model')} has "
        f"{len(choices[0])} parameters of this model; copy the files of one save, or build the same model"
    )


def _checked(name: str, values: Mapping[str, torch.Tensor], state: Mapping[str, Any], path: Path) -> str:
    value = values.get(name)
    for kind in _KINDS:
        held = tensor_in(state.get(kind), f"{path}: {kind} of {name}")
        if value is not None and held.shape != value.shape:
            raise CheckpointError(
                f"{path}: {kind} of {name} has shape {list(held.shape)}, the parameter {list(value.shape)}; its states "
                "are of another model, or of another order of parameters"
            )
    return name


def _add_state(content: Content, name: str, state: Mapping[str, Any], path: Path) -> None:
    for kind in _KINDS:
        held = tensor_in(state[kind], f"{path}: {kind} of {name}")
        content.add(name, kind, held.shape, held.dtype, functools.partial(_same, held))
    content.count(name, state.get("step"), path)

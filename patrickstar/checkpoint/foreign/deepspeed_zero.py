"""DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3 checkpoints: ``*_optim_states.pt`` of every rank, with flat groups.

A flat group holds parameters one after another; ``param_shapes`` names them in order.

* ZeRO-1 and ZeRO-2: the group is padded at its end and cut into one range for each rank. The padding is removed from
  the masters, not from the optimizer's states.
* ZeRO-3: each rank has ``ceil(numel / ranks)`` elements of every parameter; the last ranks' ranges are padded.

The layout is that which DeepSpeed's ``zero_to_fp32.py`` and ``ds_to_universal.py`` read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.content import Content, add_pieces, list_in, mapping_in, tensor_in
from patrickstar.checkpoint.foreign.deepspeed_model import ModelStates, files_of_ranks
from patrickstar.checkpoint.foreign.safe_files import load_file
from patrickstar.checkpoint.shards import STATE_KINDS

_SUFFIX = "_optim_states.pt"
_MASTERS = {"single_partition_of_fp32_groups": "ZeRO-2", "fp32_flat_groups": "ZeRO-3"}
"""Key of the masters' flat groups, and the stage that writes it. ZeRO-1 writes ZeRO-2's layout."""


@dataclasses.dataclass(frozen=True)
class _RankStates:
    """One rank's flat groups."""

    path: Path
    stage: str
    partition_count: int
    masters: Sequence[torch.Tensor]
    states: Mapping[Any, Any]
    """By index of the flat group: ``exp_avg``, ``exp_avg_sq``, ``step``."""
    groups: Sequence[Mapping[str, Any]]
    """Options, and the indices of a group's flat groups as ``params``; empty if they are not stored."""
    step: Any
    """Number of updates of states without one; None: unknown."""

    def flat(self, kind: str, index: int) -> torch.Tensor:
        """A flat group of a kind. Raises CheckpointError."""
        if kind == "master":
            return self.masters[index]
        state = mapping_in(self.states.get(index), f"{self.path}: the state of flat group {index}")
        return tensor_in(state.get(kind), f"{self.path}: {kind} of flat group {index}").view(-1)


def read_zero(folder: Path) -> Content:
    """Reads a checkpoint of ZeRO-1, 2 or 3.

    Raises:
        CheckpointError: a file is missing, damaged, or of another layout.
    """
    ranks = [_rank_states(path) for path in files_of_ranks(folder, _SUFFIX)]
    model = ModelStates(folder)
    first = ranks[0]
    _check_ranks(folder, ranks, model)
    content = Content(path=folder, origin=f"a DeepSpeed {first.stage} checkpoint of {len(ranks)} ranks")
    pieces_of = _pieces_of_zero3 if first.stage == "ZeRO-3" else _pieces_of_zero2
    for index, shapes in enumerate(model.param_shapes):
        state = first.states.get(index) or {}
        kinds = ["master", *(kind for kind in STATE_KINDS if kind in state)]
        for kind in kinds:
            flats = [rank.flat(kind, index) for rank in ranks]
            for name, pieces in pieces_of(flats, shapes, folder).items():
                add_pieces(content, name, kind, shapes[name], pieces)
        for name in shapes if len(kinds) > 1 else ():
            content.count(name, state.get("step", first.step), first.path)
    add_groups(content, first.groups, model.param_shapes, first.path)
    model.add_to(content)
    content.not_taken += ["the loss scale", *([] if first.groups else ["options of groups, which are not stored"])]
    return content


def add_groups(content: Content, groups: Sequence[Any], param_shapes: Sequence[Mapping[str, Any]], where: Path) -> None:
    """Adds parameter groups, whose ``params`` are indices of flat groups. Raises CheckpointError."""
    for group in groups:
        fields = mapping_in(group, f"{where}: a parameter group")
        indices = list_in(fields.get("params"), f"{where}: params of a parameter group")
        if not all(type(index) is int and 0 <= index < len(param_shapes) for index in indices):
            raise CheckpointError(f"{where}: a parameter group names flat groups that are not there")
        content.group([name for index in indices for name in param_shapes[index]], fields)


def _rank_states(path: Path) -> _RankStates:
    where = f"{path}: optimizer_state_dict"
    top = mapping_in(load_file(path), str(path))
    held = mapping_in(top.get("optimizer_state_dict"), where)
    key = next((key for key in _MASTERS if key in held), None)
    if key is None:
        raise CheckpointError(f"{where} has none of {', '.join(_MASTERS)}; it is of no ZeRO checkpoint")
    base = held.get("base_optimizer_state" if _MASTERS[key] == "ZeRO-2" else "optimizer_state_dict")
    if base is None:
        raise CheckpointError(f"{where} has no states of the optimizer; copy the original file, or load weights alone")
    if isinstance(base, (list, tuple)):  # an "elastic" checkpoint: states by group, without options
        base = {"state": dict(enumerate(base)), "param_groups": []}
    base = mapping_in(base, where)
    groups = list_in(base.get("param_groups"), f"{where}: param_groups")
    steps = [group.get("step") for group in groups if isinstance(group, Mapping)]  # DeepSpeed's FusedAdam counts there
    counts = held.get("partition_count")
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    if not counts or not all(type(count) is int for count in counts):
        raise CheckpointError(f"{where} has no partition_count; load another checkpoint")
    masters = list_in(held[key], f"{where}: {key}")
    return _RankStates(
        path=path,
        stage=_MASTERS[key],
        partition_count=max(counts),
        masters=[tensor_in(flat, f"{path}: flat group {index}").view(-1) for index, flat in enumerate(masters)],
        states=mapping_in(base.get("state"), f"{where}: state"),
        groups=groups,
        step=held.get("base_optimizer_state_step", steps[0] if steps else None),
    )


def _check_ranks(folder: Path, ranks: Sequence[_RankStates], model: ModelStates) -> None:
    first = ranks[0]
    if first.partition_count != len(ranks):
        raise CheckpointError(
            f"{folder} was saved by {first.partition_count} ranks and has {len(ranks)} files *{_SUFFIX}; copy all "
            "ranks' files into it"
        )
    if first.stage == "ZeRO-3" and len(model.files) != len(ranks):
        raise CheckpointError(
            f"{folder} has {len(model.files)} files *_model_states.pt of {len(ranks)} ranks; copy all ranks' files"
        )
    for rank in ranks:
        if rank.stage != first.stage or rank.partition_count != first.partition_count:
            raise CheckpointError(f"{rank.path} is of another checkpoint than {first.path}; copy the folder again")
        if len(rank.masters) != len(model.param_shapes):
            raise CheckpointError(
                f"{rank.path} has {len(rank.masters)} flat groups, {model.files[0]} names {len(model.param_shapes)}; "
                "copy the folder again"
            )


def _pieces_of_zero2(
    flats: Sequence[torch.Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, list[torch.Tensor]]:
    needed, available = sum(map(math.prod, shapes.values())), sum(flat.numel() for flat in flats)
    alignment = 2 * len(flats)  # elements; the padding's multiple
    if not needed <= available < needed + alignment:
        raise _wrong_size(folder, needed, available)
    found = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        found[name] = _cut(flats, begin, end)
        begin = end
    return found


def _cut(flats: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """The elements [begin, end) of consecutive tensors, as ranges of these."""
    pieces, offset = [], 0
    for flat in flats:
        first, last = max(begin - offset, 0), min(end - offset, flat.numel())
        if first < last:
            pieces.append(flat[first:last])
        offset += flat.numel()
    return pieces or [flats[0][:0]]


def _pieces_of_zero3(
    flats: Sequence[torch.Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, list[torch.Tensor]]:
    sizes = {name: math.ceil(math.prod(shape) / len(flats)) for name, shape in shapes.items()}
    for flat in flats:
        if flat.numel() != sum(sizes.values()):
            raise _wrong_size(folder, sum(sizes.values()), flat.numel())
    found = {}
    begin = 0
    for name, shape in shapes.items():
        left = math.prod(shape)
        found[name] = []
        for flat in flats:
            piece = flat[begin : begin + min(sizes[name], left)]
            found[name].append(piece)
            left -= piece.numel()
        begin += sizes[name]
    return found


def _wrong_size(folder: Path, needed: int, available: int) -> CheckpointError:
    return CheckpointError(
        f"{folder}: a flat group has {available} elements, its parameters need {needed}; the files are of different "
        "saves or damaged: copy the folder again, or load another checkpoint"
    )

"""A run as a DeepSpeed universal checkpoint, as its ``ds_to_universal.py`` writes one of ZeRO-1 and ZeRO-2.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     {"param": tensor, "cat_dim": 0}
    zero/<parameter>/step.pt                                number of updates
    zero/optimizer_state.pt                                 parameter groups
    mp_rank_00_model_states.pt                              shapes, buffers, frozen parameters, counts, client_state

Memory: one tensor. Buffers and frozen parameters, which share a file, are mapped from a temporary one.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.disk import Disk, created
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.deepspeed_model import OWN_KEYS
from patrickstar.checkpoint.runs.run import ADAM_KINDS, Run, whole
from patrickstar.checkpoint.shards import TensorShard

DEEPSPEED_COUNTS = "patrickstar.deepspeed"
"""Key of the counts that ``patrickstar.initialize``'s engine keeps in ``client_state``."""
COUNT_KEYS = ("global_steps", "global_samples", "skipped_steps")
"""Keys of DeepSpeed's counts, among others of that dictionary."""
_VERSION = "0.16.0"  # of DeepSpeed's files; it refuses those without one
_MODEL_STATES = "mp_rank_00_model_states.pt"


def write_universal(run: Run, folder: Path, disk: Disk) -> None:
    """Writes the files into an existing folder; they are on the disk when it returns.

    Raises:
        CheckpointError: DeepSpeed cannot hold the run; nothing was read.
    """
    steps = _steps_of_groups(run)
    for key in run.state.client_state:
        if key in OWN_KEYS:
            raise CheckpointError(f"client_state has {key!r}, a key of DeepSpeed's own; rename it and save again")
    zero = folder / "zero"
    disk.make_folder(zero)
    for name in run.group_of:
        disk.make_folder(zero / name)
    with _Spool(folder, disk) as spool:
        for shard in run.shards:
            if shard.name not in run.group_of:
                spool.add(shard)
            else:
                file = f"{shard.kind}.pt" if shard.kind in ADAM_KINDS else "fp32.pt"
                _save_tensor(disk, zero / shard.name / file, whole(shard).float())
        for shard in run.without_states:
            for kind in ADAM_KINDS:
                _save_tensor(disk, zero / shard.name / f"{kind}.pt", torch.zeros(shard.shape, device="cpu"))
        for name, index in run.group_of.items():
            _save(disk, zero / name / "step.pt", steps[index])
        _save(disk, zero / "optimizer_state.pt", _optimizer_state(run, steps))
        _save(disk, folder / _MODEL_STATES, _model_states(run, spool.tensors))
    for path in (*(zero / name for name in run.group_of), zero):
        disk.sync_folder(path)


def _steps_of_groups(run: Run) -> list[int]:
    """Updates of each group's parameters. Raises CheckpointError if a name is no folder, or counts differ."""
    for name in run.group_of:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{name[:200]!r} cannot be a folder's name; rename the parameter")
    steps = []
    for index, group in enumerate(run.state.groups):
        counts = {run.state.step_counts[name] for name in group["params"] if name in run.state.step_counts}
        if len(counts) > 1:
            raise CheckpointError(
                f"parameters of group {index} have between {min(counts)} and {max(counts)} updates, and DeepSpeed "
                "counts them by group: export to dcp, or put those that began later into a group of their own"
            )
        steps.append(max(counts, default=0))
    return steps


def _optimizer_state(run: Run, steps: list[int]) -> dict[str, Any]:
    groups = [
        {**group["options"], "step": step, "params": [index]}
        for index, (group, step) in enumerate(zip(run.state.groups, steps, strict=True))
    ]
    states = {index: {"step": step} for index, step in enumerate(steps)}
    return {
        "param_groups": groups,
        "optimizer_state_dict": {"state": states, "param_groups": groups},  # where ZeRO-3 looks
        "ds_version": _VERSION,
        "overflow": False,
    }


def _model_states(run: Run, others: dict[str, torch.Tensor]) -> dict[str, Any]:
    shapes = [OrderedDict() for _ in run.state.groups]
    known = {shard.name: torch.Size(shard.shape) for shard in run.values}
    own = run.state.client_state.get(DEEPSPEED_COUNTS) or {}
    for name, index in run.group_of.items():
        shapes[index][name] = known[name]
    return {
        "module": OrderedDict(others),
        "buffer_names": [shard.name for shard in run.values if shard.kind == "buffer"],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": run.state.lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "global_steps": run.state.num_steps,
        "skipped_steps": 0,
        **{key: value for key, value in own.items() if key in COUNT_KEYS},
        **{key: value for key, value in run.state.client_state.items() if key != DEEPSPEED_COUNTS},
    }


class _Spool:
    """Tensors that are mapped from temporary files, so that they take no memory of the process."""

    def __init__(self, folder: Path, disk: Disk):
        self._folder, self._disk = folder, disk
        self._paths: list[Path] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self.tensors.clear()
        for path in self._paths if error[0] is None else ():  # else the folder is removed
            self._disk.remove_file(path)

    def add(self, shard: TensorShard) -> None:
        """Copies the shard's values."""
        path = self._folder / f"tensor{len(self._paths)}.tmp"
        numel = math.prod(shard.shape)
        self._paths.append(path)
        with created(self._disk, path):
            pass
        mapped = (
            torch.from_file(str(path), shared=True, size=numel, dtype=shard.dtype)
            if numel
            else torch.empty(0, dtype=shard.dtype, device="cpu")
        )
        mapped.copy_(shard.read().view(-1))
        self.tensors[shard.name] = mapped.view(shard.shape)


def _save_tensor(disk: Disk, path: Path, values: torch.Tensor) -> None:
    # a clone: torch.save writes a tensor's whole storage, which may be larger
    is_whole = values.untyped_storage().nbytes() == values.nbytes
    _save(disk, path, {"param": values if is_whole else values.clone(), "cat_dim": 0})


def _save(disk: Disk, path: Path, value: Any) -> None:
    with created(disk, path) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        torch.save(value, file)

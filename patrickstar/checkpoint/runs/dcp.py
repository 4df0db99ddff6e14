"""A run as a folder of torch.distributed.checkpoint (DCP), with torchtitan's keys.

    <name>                                              parameters and buffers
    optimizer.state.<name>.exp_avg, .exp_avg_sq, .step
    optimizer.param_groups.<name>.lr, ...               all options of torch's AdamW
    train_state.step, .ntokens_seen                     numbers, as torchtitan 0.3 loads them; tokens are not counted: 0

A tied parameter's value has all its names, as in a module's ``state_dict``; they share the bytes in the file.

Memory: one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from patrickstar.checkpoint.runs.run import ADAM_KINDS, Run, whole


class _Planner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each when it is written."""

    def __init__(self, reads: dict[str, Callable[[], torch.Tensor]]):
        super().__init__()
        self._reads = reads

    def resolve_data(self, write_item: WriteItem) -> Any:
        read = self._reads.get(write_item.index.fqn)
        return super().resolve_data(write_item) if read is None else read()


class _Writer(dcp.FileSystemWriter):
    """Lists values of tied parameters under their further names too."""

    def __init__(self, folder: Path, further_names: Mapping[str, str]):
        # Without copying ahead, tensors are read in their order, one at a time.
        super().__init__(folder, per_thread_copy_ahead=0, overwrite=False)
        self._further_names = further_names

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index.fqn: result for found in results for result in found}
        more = []
        for name, stored in self._further_names.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[stored]
            metadata.planner_data[name] = (name,)
            more.append(
                dataclasses.replace(written[stored], index=dataclasses.replace(written[stored].index, fqn=name))
            )
        super().finish(metadata, [*results, more])


def write_dcp(run: Run, folder: Path) -> None:
    """Writes the files into an existing folder; they are on the disk when it returns."""
    values: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    for shard in run.shards:
        is_value = shard.kind not in ADAM_KINDS
        key = shard.name if is_value else f"state.{shard.name}.{shard.kind}"
        (values if is_value else optimizer)[key] = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
        reads[key if is_value else f"optimizer.{key}"] = functools.partial(whole, shard)
    for shard in run.without_states:  # loaders want the states of all parameters
        for kind in ADAM_KINDS:
            key = f"state.{shard.name}.{kind}"
            optimizer[key] = torch.empty(shard.shape, dtype=torch.float32, device="meta")
            reads[f"optimizer.{key}"] = functools.partial(torch.zeros, shard.shape)
    for name, index in run.group_of.items():
        options = _torch_options(run, index)
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
        optimizer[f"state.{name}.step"] = torch.tensor(float(run.state.step_counts.get(name, 0)), device="cpu")
    state = {"step": run.state.num_steps, "ntokens_seen": 0}
    writer = _Writer(folder, run.state.further_names)
    held = {**values, "optimizer": optimizer, "train_state": state}
    try:
        dcp.save(held, storage_writer=writer, planner=_Planner(reads), no_dist=True)
    except CheckpointException as error:  # of any error within it, an interrupt too
        for cause, _ in error.failures.values():
            raise cause from None
        raise


def _torch_options(run: Run, index: int) -> dict[str, Any]:
    """All options that a group of torch's has, also one with a schedule, with the run's values."""
    options = run.state.groups[index]["options"]
    kind = torch.optim.Adam if run.state.optimizer == "Adam" else torch.optim.AdamW
    (group,) = kind([torch.zeros(1, device="cpu")]).param_groups
    defaults = {key: value for key, value in group.items() if key != "params"}
    return {**defaults, "initial_lr": options.get("lr", group["lr"]), **options}

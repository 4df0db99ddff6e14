"""DeepSpeed's ``*_model_states.pt``: shapes and names of parameters, buffers, frozen parameters, counts, user's state.

ZeRO-1 and ZeRO-2 write one file, ``mp_rank_00_model_states.pt``. ZeRO-3 writes one for each rank,
``zero_pp_rank_<rank>_mp_rank_00_model_states.pt``, with that rank's range of each frozen parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.content import (
    Content,
    add_pieces,
    list_in,
    mapping_in,
    shape_in,
    tensor_in,
    whole_number,
)
from patrickstar.checkpoint.foreign.safe_files import load_file

_OTHERS = ("data_sampler", "random_ltd")
OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_config"),
    *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts"),
    *("ds_autoep_layers", "autoep_layers", *_OTHERS),
}
"""Keys that are DeepSpeed's; all others are the user's ``client_state``."""
_RANK = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(?:model|optim)_states\.pt")


def files_of_ranks(folder: Path, suffix: str) -> list[Path]:
    """The files with the suffix ``_model_states.pt`` or ``_optim_states.pt``, by rank.

    Raises:
        CheckpointError: one is missing, or they are of tensor, pipeline or expert parallelism.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        match = _RANK.fullmatch(path.name)
        if match is None or int(match[2]) != 0:
            raise CheckpointError(
                f"{path} is of tensor, pipeline or expert parallelism, which is not read; convert the checkpoint with "
                "DeepSpeed's ds_to_universal.py, or load its weights alone"
            )
        rank = int(match[1] or 0)
        if rank in found:
            raise CheckpointError(f"{path} and {found[rank]} are of the same rank; remove the one of an older save")
        found[rank] = path
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            raise CheckpointError(
                f"{folder} has no file *{suffix} of rank {rank}, and one of rank {max(found)}; copy the whole folder"
            )
    return [found[rank] for rank in sorted(found)]


class ModelStates:
    """The model states of all ranks."""

    def __init__(self, folder: Path):
        """Raises CheckpointError if a file is missing or cannot be read."""
        self.files = files_of_ranks(folder, "_model_states.pt")
        if not self.files:
            raise CheckpointError(f"{folder} has no file *_model_states.pt; copy the whole folder")
        self._states = [mapping_in(load_file(path), str(path)) for path in self.files]
        self._first, self._where = self._states[0], self.files[0]
        self.param_shapes = [
            {str(name): shape_in(shape, f"{self._where}: the shape of {name}") for name, shape in group.items()}
            for group in self._param_shapes()
        ]
        """Shapes of the trained parameters by name, one dict for each flat group; the order is that of the groups."""

    def _param_shapes(self) -> Sequence[Mapping[Any, Any]]:
        shapes = self._first.get("param_shapes")
        if shapes is None:
            raise CheckpointError(
                f"{self._where} has no param_shapes: it was saved without ZeRO, or without an optimizer; load its "
                "'module' into the model before the engine is made"
            )
        return [mapping_in(group, f"{self._where}: param_shapes") for group in list_in(shapes, str(self._where))]

    def add_to(self, content: Content) -> None:
        """Adds buffers, frozen parameters, counts, the schedule and the user's state. Raises CheckpointError."""
        self._add_frozen(content)
        shared = self._first.get("shared_params") or {}
        pairs = shared.items() if isinstance(shared, Mapping) else list_in(shared, f"{self._where}: shared_params")
        further = {str(name) for name, _ in pairs}  # of parameters that are stored under another name
        module = mapping_in(self._first.get("module"), f"{self._where}: module")
        buffers = set(list_in(self._first.get("buffer_names") or [], f"{self._where}: buffer_names"))
        known = {name for group in self.param_shapes for name in group} | {name for name, _ in content.tensors}
        for name, value in module.items():
            if name in buffers:
                self._add(content, name, "buffer", value)
            elif name in known or name in further or not isinstance(value, torch.Tensor):
                continue
            elif value.numel() > 0:  # ZeRO-1 keeps frozen parameters here alone, ZeRO-3 empty tensors in their place
                self._add(content, name, "frozen", value)
        self._add_state(content)

    def _add(self, content: Content, name: str, kind: str, value: Any) -> None:
        tensor = tensor_in(value, f"{self._where}: {name}")
        content.add(name, kind, tensor.shape, tensor.dtype, lambda: tensor)

    def _add_frozen(self, content: Content) -> None:
        shapes = mapping_in(self._first.get("frozen_param_shapes") or {}, f"{self._where}: frozen_param_shapes")
        for name, sizes in shapes.items():
            shape = shape_in(sizes, f"{self._where}: the shape of {name}")
            pieces, left = [], math.prod(shape)
            for path, state in zip(self.files, self._states, strict=True):
                fragments = mapping_in(state.get("frozen_param_fragments"), f"{path}: frozen_param_fragments")
                piece = tensor_in(fragments.get(name), f"{path}: the frozen parameter {name}").view(-1)[:left]
                pieces.append(piece)
                left -= piece.numel()
            add_pieces(content, str(name), "frozen", shape, pieces)

    def _add_state(self, content: Content) -> None:
        state = self._first
        content.num_steps = whole_number(state.get("global_steps", 0), f"{self._where}: global_steps")
        content.lr_scheduler = content.keep_plain("lr_scheduler", state.get("lr_scheduler"), "lr_scheduler")
        content.not_taken += [key for key in _OTHERS if state.get(key) is not None]
        for key, value in state.items():
            if isinstance(key, str) and key not in OWN_KEYS and value is not None:
                kept = content.keep_plain(f"client_state[{key!r}]", value, key)
                content.client_state |= {} if kept is None else {key: kept}

"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` and ``__<rank>_<i>.distcp``.

``.metadata`` says in which file and at which offset each box of each tensor is. Known layouts:

* torchtitan: ``<name>``, ``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.<name>.lr``, and
  ``train_state.step``;
* Accelerate and Hugging Face's Trainer with FSDP: folders ``pytorch_model_fsdp_0`` with ``model.<name>`` and
  ``optimizer_0`` with ``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.<i>.lr``;
* both kinds of keys in one folder, also below ``app``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.foreign.content import OPTIONS, Content, mapping_in, shape_in, tensor_in, whole_number
from patrickstar.checkpoint.foreign.safe_files import load_bytes, load_file, load_metadata
from patrickstar.checkpoint.shards import STATE_KINDS

METADATA = ".metadata"
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_TRAINER_STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer", "optim")


class _Record:
    """An object of ``.metadata``. Arguments of its class are dropped."""

    fields: Any = None
    """Its state: fields by name, or a tuple."""

    def __init__(self, *args: Any):
        """Takes any arguments."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def get(self, name: str) -> Any:
        """A field, or None."""
        return self.fields.get(name) if isinstance(self.fields, dict) else None


class _Tensor(_Record):
    """TensorStorageMetadata."""


class _Bytes(_Record):
    """BytesStorageMetadata."""


_METADATA, _FILES = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem."
_PLAIN = ("Metadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
_CLASSES: dict[str, Any] = {
    **{f"{_METADATA}{name}": _Record for name in _PLAIN},
    f"{_METADATA}TensorStorageMetadata": _Tensor,
    f"{_METADATA}BytesStorageMetadata": _Bytes,
    f"{_METADATA}_MEM_FORMAT_ENCODING": _Record,
    f"{_FILES}_StorageInfo": _Record,
    f"{_FILES}_StoragePrefix": _Record,
    "torch.serialization._get_layout": _Record,
    "torch.Size": tuple,
    "pathlib.PosixPath": _Record,
    "pathlib._local.PosixPath": _Record,
    "collections.OrderedDict": dict,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


@dataclasses.dataclass(frozen=True)
class _Box:
    """A part of a tensor in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    def load(self) -> Any:
        """The content of the range, which ``torch.save`` wrote. Raises CheckpointError."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.num_bytes)
        return load_bytes(data, self.file)


class _Folder:
    """One DCP folder."""

    def __init__(self, path: Path):
        """Raises CheckpointError if ``.metadata`` is damaged, or a file is missing or too short."""
        self.path, self.where = path, path / METADATA
        top = load_metadata(self.where, _CLASSES)
        fields = top.fields if isinstance(top, _Record) and isinstance(top.fields, dict) else {}
        self.entries = dict(mapping_in(fields.get("state_dict_metadata"), f"{self.where}: state_dict_metadata"))
        self._paths = fields.get("planner_data") or {}
        self._infos: dict[tuple[str, Any], _Record] = {}
        for index, info in mapping_in(fields.get("storage_data"), f"{self.where}: storage_data").items():
            if not isinstance(index, _Record) or not isinstance(info, _Record):
                raise CheckpointError(f"{self.where}: its storage_data are of an unknown form")
            self._infos[str(index.get("fqn")), index.get("offset")] = info
        self._sizes: dict[Path, int] = {}

    def paths(self) -> Iterator[tuple[tuple[Any, ...], str]]:
        """The path of each entry in the state dict, and its key."""
        for key in self.entries:
            path = self._paths.get(key, (key,)) if isinstance(self._paths, dict) else (key,)
            path = path if isinstance(path, tuple) and path else (key,)
            yield path[1:] if path[0] == "app" and len(path) > 1 else path, key

    def value(self, key: str) -> Any:
        """A number, string, list, ... of the state dict, or a whole small tensor. Raises CheckpointError."""
        if isinstance(self.entries[key], _Tensor):
            return self._whole(self.boxes(key), self.shape(key), self.dtype(key), key)
        return self._box(key, None, (), ()).load()

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises CheckpointError."""
        return shape_in(self.entries[key].get("size"), f"{self.where}: the size of {key}")

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor. Raises CheckpointError."""
        properties = self.entries[key].get("properties")
        state = properties.fields if isinstance(properties, _Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.where}: {key} has no dtype; load another checkpoint")
        return dtype

    def boxes(self, key: str) -> list[_Box]:
        """The parts of a tensor, which cover it once.

        Raises:
            CheckpointError: they do not, or a file is missing or too short.
        """
        shape = self.shape(key)
        boxes = []
        for chunk in self.entries[key].get("chunks") or ():
            what = f"{self.where}: a part of {key}"
            offsets, sizes = shape_in(chunk.get("offsets"), what), shape_in(chunk.get("sizes"), what)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise CheckpointError(f"{what} has another number of dimensions; load another checkpoint")
            if any(begin + size > end for begin, size, end in zip(offsets, sizes, shape, strict=True)):
                raise CheckpointError(f"{what} is outside of its shape {list(shape)}; load another checkpoint")
            boxes.append(self._box(key, offsets, offsets, sizes))
        if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape) or _overlap(boxes):
            raise CheckpointError(f"{self.where}: the parts of {key} do not cover its shape {list(shape)} once")
        return boxes

    def add(self, content: Content, key: str, name: str, kind: str) -> None:
        """Adds a tensor to the content. Raises CheckpointError."""
        shape, dtype = self.shape(key), self.dtype(key)
        content.add(name, kind, shape, dtype, functools.partial(self._whole, self.boxes(key), shape, dtype, key))

    def _box(self, key: str, index: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _Box:
        info = self._infos.get((key, index))
        name = None if info is None else info.get("relative_path")
        if info is None or not isinstance(name, str) or PurePosixPath(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{self.where} says of {key} no file of its folder; load another checkpoint")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{self.where}: {key} is compressed or encrypted, which is not read; save it plainly")
        (offset, num_bytes) = shape_in((info.get("offset"), info.get("length")), f"{self.where}: the place of {key}")
        file = self.path / name
        if file not in self._sizes:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, which has {key}; copy the whole folder")
            self._sizes[file] = file.stat().st_size
        if offset + num_bytes > self._sizes[file]:
            raise CheckpointError(
                f"{file} has {self._sizes[file]} bytes, {key} ends at {offset + num_bytes}; copy the file again"
            )
        return _Box(offsets, sizes, file, offset, num_bytes)

    def _whole(self, boxes: Sequence[_Box], shape: tuple[int, ...], dtype: torch.dtype, key: str) -> torch.Tensor:
        parts = []
        for box in boxes:
            part = tensor_in(box.load(), f"{box.file}: {key}")
            if tuple(part.shape) != box.sizes or part.dtype != dtype:
                raise CheckpointError(
                    f"{box.file}: {key} is {list(part.shape)} of {part.dtype}, {self.where} says {list(box.sizes)} of "
                    f"{dtype}; load another checkpoint"
                )
            if box.sizes == shape:
                return part
            parts.append(part)
        with _C.HostAllocations():
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            for box, part in zip(boxes, parts, strict=True):
                whole[tuple(slice(begin, begin + n) for begin, n in zip(box.offsets, box.sizes, strict=True))] = part
        return whole


def _overlap(boxes: Sequence[_Box]) -> bool:
    """True if two boxes share an element; empty ones share none."""
    full = sorted((box for box in boxes if math.prod(box.sizes) > 0), key=lambda box: box.offsets)
    for index, one in enumerate(full):
        for other in full[index + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # boxes are sorted: later ones begin behind this one too
            places = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in places):
                return True
    return False


def is_dcp(folder: Path) -> bool:
    """True if the folder is one of DCP, or has one for the model."""
    return (folder / METADATA).is_file() or (folder / MODEL_FOLDER / METADATA).is_file()


def read_dcp(folder: Path) -> Content:
    """Reads a DCP folder, or a folder of Accelerate's or the Trainer's with FSDP.

    Raises:
        CheckpointError: a file is missing, damaged, or of another layout.
    """
    content = Content(path=folder, origin="a checkpoint of torch.distributed.checkpoint")
    if (folder / METADATA).is_file():
        _add_folder(content, _Folder(folder))
    else:
        content.origin += " (FSDP)"
        _add_folder(content, _Folder(folder / MODEL_FOLDER))
        if (folder / OPTIMIZER_FOLDER / METADATA).is_file():
            _add_folder(content, _Folder(folder / OPTIMIZER_FOLDER))
        else:
            content.not_taken.append(f"the optimizer ({OPTIMIZER_FOLDER} is not there)")
        for path in (folder / name for name in _SCHEDULERS if (folder / name).is_file()):
            content.lr_scheduler = content.keep_plain("lr_scheduler", load_file(path), "lr_scheduler")
    content.num_steps = content.num_steps or _trainer_steps(folder) or max(content.step_counts.values(), default=0)
    return content


def _trainer_steps(folder: Path) -> int:
    path = folder / _TRAINER_STATE
    try:
        state = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}; copy it again") from error
    return whole_number(mapping_in(state, str(path)).get("global_step", 0), f"{path}: global_step")


def _add_folder(content: Content, folder: _Folder) -> None:
    options: dict[Any, dict[str, Any]] = {}
    steps: dict[str, str] = {}
    others: dict[Any, list[tuple[tuple[Any, ...], str]]] = {}
    for path, key in folder.paths():
        if path[0] in _OPTIMIZERS and len(path) > 1:
            _add_optimizer_key(content, folder, path[1:], key, options, steps)
        elif isinstance(folder.entries[key], _Tensor) and (len(path) == 1 or path[0] == "model"):
            folder.add(content, key, ".".join(map(str, path[1:] if len(path) > 1 else path)), "master")
        else:
            others.setdefault(path[0], []).append((path[1:], key))
    for name, key in steps.items():
        content.count(name, folder.value(key), folder.where)
    _add_groups(content, options)
    for name, found in others.items():
        values = {path[0]: folder.value(key) for path, key in found if len(path) == 1}
        if name == "train_state" and "step" in values:
            content.num_steps = whole_number(values["step"], f"{folder.where}: train_state.step")
        elif name == "lr_scheduler" and len(values) == len(found):
            content.lr_scheduler = content.keep_plain("lr_scheduler", values, "lr_scheduler")
        else:
            content.not_taken.append(str(name))


def _add_optimizer_key(
    content: Content,
    folder: _Folder,
    path: tuple[Any, ...],
    key: str,
    options: dict[Any, dict[str, Any]],
    steps: dict[str, str],
) -> None:
    """Sorts an entry of the optimizer: a state is added, a step's key and an option's value are collected."""
    first, _, rest = ".".join(map(str, path)).partition(".")
    owner, _, last = rest.rpartition(".")
    if first == "state" and last == "step":
        steps[owner] = key
    elif first == "state" and last in STATE_KINDS:
        folder.add(content, key, owner, last)
    elif first == "param_groups":
        is_index = len(path) > 1 and isinstance(path[1], int)
        if last in (*OPTIONS, "params"):
            options.setdefault(int(owner) if is_index else owner, {})[last] = folder.value(key)
    else:
        content.not_taken.append(key)


def _add_groups(content: Content, options: Mapping[Any, Mapping[str, Any]]) -> None:
    """Adds groups from options by index, which have ``params``, or by parameter."""
    alike: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for owner, values in options.items():
        names = values.get("params") if isinstance(owner, int) else [owner]
        if not isinstance(names, (list, tuple)):
            raise CheckpointError(f"{content.path}: parameter group {owner} names no parameters")
        key = str(owner) if isinstance(owner, int) else repr(sorted(values.items(), key=str))
        alike.setdefault(key, ([], values))[0].extend(map(str, names))
    for names, values in alike.values():
        content.group(names, values)

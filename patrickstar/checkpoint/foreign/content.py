"""The content of another program's checkpoint, in the terms of PatrickStar's own: names, kinds, groups, counts.

Readers of formats make a :class:`Content`. A :class:`ForeignCheckpoint` fits it to a model and gives an engine the
interface of :class:`patrickstar.checkpoint.reader.Checkpoint`. Memory besides the sink's: one parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.codec import encode
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.manifest import Manifest, StoredTensor
from patrickstar.checkpoint.reader import check_match
from patrickstar.checkpoint.shards import STATE_KINDS, ShardSink, TensorRange, flattened
from patrickstar.checkpoint.training_state import TrainingState
from patrickstar.config import ALL_OPTIONS

logger = logging.getLogger("patrickstar")

OPTIONS = (*ALL_OPTIONS, "initial_lr", "amsgrad", "maximize", "differentiable")
"""Options of a group that are taken over, or refused by the engine's check."""
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_MOST_STEPS = 2**53


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignTensor(StoredTensor):
    """A whole tensor of another program's checkpoint."""

    read_whole: Callable[[], torch.Tensor]
    """Returns the tensor: a view of a mapped file, or assembled."""


@dataclasses.dataclass(kw_only=True)
class Group:
    """A parameter group: names, and options by name."""

    names: list[str]
    options: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Content:
    """All that a format's reader found."""

    path: Path
    origin: str
    """Describes the checkpoint, such as "a DeepSpeed ZeRO-2 checkpoint of 4 ranks"."""
    tensors: dict[tuple[str, str], ForeignTensor] = dataclasses.field(default_factory=dict)
    step_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    groups: list[Group] = dataclasses.field(default_factory=list)
    num_steps: int = 0
    lr_scheduler: Any = None
    client_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    not_taken: list[str] = dataclasses.field(default_factory=lambda: ["random number generators"])
    """State that an engine cannot continue, for the log."""

    def add(
        self, name: str, kind: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> None:
        """Adds a tensor.

        Raises:
            CheckpointError: it is there twice.
        """
        name = _without_wrappers(name)
        tensor = ForeignTensor(
            name=name, kind=kind, shape=tuple(shape), dtype=dtype, order=None, shards=(), read_whole=read
        )
        if tensor.key in self.tensors:
            raise CheckpointError(f"{self.path}: {tensor} is there twice; load another checkpoint")
        self.tensors[tensor.key] = tensor

    def count(self, name: str, step: Any, where: Path) -> None:
        """Sets a parameter's number of updates; 0: it has no states; None: the optimizer does not count.

        Raises:
            CheckpointError: ``step`` is no count.
        """
        if step is None:
            return
        name, count = _without_wrappers(name), whole_number(step, f"{where}: the step of {name}")
        if count > 0:
            self.step_counts[name] = count
        else:
            for kind in STATE_KINDS:
                self.tensors.pop((name, kind), None)

    def group(self, names: Sequence[str], options: Any) -> None:
        """Adds a parameter group, with those options that matter to an engine."""
        known = options if isinstance(options, Mapping) else {}
        kept = {key: _plain_number(known[key]) for key in OPTIONS if known.get(key) is not None}
        self.groups.append(Group(names=[_without_wrappers(name) for name in names], options=kept))

    def keep_plain(self, key: str, value: Any, what: str) -> Any:
        """Returns ``value`` if a checkpoint can hold it, else None; then ``not_taken`` names ``key``."""
        try:
            encode(value, what)
        except CheckpointError:
            self.not_taken.append(key)
            return None
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receiver:
    """The model and the optimizer that a checkpoint is read for."""

    groups: Sequence[Mapping[str, Any]] | None
    """``params`` (names) and ``options`` of each group; None: the optimizer takes nothing."""
    aliases: Mapping[str, str]
    """Further names of shared parameters; each maps to the name in a checkpoint."""
    params: frozenset[str] = frozenset()
    """Names of all parameters in a checkpoint."""


class ForeignCheckpoint:
    """A checkpoint of another program, for loading; a context manager like ``Checkpoint``."""

    described_blocks = None
    """None: tensors are whole."""

    def __init__(self, content: Content, receiver: Receiver | None = None):
        """``receiver``: None to look at the checkpoint without a model.

        Raises:
            CheckpointError: the groups of ``receiver`` are others, or states are not of their parameters.
        """
        self.path = content.path
        self.origin = content.origin
        self._not_taken = content.not_taken
        names = receiver.aliases if receiver is not None else {}
        tensors = {}
        for (name, role), tensor in content.tensors.items():
            key = names.get(name, name), role
            if key[0] == name or key not in content.tensors:  # else a shared parameter is stored under both names
                tensors[key] = dataclasses.replace(tensor, name=key[0])
        _check_states(tensors, content)
        stored = [
            Group(names=[names.get(name, name) for name in group.names], options=group.options)
            for group in content.groups
        ]
        state = TrainingState(
            num_steps=content.num_steps,
            step_counts={names.get(name, name): count for name, count in _counts(content).items()},
            groups=[{"params": group.names, "options": group.options} for group in stored]
            if receiver is None or receiver.groups is None
            else [_fitted(group, stored, content) for group in receiver.groups],
            loss_scaler=None,
            lr_scheduler=content.lr_scheduler,
            extra_states={},
            client_state=content.client_state,
        )
        self.manifest = Manifest(num_ranks=0, files={}, tensors=tensors, state=state.to_json())
        """Describes the tensors and the state; ``num_ranks`` is 0, and no files are listed."""

    def __enter__(self) -> ForeignCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open; files stay mapped while tensors of theirs are kept."""

    def rng_states(self, rank: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Empty: random number generators are not taken over."""
        return {}

    def left_out(self, num_ranks: int) -> str:  # noqa: ARG002
        """Describes the state that is not taken over."""
        return f"{self.origin}; not taken over: {', '.join(self._not_taken)}"

    def check(self, sink: ShardSink, rank: int = 0, num_ranks: int = 1) -> None:  # noqa: ARG002
        """Checks names, shapes and dtypes; files were checked when they were opened.

        Raises:
            CheckpointError: the sink wants other tensors.
        """
        check_match(self.manifest, sink.wanted(), self.path)

    def load(self, sink: ShardSink) -> None:
        """Writes everything that the sink wants into it.

        Raises:
            CheckpointError: a file cannot be read any more.
        """
        for item in sink.wanted():
            stored = self.manifest.tensors.get(item.key)
            if stored is not None and (item.numel > 0 or item.is_whole):
                sink.write(item, self.read(stored, item))

    def read(self, stored: StoredTensor, wanted: TensorRange) -> torch.Tensor:
        """The elements of a range, in the stored dtype and the wanted order. Raises CheckpointError."""
        with _C.HostAllocations():
            whole = stored.read_whole()  # type: ignore[attr-defined]
            return flattened(whole.view(stored.shape), wanted.order)[wanted.begin : wanted.end].contiguous()


def _check_states(tensors: Mapping[tuple[str, str], ForeignTensor], content: Content) -> None:
    """Raises CheckpointError if a state has another shape than its parameter."""
    for tensor in tensors.values():
        value = tensors.get((tensor.name, "value"))
        if tensor.kind in STATE_KINDS and (value is None or value.shape != tensor.shape):
            raise CheckpointError(
                f"{content.path}: {tensor} has shape {list(tensor.shape)}, its parameter "
                f"{'is missing' if value is None else list(value.shape)}; load another checkpoint"
            )


def _counts(content: Content) -> dict[str, int]:
    """Number of updates of each parameter with states. Rules without a variance do not need it, and may not store it.

    Raises:
        CheckpointError: a parameter has a variance and no count.
    """
    counts = dict(content.step_counts)
    for name, role in content.tensors:
        if role in STATE_KINDS and name not in counts:
            if (name, "exp_avg_sq") in content.tensors:
                raise CheckpointError(f"{content.path}: {role} of {name} has no step; load another checkpoint")
            counts[name] = max(content.num_steps, 1)
    return counts


def assembled(pieces: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` from consecutive ranges of its elements; a single range is not copied."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))).view(tuple(shape))


def add_pieces(content: Content, name: str, kind: str, shape: Sequence[int], pieces: Sequence[torch.Tensor]) -> None:
    """Adds a tensor whose consecutive ranges are mapped.

    Raises:
        CheckpointError: the ranges have another number of elements, or are no floating point numbers.
    """
    if sum(piece.numel() for piece in pieces) != math.prod(shape):
        held = sum(piece.numel() for piece in pieces)
        raise CheckpointError(
            f"{content.path}: {kind} of {name} has {held} elements in the files, its shape {list(shape)} has "
            f"{math.prod(shape)}; load another checkpoint"
        )
    pieces = [piece for piece in pieces if piece.numel() > 0] or list(pieces[:1])
    content.add(name, kind, shape, pieces[0].dtype, functools.partial(assembled, pieces, shape))


def tensor_in(value: Any, what: str) -> torch.Tensor:
    """``value`` if it is a dense CPU tensor.

    Raises:
        CheckpointError: it is something else; ``what`` names it.
    """
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if not dense or not value.is_contiguous():
        raise CheckpointError(f"{what} is no dense tensor but {type(value).__name__}; load another checkpoint")
    return value.detach().as_subclass(torch.Tensor)


def mapping_in(value: Any, what: str) -> Mapping[Any, Any]:
    """``value`` if it is a dict. Raises CheckpointError."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{what} is missing or no dict; load another checkpoint")
    return value


def list_in(value: Any, what: str) -> Sequence[Any]:
    """``value`` if it is a list or a tuple. Raises CheckpointError."""
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{what} is missing or no list; load another checkpoint")
    return value


def shape_in(value: Any, what: str) -> tuple[int, ...]:
    """``value`` as a shape. Raises CheckpointError."""
    sizes = value if isinstance(value, (list, tuple)) else None
    if sizes is None or not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise CheckpointError(f"{what} is no shape; load another checkpoint")
    return tuple(sizes)


def whole_number(value: Any, what: str) -> int:
    """A count given as a number or as a tensor of one element. Raises CheckpointError."""
    number = _plain_number(value)
    if isinstance(number, (int, float)) and float(number).is_integer() and 0 <= number <= _MOST_STEPS:
        return int(number)
    raise CheckpointError(f"{what} is {str(value)[:100]}, not a whole number of steps; load another checkpoint")


def _plain_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        with contextlib.suppress(RuntimeError):
            return value.item()
    return tuple(value) if isinstance(value, list) else value


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _fitted(own: Mapping[str, Any], stored: Sequence[Group], content: Content) -> dict[str, Any]:
    """A group of the engine with the options of the stored group that has its parameters.

    Raises:
        CheckpointError: its parameters are in several stored groups with different options.
    """
    found = [group for group in stored if not set(group.names).isdisjoint(own["params"])]
    if any(group.options != found[0].options for group in found):
        raise CheckpointError(
            f"{content.path}: the {len(own['params'])} parameters of a group of this engine are in {len(found)} groups "
            "of the checkpoint with different options; build the engine with the same model_parameters"
        )
    return {"params": list(own["params"]), "options": {**own["options"], **(found[0].options if found else {})}}

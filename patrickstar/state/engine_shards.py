"""An engine's tensors as shards: a source for saving a checkpoint, a sink for loading one.

A single rank holds whole tensors, row-major. Each of several ranks holds ranges of the tensors in chunks, in memory
order. The first rank saves what all ranks hold alike: buffers, and parameters that stay with PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.encoding import Encoding
from patrickstar.checkpoint.memory import Scratch, bytes_at, bytes_of, tensor_of
from patrickstar.checkpoint.rng import rng_states
from patrickstar.checkpoint.shards import STATE_KINDS, Kind, TensorRange, TensorShard, is_row_major
from patrickstar.checkpoint.snapshot import Piece
from patrickstar.module.chunked_parameter import ChunkedParameter, whole_shape
from patrickstar.module.compiled.dynamo import without_wrappers
from patrickstar.module.managed import wide_dtype
from patrickstar.module.observed_buffers import SPARSE_BUFFER_REMEDY, persistent_buffers
from patrickstar.module.param_handle import ParamHandle
from patrickstar.session.session import Session
from patrickstar.state.parts import Frozen, Part


@dataclasses.dataclass(frozen=True)
class _Array:
    """This rank's part of a parameter's value or state in the core, all of it one shard."""

    param: int
    kind: _C.ArrayKind


def buffer_shards(session: Session) -> Iterator[TensorShard]:
    """Persistent buffers, which all ranks hold alike."""
    for name, buffer in _stored_buffers(session.module):
        yield _shard(name, "buffer", buffer.shape, buffer.dtype, functools.partial(_flat, buffer, buffer.dtype))


class EngineSource:
    """The tensors that an engine holds on this rank."""

    def __init__(
        self,
        session: Session,
        params: Iterable[tuple[str, nn.Parameter]],
        frozen: Frozen = Frozen.SAVED,
        *,
        whole: bool = False,
    ):
        """Args:
        params: parameters that this rank saves, with their names in the checkpoint.
        whole: each rank has whole parameters, which all ranks read together, instead of its shard.
        """
        self._session = session
        self._params = list(params)
        self._frozen = frozen
        self._rank = session.ranks.control.rank
        self._sharded = session.chunk_ranks.size > 1 and not whole
        self._scratch = Scratch()

    def shards(self) -> Iterator[TensorShard]:
        """Parameters, states of updated parameters, persistent buffers, random number generators."""
        yield from self.values()
        for name, param in self._params:
            if step_count(self._session, param) > 0:
                for kind in state_kinds(self._session):
                    read = functools.partial(self._read_access, param, kind)
                    yield from self._held(name, kind, param, _state_dtype(param), read)
        for name, state in rng_states(self._session.device).items():
            yield _shard(f"rank{self._rank}.{name}", "rng", state.shape, state.dtype, lambda state=state: state)

    def values(self) -> Iterator[TensorShard]:
        """Parameters and buffers."""
        for name, param in self._params:
            if self._frozen is Frozen.LEFT_OUT and not param.requires_grad:
                continue
            kind = kind_of(param)
            dtype = torch.float32 if kind == "master" else param.dtype
            yield from self._held(name, kind, param, dtype, functools.partial(self._read_value, param, dtype))
        yield from buffer_shards(self._session) if self._rank == 0 else ()

    def _held(
        self, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype, read_whole: Callable[[], torch.Tensor]
    ) -> Iterator[TensorShard]:
        if not self._sharded:
            whole = _shard(name, kind, whole_shape(param), dtype, read_whole)
            handle = param._patrickstar if isinstance(param, ChunkedParameter) else None
            is_one_part = handle is not None and self._session.chunk_ranks.size == 1 and _is_row_major(handle)
            yield self._as_stored(whole, handle) if is_one_part else whole
        elif isinstance(param, ChunkedParameter):
            held, handle = _own_range(self._session, name, kind, param, dtype), param._patrickstar
            if held.numel > 0:
                read = functools.partial(self._read_own, handle, kind, held.numel, dtype)
                yield self._as_stored(TensorShard(**vars(held), read=read), handle)
        elif self._session.chunk_ranks.rank == 0:
            yield _shard(name, kind, param.shape, dtype, read_whole)

    def _as_stored(self, shard: TensorShard, handle: ParamHandle) -> TensorShard:
        """The shard in the form in which the core stores this rank's part. 16-bit frozen parameters are unchanged."""
        if shard.dtype is not torch.float32:
            return shard
        array = _Array(handle.id, _array_of(self._session, shard.kind))
        stored = self._session.runtime.stored_type(array.param, array.kind)
        dtype = torch.bfloat16 if stored is _C.StateType.BFLOAT16 else torch.float32
        shard = dataclasses.replace(shard, dtype=dtype, encoding=Encoding.of(stored), place=array)
        return dataclasses.replace(shard, read=functools.partial(self._read_stored, shard))

    def _read_stored(self, shard: TensorShard) -> torch.Tensor:
        values = tensor_of(self._scratch.take(shard.num_bytes), shard.stored_dtype)
        array = shard.place
        self._session.runtime.read_stored([(array.param, array.kind, 0, shard.num_bytes, values.data_ptr())])
        return values

    def copy(self, pieces: Sequence[Piece]) -> list[int]:
        """See ``CopyableSource``. Values of chunks are copied by all threads of the core."""
        crcs = [0] * len(pieces)
        ranges, places = [], []
        last: TensorShard | None = None
        for index, piece in enumerate(pieces):
            shard = piece.shard
            if shard.place is not None:
                ranges.append((shard.place.param, shard.place.kind, piece.begin, piece.end, piece.address))
                places.append(index)
                continue
            if shard is not last:
                last, values = shard, bytes_of(shard.read())
            copied = bytes_at(piece.address, piece.num_bytes)
            copied[:] = values[piece.begin : piece.end]
            crcs[index] = _C.crc32c(copied)
        for index, crc in zip(places, self._session.runtime.read_stored(ranges), strict=True):
            crcs[index] = crc
        return crcs

    def _read_own(self, handle: ParamHandle, kind: Kind, numel: int, dtype: torch.dtype) -> torch.Tensor:
        values = tensor_of(self._scratch.take(numel * torch.float32.itemsize), torch.float32)
        self._session.runtime.read_own_values(handle.id, _array_of(self._session, kind), values.data_ptr())
        return _flat(values, dtype)

    def _read_value(self, param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(param, ChunkedParameter):
            return _flat(param.detach().as_subclass(torch.Tensor), dtype)
        return self._read_array(param._patrickstar, _C.ArrayKind.MASTER, dtype)

    def _read_access(self, param: nn.Parameter, kind: Kind) -> torch.Tensor:
        if isinstance(param, ChunkedParameter):
            return self._read_array(param._patrickstar, _array_of(self._session, kind), torch.float32)
        return _flat(self._session.managed.state_of(param)[kind], _state_dtype(param))

    def _read_array(self, handle: ParamHandle, kind: _C.ArrayKind, dtype: torch.dtype) -> torch.Tensor:
        if not _is_row_major(handle):
            return _flat(handle.whole(self._session.observer.read_values(handle, kind)), dtype)
        values = tensor_of(self._scratch.take(handle.shape.numel() * torch.float32.itemsize), torch.float32)
        self._session.runtime.read_values(handle.id, kind, values.data_ptr())
        return _flat(values, dtype)


class EngineSink:
    """Receives the tensors that an engine holds on one rank."""

    def __init__(
        self, session: Session, part: Part = Part.EVERYTHING, params: Mapping[str, nn.Parameter] | None = None
    ):
        """``params``: by their names in the checkpoint; None: all parameters of the module."""
        self._session = session
        self._with_states = part is Part.EVERYTHING
        self.left_out: set[tuple[str, str]] = set()
        """Keys of tensors that are not wanted."""
        self._sharded = session.chunk_ranks.size > 1
        self._params = dict(named_params(session.module)) if params is None else dict(params)
        self._buffers = dict(_stored_buffers(session.module))
        self._managed_states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}

    def wanted(self) -> Iterator[TensorRange]:
        """All parameters, states of trainable ones, and buffers, without :attr:`left_out`."""
        yield from (item for item in self._all() if item.key not in self.left_out)

    def _all(self) -> Iterator[TensorRange]:
        for name, param in self._params.items():
            yield self._range(name, kind_of(param), param, param.dtype)
            if self._with_states and has_states(param):
                for kind in state_kinds(self._session):
                    yield self._range(name, kind, param, _state_dtype(param))
        for name, buffer in self._buffers.items():
            yield _range(name, "buffer", buffer.shape, buffer.dtype)

    def _range(self, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype) -> TensorRange:
        if self._sharded and isinstance(param, ChunkedParameter):
            return _own_range(self._session, name, kind, param, dtype)
        return _range(name, kind, param.shape, dtype)

    def write(self, wanted: TensorRange, values: torch.Tensor) -> None:
        """Writes one wanted range into the engine; see ``ShardSink.write``."""
        if wanted.order is not None:
            self._write_own(wanted, values)
            return
        values = values.view(wanted.shape)
        if wanted.name in self._buffers:
            with torch.no_grad():
                self._buffers[wanted.name].copy_(values)
            return
        self.write_param(self._params[wanted.name], wanted.kind, values)

    def write_param(self, param: nn.Parameter, kind: Kind, values: torch.Tensor) -> None:
        """Writes a whole tensor. Each of several ranks keeps its shard."""
        if isinstance(param, ChunkedParameter):
            handle = param._patrickstar
            self._session.observer.write_values(handle, _array_of(self._session, kind), handle.own(values))
        elif kind in STATE_KINDS:
            self._managed_states.setdefault(param, {})[kind] = values.clone()
        else:
            with torch.no_grad():
                param.data.copy_(values)

    def _write_own(self, wanted: TensorRange, values: torch.Tensor) -> None:
        handle = self._params[wanted.name]._patrickstar
        if handle.id in self._session.plan_of_params.quantized:
            self._check_own(handle, wanted, values)
            return
        values = values.to(torch.float32).contiguous()
        # The core expects the parameter's address, and reads this rank's shard.
        address = values.data_ptr() - (wanted.begin - handle.whole_begin) * torch.float32.itemsize
        array = _array_of(self._session, wanted.kind)
        self._session.runtime.write_values(handle.id, array, address, _C.Tier.HOST)

    def _check_own(self, handle: ParamHandle, wanted: TensorRange, values: torch.Tensor) -> None:
        """Raises ValueError unless this rank's part of a quantised parameter equals ``values``.

        Different values could only be quantised from the whole parameter.
        """
        own = torch.empty(wanted.numel, dtype=torch.float32, device="cpu")
        self._session.runtime.read_own_values(handle.id, _C.ArrayKind.MASTER, own.data_ptr())
        if not own.to(wanted.dtype).equal(values.to(wanted.dtype)):
            raise ValueError(
                f"{wanted.name} is quantised, and the checkpoint has other values of it than this engine; with several "
                "ranks build the engine from the weights that the checkpoint was trained on, or load on one rank"
            )

    def set_step_counts(self, counts: Mapping[nn.Parameter, int]) -> None:
        """Sets the number of updates of each parameter, after all values. A count of 0 removes its states.

        Does nothing if states are not wanted.
        """
        if not self._with_states:
            return
        for param in self._params.values():
            count = counts.get(param, 0)
            if not has_states(param) or count == step_count(self._session, param) == 0:
                continue
            if isinstance(param, ChunkedParameter) and count > 0:
                self._session.runtime.set_step_count(param._patrickstar.id, count)
            else:
                states = {
                    "step": torch.tensor(float(count), dtype=torch.float32, device="cpu"),
                    **self._managed_states.pop(param, {}),
                }
                self._session.states.set_optimizer_state(param, states if count > 0 else {})


def _own_range(session: Session, name: str, kind: Kind, param: nn.Parameter, dtype: torch.dtype) -> TensorRange:
    """This rank's part of a parameter in a chunk, in memory order."""
    handle = param._patrickstar
    begin, numel, _ = session.layout.shard_of(handle.id)
    begin += handle.whole_begin
    order = tuple(sorted(range(len(handle.shape)), key=lambda dim: -handle.stride[dim]))
    shape = tuple(handle.whole_shape)
    return TensorRange(name=name, kind=kind, shape=shape, dtype=dtype, begin=begin, end=begin + numel, order=order)


def state_kinds(session: Session) -> tuple[Kind, ...]:
    """The kinds of states that the session's optimizer has."""
    return tuple(kind for kind in STATE_KINDS if kind in session.states.arrays)


def _array_of(session: Session, kind: Kind) -> _C.ArrayKind:
    return session.states.arrays[kind] if kind in STATE_KINDS else _C.ArrayKind.MASTER


def step_count(session: Session, param: nn.Parameter) -> int:
    """Number of updates of a parameter."""
    if isinstance(param, ChunkedParameter):
        return session.runtime.step_count(param._patrickstar.id) if param._patrickstar.trainable else 0
    return int(session.managed.state_of(param).get("step", 0))


def named_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names in a checkpoint, which are those of an uncompiled module."""
    for name, param in module.named_parameters():
        yield without_wrappers(name), param


def _stored_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in persistent_buffers(module):
        if buffer.layout != torch.strided:
            raise ValueError(f"the buffer {name} is sparse; {SPARSE_BUFFER_REMEDY}")
        yield name, buffer


def kind_of(param: nn.Parameter) -> Kind:
    """Kind of a parameter's value in a checkpoint."""
    if not isinstance(param, ChunkedParameter):
        return "managed"
    return "master" if param._patrickstar.trainable else "frozen"


def _state_dtype(param: nn.Parameter) -> torch.dtype:
    """Dtype of a parameter's optimizer states in a checkpoint."""
    return torch.float32 if isinstance(param, ChunkedParameter) else wide_dtype(param)


def has_states(param: nn.Parameter) -> bool:
    """True if the parameter has optimizer states after an update."""
    if isinstance(param, ChunkedParameter):
        return param._patrickstar.trainable
    return param.requires_grad


def _is_row_major(handle: ParamHandle) -> bool:
    """True for a whole parameter in the order in which a single rank saves it."""
    memory_order = tuple(sorted(range(len(handle.shape)), key=lambda dim: -handle.stride[dim]))
    return handle.part is None and is_row_major(tuple(handle.shape), memory_order)


def _range(name: str, kind: Kind, shape: torch.Size, dtype: torch.dtype) -> TensorRange:
    return TensorRange(name=name, kind=kind, shape=tuple(shape), dtype=dtype, begin=0, end=shape.numel())


def _shard(name: str, kind: Kind, shape: torch.Size, dtype: torch.dtype, read: Any) -> TensorShard:
    return TensorShard(name=name, kind=kind, shape=tuple(shape), dtype=dtype, begin=0, end=shape.numel(), read=read)


def _flat(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional, row-major copy on the CPU."""
    with _C.HostAllocations(), torch.no_grad():
        return values.detach().to("cpu", dtype).contiguous().view(-1)

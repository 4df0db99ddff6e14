"""Broadcast of rank 0's model, as in DDP.

If another rank's model has other values (only rank 0 has loaded weights, say), it gets rank 0's while it moves into
chunks. Without this the shards of different models would be mixed. A rank gets its own part of a parameter that is
divided (:mod:`patrickstar.module.param_ranks`).

Digests are compared before values are sent. Each rank computes a digest of its shard of each parameter, rank 0 those of
all ranks' shards. Only shards that differ are sent, to the rank that keeps them. Equal models, the usual case, cost one
read.

Ranks may create their models differently: rank 0 reads files, the others build theirs on the meta device. Rank 0 moves
its model in pieces, and sends ids and digests of each piece. The others move their own models meanwhile and overwrite
the shards that differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.module.adoption import AdoptedParams
from patrickstar.module.preprocess import ChunkedSpec, SortedParams
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.messages import read_list, reading

_END = b"[]"
_GPU_PIECE = 2**24  # elements that are summed at a time


class FirstRankValues:
    """Moves a model into chunks on all ranks at once, with rank 0's values. All ranks must call the same methods."""

    def __init__(self, ranks: ChunkRanks, params: AdoptedParams):
        self._control = ranks.control
        self._params = params
        self._index = ranks.rank
        self._batches = params.batches()
        self._own: dict[int, str] = {}
        """Digests of this rank's shards, by parameter id."""

    def take_all(self) -> None:
        """Moves this rank's own values in, without communication: other ranks may not have joined yet."""
        for ids in self._batches:
            self._take(ids)

    def share(self) -> None:
        """Exchanges digests and values; afterwards all ranks have rank 0's."""
        if self._index == 0:
            self._lead()
        else:
            self._follow()

    def _take(self, ids: Sequence[int]) -> None:
        for param_id in ids:
            self._own[param_id] = digest(self._part(self._params.source(param_id), param_id, self._index))
        self._params.take(ids)

    def _lead(self) -> None:
        for ids in self._batches:
            if ids and self._control.size > 1:
                self._tell({param_id: self._params.source(param_id) for param_id in ids})
            self._params.take(ids)
        self._control.exchange(_END, "which values come next")

    def _tell(self, sources: dict[int, torch.Tensor]) -> None:
        said = [
            [param_id, *(digest(self._part(source, param_id, rank)) for rank in range(self._control.size))]
            for param_id, source in sources.items()
        ]
        self._control.exchange(json.dumps(said).encode(), "which values come next")
        wanted = self._wanted(b"[]")
        for param_id in sorted({param_id for ids in wanted for param_id in ids}):
            parts = [
                _as_float_bytes(self._part(sources[param_id], param_id, rank)) if param_id in ids else b""
                for rank, ids in enumerate(wanted)
            ]
            self._control.distribute(parts, f"values of {self._params.specs[param_id].name}")

    def _follow(self) -> None:
        while True:
            self._take(next(self._batches, []))  # while rank 0 moves its own
            message = self._control.exchange(b"", "which values come next")[0]
            said = read_list(message, "which values come next", self._is_announced)
            if not said:
                break
            while not all(param_id in self._own for param_id, *_ in said):
                self._take(next(self._batches))
            differ = [param_id for param_id, *digests in said if digests[self._index] != self._own[param_id]]
            wanted = self._wanted(json.dumps(differ).encode())
            for param_id in sorted({param_id for ids in wanted for param_id in ids}):
                (values, *_) = self._control.distribute(
                    [b""] * self._control.size, f"values of {self._params.specs[param_id].name}"
                )
                if param_id in differ:
                    self._write_own(param_id, values)
        self.take_all()

    def _wanted(self, mine: bytes) -> list[list[int]]:
        """Ids of the parameters that each rank needs values for, by rank."""
        what = "which values differ"
        return [read_list(message, what, self._is_param) for message in self._control.exchange(mine, what)]

    def _is_param(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < len(self._params.specs)

    def _is_announced(self, value: Any) -> bool:
        """Validates a received entry: a parameter id followed by one digest per rank."""
        if not isinstance(value, list) or len(value) != 1 + self._control.size:
            return False
        return self._is_param(value[0]) and all(isinstance(item, str) for item in value[1:])

    def _write_own(self, param_id: int, values: bytes) -> None:
        spec = self._params.specs[param_id]
        if spec.quantization is not _C.QuantType.NONE:
            raise _C.StateError(
                f"{spec.name} is to be quantised, which needs all of it, but rank {self._index} has other values than "
                "rank 0, of which it would get a part; load the same weights on every rank"
            )
        begin, numel = self._range(param_id, self._index)
        if len(values) != numel * torch.float32.itemsize:
            raise _C.StateError(
                f"rank 0 sent {len(values)} bytes of {self._params.specs[param_id].name}, {numel} floats are kept here"
            )
        own = torch.frombuffer(bytearray(values), dtype=torch.float32)
        # The core takes the whole parameter's address and reads this rank's shard of it.
        address = own.data_ptr() - begin * torch.float32.itemsize
        self._params.runtime.write_values(param_id, _C.ArrayKind.MASTER, address, _C.Tier.HOST)

    def _range(self, param_id: int, rank: int) -> tuple[int, int]:
        """First element and number of elements of ``rank``'s shard of a parameter, or of its part of one."""
        chunk, offset = self._params.layout.placement(param_id)
        shard = self._params.layout.chunk(chunk)["shard_numel"]
        numel = self._params.specs[param_id].shape.numel()
        index = rank // self._num_parts(param_id)
        begin = min(max(index * shard - offset, 0), numel)
        end = min(max((index + 1) * shard - offset, 0), numel)
        return begin, end - begin

    def _num_parts(self, param_id: int) -> int:
        part = self._params.specs[param_id].part
        return 1 if part is None else part.count

    def _part(self, source: torch.Tensor, param_id: int, rank: int) -> torch.Tensor:
        begin, numel = self._range(param_id, rank)
        begin += rank % self._num_parts(param_id) * self._params.specs[param_id].shape.numel()
        return source.as_strided((source.numel(),), (1,))[begin : begin + numel]


def check_same_model(ranks: RankGroups, params: SortedParams) -> None:
    """Compares all ranks' parameters, in order: names, shapes, dtypes and which are trained.

    Raises:
        DisagreementError: they differ. Every rank raises it; the text lists each rank's parameters.
    """
    chunked = [
        f"{s.name} {tuple(s.shape)} {s.compute_dtype} {s.trained} {s.quantization.name}{_kept(s)}"
        for s in params.chunked
    ]
    managed = [f"{m.name} {tuple(m.param.shape)} {m.param.dtype} stays with PyTorch" for m in params.managed]
    ranks.check_agreement("the model's parameters, in order,", "; ".join(chunked + managed))


def _kept(spec: ChunkedSpec) -> str:
    return "" if spec.part is None else f" in {spec.part.count} parts"


def share_rest(ranks: RankGroups, module: nn.Module, params: SortedParams) -> None:
    """Gives buffers and the parameters that stay with PyTorch rank 0's values.

    Raises:
        DisagreementError: buffers differ in names, shapes or dtypes.
    """
    buffers = dict(module.named_buffers())
    described = [f"{name} {tuple(buffer.shape)} {buffer.dtype}{_sparsity(buffer)}" for name, buffer in buffers.items()]
    ranks.check_agreement("the model's buffers, in order,", "; ".join(described))
    tensors = {**buffers, **{managed.name: managed.param.detach() for managed in params.managed}}
    own = ["; ".join(digest(_flat(part)) for part in _dense_parts(tensor)) for tensor in tensors.values()]
    what = "which buffers differ"
    messages = ranks.control.exchange(json.dumps(own).encode(), what)
    said = [read_list(message, what, lambda item: isinstance(item, str), len(own)) for message in messages]
    for index, (name, tensor) in enumerate(tensors.items()):
        if len({digests[index] for digests in said}) > 1:
            mine = bytes_of_tensor(tensor) if ranks.control.rank == 0 else b""
            values = ranks.control.exchange(mine, f"values of {name}")[0]
            with reading(f"values of {name}"):
                copy_bytes(tensor, values)


def _sparsity(tensor: torch.Tensor) -> str:
    return "" if tensor.layout == torch.strided else f" {tensor.layout} of {num_bytes_of(tensor)} bytes"


def digest(values: torch.Tensor) -> str:
    """Digest of a dense one-dimensional tensor: dtype and a checksum of its bits. CPU and GPU digests of equal values
    differ.
    """
    if values.device.type == "cuda":
        return f"{values.dtype} {values.device.type} {_gpu_checksum(values)}"
    return f"{values.dtype} {values.numel()} {_C.crc32c(bytes_of(values)):08x}"


def _gpu_checksum(values: torch.Tensor) -> int:
    """Sum of the values' bits times squared odd weights, modulo 2^64."""
    bits = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, bits.numel(), _GPU_PIECE):
        piece = bits[begin : begin + _GPU_PIECE].to(torch.int64)
        weights = torch.arange(begin, begin + piece.numel(), device=values.device).mul_(2).add_(1)
        total += (piece * weights * weights).sum()
    return int(total)


def bytes_of_tensor(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, for any dtype, device and layout."""
    parts = [_flat(part) for part in _dense_parts(tensor)]
    return b"".join(map(bytes_of, parts))


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Length of :func:`bytes_of_tensor`."""
    return sum(part.nbytes for part in _dense_parts(tensor))


def copy_bytes(tensor: torch.Tensor, values: bytes) -> None:
    """Copies bytes from :func:`bytes_of_tensor` into ``tensor`` of the same shape and dtype, in place.

    Raises:
        ValueError: the number of bytes is not the tensor's.
    """
    if len(values) != num_bytes_of(tensor):
        raise ValueError(f"{len(values)} bytes for a tensor of {num_bytes_of(tensor)}")
    begin = 0
    for part in _dense_parts(tensor):
        if part.nbytes:
            with _C.HostAllocations(), torch.no_grad():
                piece = bytearray(values[begin : begin + part.nbytes])
                part.copy_(torch.frombuffer(piece, dtype=torch.uint8).view(part.dtype).view(part.shape))
        begin += part.nbytes


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of the tensor's memory: itself, or the indices and values of a sparse one."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)


def _as_float_bytes(values: torch.Tensor) -> bytes:
    """The values as CPU float32 bytes, the format of the core's ``write_values``."""
    with _C.HostAllocations():
        return bytes_of_tensor(values.detach().to(torch.float32).cpu())

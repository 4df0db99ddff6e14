"""Moves a module into an engine and back: parameters become views of chunks, the rest goes to the engine's device.

Each parameter's own memory is freed as soon as its values are in a chunk. At most one batch of values (a chunk, or a
unit of a meta-device model) exists twice. Up to 64 MiB of freed values may wait in the heap.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from patrickstar import _C
from patrickstar.module.chunked_parameter import become_chunked, become_ordinary, become_tied
from patrickstar.module.materialize import DeferredInit
from patrickstar.module.observer import Observer
from patrickstar.module.param_handle import ParamHandle
from patrickstar.module.param_ranks import RankPart
from patrickstar.module.preprocess import ChunkedSpec, SortedParams, statistics_dtype

logger = logging.getLogger("patrickstar")

_UNIT_BYTES = 512 * 2**20  # a meta-device model gets memory for at most so much at a time
_TRIMMED_BYTES = 64 * 2**20  # freed bytes after which the heap is trimmed


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormerHandle:
    """Properties of a parameter that survive a move to other chunks; the fields are those of ``ParamHandle``."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    part: RankPart | None
    trainable: bool
    original_dtype: torch.dtype
    original_device: torch.device


def _trim_heap() -> None:
    """Returns freed heap memory to the system; otherwise the peak would hold both copies of the model."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class AdoptedParams:
    """The parameters of one module, before, during and after their time in chunks.

    ``for ids in params.batches(): params.take(ids)`` moves them in.
    """

    def __init__(
        self,
        plan: SortedParams,
        layout: _C.Layout,
        runtime: _C.Runtime,
        observer: Observer,
        device: torch.device,
        deferred: DeferredInit | None,
    ):
        self.specs: list[ChunkedSpec] = plan.chunked
        """Parameters that go into chunks; the index is the parameter's id in the core."""
        self.layout = layout
        self.runtime = runtime
        self._observer = observer
        self._device = device
        self._deferred = deferred
        self._chunks = [layout.chunk(chunk)["params"] for chunk in range(layout.num_chunks)]
        self._missing = [len(params) for params in self._chunks]
        self._storages: list[torch.UntypedStorage] = []
        self._taken: set[int] = set()
        self._untrimmed_bytes = 0

    def batches(self) -> Iterator[list[int]]:
        """Yields ids of parameters that have values now. Call :meth:`take` with each batch before the next one is
        drawn: only one batch may exist beside its chunks.
        """
        ids = {spec.param: index for index, spec in enumerate(self.specs)}
        if self._deferred is not None:
            quantized = {spec.param for spec in self.specs if spec.quantization is not _C.QuantType.NONE}
            for params in self._deferred.units(self._device, _UNIT_BYTES, read_on_host=quantized):
                yield [ids[param] for param in params if param in ids]
        for params in self._chunks:  # parameters that were not on the meta device
            yield [param_id for param_id in params if param_id not in self._taken]

    def source(self, param_id: int) -> torch.Tensor:
        """The whole values of a parameter that is not in a chunk yet: dense, in its memory order; row-major if ranks
        have parts of it.
        """
        data = self.specs[param_id].param.detach()
        if self.specs[param_id].part is not None:
            return data.contiguous()
        if torch.empty_like(data, device="meta").stride() != data.stride():  # overlapping or with gaps
            data = data.contiguous()
        return data

    def take(self, ids: Iterable[int]) -> None:
        """Moves parameters into chunks and makes them views of the chunks' storages."""
        if not self._storages:
            self._storages = [self._bind_storage(chunk) for chunk in range(len(self._chunks))]
        for param_id in ids:
            chunk, _ = self.layout.placement(param_id)
            self._untrimmed_bytes += self.specs[param_id].param.nbytes
            self._adopt(param_id)
            self._taken.add(param_id)
            self._missing[chunk] -= 1
            if self._missing[chunk] == 0:
                self.runtime.seal_storage(chunk)
        if self._untrimmed_bytes >= _TRIMMED_BYTES:
            self._untrimmed_bytes = 0
            _trim_heap()

    def _bind_storage(self, chunk: int) -> torch.UntypedStorage:
        with _C.HostAllocations():
            storage = torch.empty(0, device=self._device).untyped_storage()
        self.runtime.bind_storage(chunk, storage._cdata)
        return storage

    def _adopt(self, param_id: int) -> None:
        spec, data = self.specs[param_id], self.source(param_id)
        if spec.part is not None:
            data = spec.part.of(data)
        former = FormerHandle(
            name=spec.name,
            shape=data.shape,
            stride=data.stride(),
            part=spec.part,
            trainable=spec.trained,
            original_dtype=data.dtype,
            original_device=spec.original_device,
        )
        handle = self._handle_of(param_id, former)
        self._observer.write_values(handle, _C.ArrayKind.MASTER, data)
        self._become_view(param_id, handle)

    def host_bytes_when_released(self) -> int:
        """Bytes that the ordinary CPU parameters will take after :meth:`release`."""
        handles = (self.specs[param_id].param._patrickstar for param_id in self._taken)
        on_host = (handle for handle in handles if handle.original_device.type == "cpu")
        return sum(math.prod(handle.whole_shape) * handle.original_dtype.itemsize for handle in on_host)

    def _in_order_of_release(self) -> list[int]:
        """Order in which :meth:`release` frees chunks. On one rank, chunks that rest on the host come first: freeing
        them makes room for ordinary parameters. Several ranks read together, so all use the same order.
        """
        chunks = range(len(self._chunks))
        if self.layout.num_ranks > 1:
            return list(chunks)
        return sorted(chunks, key=lambda chunk: self.runtime.resting_tier(chunk) == _C.Tier.DEVICE)

    def release(self) -> None:
        """Makes ordinary parameters of the original dtype and device, chunk by chunk.

        Chunks keep only the compute dtype of frozen parameters, so these come back rounded; the log says so. If values
        cannot be read (another rank is gone), parameters are left without elements and the error is raised at the end.
        """
        self._tell_of_rounded()
        failure: Exception | None = None
        for chunk in self._in_order_of_release():
            for param_id in self._taken.intersection(self._chunks[chunk]):
                handle: ParamHandle = self.specs[param_id].param._patrickstar
                values = None
                if failure is None:
                    try:
                        values = handle.whole(self._observer.read_values(handle, _C.ArrayKind.MASTER))
                    except Exception as error:
                        failure = error
                self._give_back(param_id, values)
            self.runtime.release_chunk(chunk)
        self._taken.clear()
        if failure is not None:
            raise failure

    def undo(self) -> None:
        """Undoes :meth:`take`. Parameters from the meta device return there, so that adoption can be tried again."""
        if self._deferred is None:
            self.release()
        else:
            self.discard()
            self._deferred.undo()

    def _tell_of_rounded(self) -> None:
        specs = [self.specs[param_id] for param_id in sorted(self._taken)]
        rounded = [
            spec
            for spec in specs
            if not spec.trained
            and spec.quantization is _C.QuantType.NONE
            and spec.param._patrickstar.original_dtype.itemsize > spec.compute_dtype.itemsize
        ]
        num_quantized = sum(spec.quantization is not _C.QuantType.NONE for spec in specs)
        if num_quantized:
            logger.info("%d quantised parameters are given back with their dequantised values", num_quantized)
        if rounded:
            logger.info(
                "%d frozen parameters (%s, ...) are given back with values rounded to %s, which chunks keep of them; "
                "load them again where more is needed",
                len(rounded),
                rounded[0].name,
                str(rounded[0].compute_dtype).removeprefix("torch."),
            )

    def discard(self) -> None:
        """Frees all chunks; the parameters become ordinary ones without elements."""
        for chunk, params in enumerate(self._chunks):
            for param_id in self._taken.intersection(params):
                self._give_back(param_id, None)
            self.runtime.release_chunk(chunk)
        self._taken.clear()

    def evict_all(self) -> list[FormerHandle]:
        """Frees all chunks before :meth:`take_over` with another layout.

        Parameters become ordinary ones that keep their shapes and have no memory. All parameters must have been taken.

        Returns:
            their former handles, by id.
        """
        former = []
        for spec in self.specs:
            handle: ParamHandle = spec.param._patrickstar
            fields = {field.name: getattr(handle, field.name) for field in dataclasses.fields(FormerHandle)}
            former.append(FormerHandle(**fields))
        self.take_back()
        return former

    def take_back(self) -> None:
        """Undoes :meth:`take_over` at any point of it: parameters are as :meth:`evict_all` leaves them."""
        for param_id in self._taken:
            spec = self.specs[param_id]
            shape = spec.param._patrickstar.shape
            with _C.HostAllocations():
                for param in (spec.param, *spec.ties):
                    become_ordinary(param, torch.zeros(1, dtype=spec.compute_dtype, device="cpu").expand(shape))
        for chunk in range(len(self._chunks)):
            self.runtime.release_chunk(chunk)
        self._taken.clear()

    def take_over(self, former: Sequence[FormerHandle], fill: Callable[[], None]) -> None:
        """Makes the parameters that :meth:`evict_all` left views of these chunks.

        Args:
            former: the result of :meth:`evict_all`.
            fill: writes the values of all parameters into this runtime.
        """
        self._storages = [self._bind_storage(chunk) for chunk in range(len(self._chunks))]
        fill()
        for chunk, params in enumerate(self._chunks):
            for param_id in params:
                self._become_view(param_id, self._handle_of(param_id, former[param_id]))
                self._taken.add(param_id)
            self._missing[chunk] = 0
            self.runtime.seal_storage(chunk)

    def _handle_of(self, param_id: int, former: FormerHandle) -> ParamHandle:
        chunk, offset = self.layout.placement(param_id)
        begin, numel, _ = self.layout.shard_of(param_id)
        return ParamHandle(
            id=param_id,
            chunk=chunk,
            storage=self._storages[chunk]._cdata,
            offset=offset,
            share=slice(begin, begin + numel),
            dtype=self.specs[param_id].compute_dtype,
            observer=self._observer,
            uses=self._observer.uses,
            **vars(former),
        )

    def _become_view(self, param_id: int, handle: ParamHandle) -> None:
        spec, storage = self.specs[param_id], self._storages[handle.chunk]
        for param, become in ((spec.param, become_chunked), *((tied, become_tied) for tied in spec.ties)):
            with torch.no_grad():
                view = torch.empty(0, dtype=handle.dtype, device=storage.device)
                view.set_(storage, handle.offset, handle.shape, handle.stride)
            param.grad = None  # left from an earlier backward; autograd would add to it
            become(param, view, handle)

    def _give_back(self, param_id: int, values: torch.Tensor | None) -> None:
        param = self.specs[param_id].param
        handle: ParamHandle = param._patrickstar
        with _C.HostAllocations():
            values = torch.empty(0, device="cpu") if values is None else values
            become_ordinary(param, values.to(device=handle.original_device, dtype=handle.original_dtype))
        for tied in self.specs[param_id].ties:
            become_ordinary(tied, param.data)


class MovedRest:
    """Buffers and the parameters that stay with PyTorch, moved to the engine's device.

    Embeddings that are to stay in host memory are moved there. Buffers keep their dtype; running statistics get the
    dtype that kernels take. On the simulated device tensors are copied, so that they count as its memory.
    """

    def __init__(self, module: nn.Module, plan: SortedParams, compute_dtype: torch.dtype, device: torch.device):
        self._buffers: list[tuple[nn.Module, str, torch.device, torch.dtype]] = []
        self._managed: list[tuple[nn.Parameter, torch.device]] = []
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    self._buffers.append((child, name, buffer.device, buffer.dtype))
                    if buffer not in moved:  # modules may share a buffer
                        moved[buffer] = _moved(buffer, device)
                    child._buffers[name] = moved[buffer]
            dtype = statistics_dtype(child, compute_dtype)
            if dtype is not None:
                child.running_mean, child.running_var = child.running_mean.to(dtype), child.running_var.to(dtype)
        for managed in plan.managed:
            self._managed.append((managed.param, managed.param.device))
            if not managed.on_host:
                managed.param.data = _moved(managed.param.data, device)
            elif managed.param.device.type != "cpu":
                managed.param.data = managed.param.data.cpu()

    def restore(self) -> None:
        """Moves everything back to where it was, with its current values. Buffers that were put on the meta device stay
        there.
        """
        with _C.HostAllocations(), torch.no_grad():
            for child, name, device, dtype in self._buffers:
                buffer = child._buffers.get(name)
                if buffer is not None and not buffer.is_meta:
                    child._buffers[name] = buffer.to(device, dtype if isinstance(child, _NormBase) else buffer.dtype)
            for param, device in self._managed:
                if param.device != device:
                    param.data = param.data.to(device)


@torch.no_grad()
def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=device.type == "cpu" and tensor.device.type == "cpu")

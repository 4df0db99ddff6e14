"""Measures checkpointed calls in one step in which they save nothing.

measurement = CallMeasurement(runtime, device, param_storages)
calls.observe(measurement)
...  # forwards and backwards of a step
measured = measurement.finish()
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.activations.selective_recomputation import ComparedProducts, Contexts, OperationMode, is_product
from patrickstar.planning.recomputation import MeasuredCall, typical_calls


@dataclasses.dataclass
class _Record:
    number: int
    forward_begin: int
    forward_end: int = -1
    recompute_begin: int = -1
    recompute_end: int = -1
    saved_bytes: int = 0
    product_bytes: int = 0
    product_times: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    recompute_times: list[Any] = dataclasses.field(default_factory=list)


class CallMeasurement:
    """See the module's docstring. An observer of :class:`CheckpointCalls`.

    Args:
        runtime: its step is recorded.
        device: of the engine.
        storages: addresses (``_cdata``) of storages that hold parameters.
    """

    def __init__(self, runtime: _C.Runtime, device: torch.device, storages: Collection[int]):
        self._runtime = runtime
        self._device = device
        self._storages = storages
        self._records: list[_Record] = []
        self._recomputed: _Record | None = None
        self._proof = ComparedProducts()
        self.is_quadratic = False
        """True if a tensor of [..., tokens, tokens] was saved, as attention without a fused kernel does."""

    @property
    def has_calls(self) -> bool:
        """True if a call was recomputed."""
        return any(record.recompute_begin >= 0 for record in self._records)

    @property
    def products_differ(self) -> bool:
        """True if a product was overwritten, or had other bits when it was recomputed."""
        return self._proof.differs

    def contexts(self, number: int) -> Contexts | None:
        """See :class:`CallObserver`. Proves products of some calls: the proof takes time, which is not to be measured.

        Calls 0, 1, 2, 4, 8, ... stand for models whose layers alternate or change with depth.
        """
        return self._proof.contexts() if number & (number - 1) == 0 else None

    @contextlib.contextmanager
    def forward(self, number: int, args: tuple[Any, ...]) -> Iterator[None]:
        """Counts the bytes that autograd would save without a checkpoint, beside parameters and the call's inputs."""
        record = _Record(number, self._runtime.num_accesses - 1)
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        known: dict[int, Any] = {}
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def count(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            key = storage._cdata
            alive = known.get(key)
            is_new = alive is None or alive() is None
            if is_new and key not in self._storages and key not in inputs and tensor.device == self._device:
                known[key] = weakref.ref(storage)
                record.saved_bytes += storage.nbytes()
                self.is_quadratic |= tensor.dim() > 2 and tensor.shape[-1] == tensor.shape[-2]
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield
        record.forward_end = self._runtime.num_accesses - 1
        self._records.append(record)

    @contextlib.contextmanager
    def recomputation(self, number: int) -> Iterator[None]:
        """Notes the accesses and the time of a recomputation."""
        waiting = [record for record in self._records if record.number == number and record.recompute_begin < 0]
        if not waiting:  # a retained graph is recomputed again
            yield
            return
        record = waiting[-1]
        record.recompute_begin = self._runtime.num_accesses - 1
        record.recompute_times.append(_now(self._device))
        self._recomputed = record
        try:
            yield
        finally:
            self._recomputed = None
            record.recompute_end = self._runtime.num_accesses - 1
            record.recompute_times.append(_now(self._device))

    def operations(self) -> contextlib.AbstractContextManager[Any]:
        """Within a recomputation: counts the bytes and times of its products."""
        return contextlib.nullcontext() if self._recomputed is None else _ProductMeter(self._recomputed, self._device)

    def finish(self, stalls: Sequence[float]) -> list[MeasuredCall]:
        """The measured calls, in the order of their forwards. Waits for the device.

        Args:
            stalls: seconds by access of the step for which its computation waited.
        """
        return typical_calls(
            MeasuredCall(
                number=record.number,
                forward_begin=record.forward_begin,
                forward_end=record.forward_end,
                recompute_begin=record.recompute_begin,
                recompute_end=record.recompute_end,
                saved_bytes=record.saved_bytes,
                product_bytes=record.product_bytes,
                product_seconds=sum(_seconds_between(*times) for times in record.product_times),
                recompute_seconds=max(
                    _seconds_between(*record.recompute_times)
                    - sum(stalls[record.recompute_begin + 1 : record.recompute_end + 1]),
                    0.0,
                ),
            )
            for record in self._records
            if record.recompute_begin >= 0
        )


class _ProductMeter(OperationMode):
    """Mode of a recomputation: adds its products' bytes and times to ``record``."""

    def __init__(self, record: _Record, device: torch.device):
        super().__init__()
        self._record = record
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_product(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        begin = _now(self._device)
        given = func(*args, **(kwargs or {}))
        self._record.product_times.append((begin, _now(self._device)))
        results = (given,) if isinstance(given, torch.Tensor) else given
        self._record.product_bytes += sum(value.nbytes for value in results if isinstance(value, torch.Tensor))
        return given


def _now(device: torch.device) -> Any:
    """A point in time of the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3

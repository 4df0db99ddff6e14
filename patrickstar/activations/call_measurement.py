"""Measures checkpointed calls in one step in which they save nothing.

measurement = CallMeasurement(position, clock_of(device), device, param_storages, ComparedProducts())
calls.observe(measurement)
...  # forwards and backwards of a step
measured = measurement.finish()
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from patrickstar.activations.selective_recomputation import ComparedProducts, Contexts, OperationMode, is_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCall:
    """One checkpointed call of a step in which it saved nothing. Positions count accesses of the step's timeline."""

    number: int
    """Number of the call within its forward."""
    forward_begin: int
    """Access that runs when the call begins; -1: none yet."""
    forward_end: int
    recompute_begin: int
    """Access that runs when its recomputation begins."""
    recompute_end: int
    saved_bytes: int
    """Bytes that autograd saves without a checkpoint, beside parameters and the call's inputs."""
    product_bytes: int
    """Bytes of the results of matrix products and attention, those of the recomputation."""
    num_products: int
    """Number of these products."""
    product_seconds: float
    """Device time of these in the recomputation."""
    recompute_seconds: float
    """Device time of the recomputation, without waits."""

    def without(self, seconds: float) -> MeasuredCall:
        """The call whose recomputation has ``seconds`` of its attention less to do."""
        times = {
            "recompute_seconds": self.recompute_seconds - seconds,
            "product_seconds": self.product_seconds - seconds,
        }
        return dataclasses.replace(self, **times)


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
        position: gives the access that runs, by number within the step; -1: none yet.
        now: gives a point in time of the device's work: seconds, or a recorded event.
        device: of activations.
        is_param: tests for the address (``_cdata``) of a storage that holds parameters.
        proof: of products that are to be kept; None: they are not compared.
    """

    def __init__(
        self,
        position: Callable[[], int],
        now: Callable[[], Any],
        device: torch.device,
        is_param: Callable[[int], bool],
        proof: ComparedProducts | None,
    ):
        self._position = position
        self._now = now
        self._device = device
        self._is_param = is_param
        self._proof = proof
        self._records: list[_Record] = []
        self._recomputed: _Record | None = None
        self.is_quadratic = False
        """True if a tensor of [..., tokens, tokens] was saved, as attention without a fused kernel does."""

    @property
    def has_calls(self) -> bool:
        """True if a call was recomputed."""
        return any(record.recompute_begin >= 0 for record in self._records)

    @property
    def products_differ(self) -> bool:
        """True if a product was overwritten, or had other bits when it was recomputed."""
        return self._proof is not None and self._proof.differs

    def contexts(self, number: int) -> Contexts | None:
        """See :class:`CallObserver`. Proves products of some calls: the proof takes time, which is not to be measured.

        Calls 0, 1, 2, 4, 8, ... stand for models whose layers alternate or change with depth.
        """
        return self._proof.contexts() if self._proof is not None and number & (number - 1) == 0 else None

    @contextlib.contextmanager
    def forward(self, number: int, args: tuple[Any, ...]) -> Iterator[None]:
        """Counts the bytes that autograd would save without a checkpoint, beside parameters and the call's inputs."""
        record = _Record(number, self._position())
        inputs = {_storage(arg)._cdata for arg in args if isinstance(arg, torch.Tensor)}
        known: dict[int, Any] = {}
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def count(tensor: torch.Tensor) -> Any:
            storage = _storage(tensor)
            key = storage._cdata
            alive = known.get(key)
            is_new = alive is None or alive() is None
            if is_new and not self._is_param(key) and key not in inputs and tensor.device == self._device:
                known[key] = weakref.ref(storage)
                record.saved_bytes += storage.nbytes()
                self.is_quadratic |= tensor.dim() > 2 and tensor.shape[-1] == tensor.shape[-2]
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield
        record.forward_end = self._position()
        self._records.append(record)

    @contextlib.contextmanager
    def recomputation(self, number: int) -> Iterator[None]:
        """Notes the accesses and the time of a recomputation."""
        waiting = [record for record in self._records if record.number == number and record.recompute_begin < 0]
        if not waiting:  # a retained graph is recomputed again
            yield
            return
        record = waiting[-1]
        record.recompute_begin = self._position()
        record.recompute_times.append(self._now())
        self._recomputed = record
        try:
            yield
        finally:
            self._recomputed = None
            record.recompute_end = self._position()
            record.recompute_times.append(self._now())

    def operations(self) -> contextlib.AbstractContextManager[Any]:
        """Within a recomputation: counts the bytes and times of its products."""
        return contextlib.nullcontext() if self._recomputed is None else _ProductMeter(self._recomputed, self._now)

    def finish(self, stalls: Sequence[float] = ()) -> list[MeasuredCall]:
        """The measured calls, in the order of their forwards. Waits for the device.

        Args:
            stalls: seconds by access of the step for which its computation waited; empty: it never did.
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
                num_products=len(record.product_times),
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


def typical_calls(calls: Iterable[MeasuredCall]) -> list[MeasuredCall]:
    """The calls, with times of the lower quartile of calls that save as much. Others were disturbed."""
    given = list(calls)
    alike: dict[tuple[int, int], list[MeasuredCall]] = {}
    for call in given:
        alike.setdefault((call.saved_bytes, call.product_bytes), []).append(call)

    def typical(call: MeasuredCall, field: str) -> float:
        same = sorted(getattr(other, field) for other in alike[call.saved_bytes, call.product_bytes])
        return min(getattr(call, field), same[len(same) // 4])

    fields = ("recompute_seconds", "product_seconds")
    return [dataclasses.replace(call, **{field: typical(call, field) for field in fields}) for call in given]


class _ProductMeter(OperationMode):
    """Mode of a recomputation: adds its products' bytes and times to ``record``."""

    def __init__(self, record: _Record, now: Callable[[], Any]):
        super().__init__()
        self._record = record
        self._now = now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_product(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        begin = self._now()
        given = func(*args, **(kwargs or {}))
        self._record.product_times.append((begin, self._now()))
        results = (given,) if isinstance(given, torch.Tensor) else given
        self._record.product_bytes += sum(value.nbytes for value in results if isinstance(value, torch.Tensor))
        return given


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The tensor's storage. Tensor subclasses, such as masks of shared sequences, do not see it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def clock_of(device: torch.device) -> Callable[[], Any]:
    """The clock of a device's work."""
    return _recorded_event if device.type == "cuda" else time.perf_counter


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3

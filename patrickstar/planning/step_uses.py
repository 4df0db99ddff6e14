"""The parameter uses of a training step, as a trace records them (planning/uses.py)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set
from typing import Any

from patrickstar import _C
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.leaving import ActivationLevels, Copies, LinkedDevice, Span, leave

_AMPLE_BYTES = 2**62


@dataclasses.dataclass(slots=True)
class Use:
    """One call of the core, and the device work until the next one."""

    call: _C.UseCall
    params: list[int]
    until: _C.HoldUntil | None = None
    begin: int = 0
    end: int = 0
    seconds: float = 0.0
    spans: list[Span] = dataclasses.field(default_factory=lambda: [Span()])
    copies: Copies = dataclasses.field(default_factory=Copies)
    flops: float = 0.0
    """FLOPs of matrix products until the next use."""
    num_operations: int = 0
    """Kernels that are launched until the next use."""
    clock: int = dataclasses.field(default=0, compare=False)
    """The recorder's clock before the call."""

    @property
    def activation_peak_bytes(self) -> int:
        """Highest activation memory until the next use."""
        return max(span.peak_bytes for span in self.spans)


def _kept() -> Any:
    """A field for results of methods."""
    return dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepUses:
    """The uses of one step."""

    uses: list[Use]
    flops: float
    """FLOPs of all matrix products, including recomputation."""
    num_operations: int
    """Operations that launch a kernel: neither views nor allocations."""
    static_bytes: int
    """Part of the activation memory: buffers, and parameters outside chunks."""
    module_params: list[list[int]]
    """Chunked parameters by owning module."""
    checkpoints: bool = False
    """True if layers of a Hugging Face model are recomputed in backward."""
    calls: list[MeasuredCall] = dataclasses.field(default_factory=list)
    """Checkpointed calls that may save activations. Positions count uses."""
    is_quadratic: bool = False
    """True if attention saves tensors of [..., tokens, tokens]."""
    _levels: dict[LinkedDevice, ActivationLevels] = _kept()
    _leveled: dict[tuple[int, int], StepUses] = _kept()

    @functools.cached_property
    def peaks(self) -> list[int]:
        """By use: highest activation memory until the next one."""
        return [use.activation_peak_bytes for use in self.uses]

    def forward_flops(self, params: Set[int]) -> float:
        """Returns the FLOPs of forward from each use of ``params`` to the next use of other parameters."""
        flops, is_theirs = 0.0, False
        for use in self.uses:
            if use.call == _C.UseCall.END_FORWARD:
                break
            if use.params:
                is_theirs = not params.isdisjoint(use.params)
            flops += use.flops if is_theirs else 0.0
        return flops

    def leaving(self, device: LinkedDevice) -> ActivationLevels:
        """Returns the activation memory with offload. Keeps it, for layouts of other states and sizes."""
        ample = self._levels_in(dataclasses.replace(device, room_bytes=_AMPLE_BYTES))
        return ample if device.room_bytes >= ample.enough_room_bytes else self._levels_in(device)

    def _levels_in(self, device: LinkedDevice) -> ActivationLevels:
        if device not in self._levels:
            self._levels[device] = leave([use.spans for use in self.uses], self.static_bytes, device)
        return self._levels[device]

    def with_activation_levels(self, first: ActivationLevels | None, later: ActivationLevels | None) -> StepUses:
        """Returns the uses with the ``first`` step's peaks of activation memory, and with the copies and savings of
        ``later`` steps, both of :meth:`leaving`. None: no offload.
        """
        if first is None and later is None:
            return self
        key = (id(first), id(later))
        if key not in self._leveled:
            self._leveled[key] = self._with_levels(first, later)
        return self._leveled[key]

    def _with_levels(self, first: ActivationLevels | None, later: ActivationLevels | None) -> StepUses:
        count = len(self.uses)
        peaks = self.peaks if first is None else first.peaks
        saved = (0.0,) * count if later is None else later.saved_seconds
        copies = (Copies(),) * count if later is None else later.copies
        uses = [
            Use(use.call, use.params, use.until, use.begin, use.end, use.seconds - less, [Span(None, peak)], copied)
            for use, peak, less, copied in zip(self.uses, peaks, saved, copies, strict=True)
        ]
        calls = [call.without(sum(saved[call.recompute_begin : call.recompute_end + 1])) for call in self.calls]
        return dataclasses.replace(self, uses=uses, calls=calls)


class UseRecorder(_C.UseListener):
    """Records the observer's calls in place of the core."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self._clock = 0

    def clear(self) -> None:
        """Drops the recorded uses."""
        self.uses, self._clock = [], 0

    def note(self, call: _C.UseCall, params: list[int] | None = None, **fields: Any) -> None:
        """Records a call of the core."""
        self.uses.append(Use(call, params or [], clock=self._clock, **fields))

    def tick(self) -> int:
        """Returns the time of a new event."""
        self._clock += 1
        return self._clock

    def open_scope(self, params: list[int], until: _C.HoldUntil) -> int:
        """Records the begin of a module's call and returns the time."""
        self.note(_C.UseCall.OPEN_SCOPE, params, until=until)
        return self.tick()

    def close_scope(self) -> None:
        """Records the end of the innermost module call."""
        self.note(_C.UseCall.CLOSE_SCOPE)

    def touch(self, params: list[int]) -> int:
        """Records an operation that will use ``params``."""
        self.note(_C.UseCall.TOUCH, params)
        return self.tick()

    def enter_backward(self, begin: int, end: int, params: list[int]) -> None:
        """Records the coming backward of a use that ran in [begin, end]."""
        self.note(_C.UseCall.ENTER_BACKWARD, params, begin=begin, end=end)

    def has_gradient(self, param: int) -> bool:
        """Returns False: gradients are not kept."""
        return False

"""What the simulator says of a step (csrc/plan/simulator.h), and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C

_RATES = tuple(name for name, member in vars(_C.Rates).items() if isinstance(member, property))
_EARLIER_RATES = {"device_memory_gbps": 0.0}
"""Of what plans of earlier versions do not name."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step in the steady state."""

    seconds: float
    """From the end of one step to the end of the next."""
    compute_seconds: float
    """Forward and backward on the GPU, when nothing waits."""
    device_adam_seconds: float
    """Adam updates on the GPU, on its compute queue."""
    upload_seconds: float
    """The upload queue is busy."""
    download_seconds: float
    """The download queue is busy."""
    gather_seconds: float
    """The queue of gathers is busy (several ranks)."""
    scatter_seconds: float
    """The queue of scatters is busy (several ranks)."""
    host_adam_seconds: float
    """The host is busy with Adam updates."""
    stall_seconds: dict[str, float]
    """What the GPU waited for: ``upload``, ``memory``, ``host_update``, ``launch``, ``collective``."""
    uploaded_bytes: int
    """From host to device, per rank and step, activations included that come back."""
    downloaded_bytes: int
    """From device to host, per rank and step, activations included that leave."""
    gathered_bytes: int
    """From other ranks, per step."""
    scattered_bytes: int
    """To other ranks, per step."""
    peak_bytes: int
    """The most device memory in use in the step: tide, optimizer states and chunks."""
    disk_read_seconds: float = 0.0
    """The disk is busy with reads of optimizer states."""
    disk_write_seconds: float = 0.0
    """The disk is busy with writes of optimizer states."""
    disk_read_bytes: int = 0
    """From the disk, per rank and step."""
    disk_written_bytes: int = 0
    """To the disk, per rank and step."""
    visit_seconds: float = 0.0
    """The link is busy with optimizer states that the GPU updates for the host."""
    host_memory_seconds: float = 0.0
    """What transfers and updates take of the host's memory bandwidth, where ranks share it; 0: not counted."""

    @property
    def roofline(self) -> dict[str, float]:
        """Seconds that each resource is busy: no step is shorter than the longest."""
        return {
            "compute": self.compute_seconds + self.device_adam_seconds,
            "upload": self.upload_seconds,
            "download": self.download_seconds,
            "gather": self.gather_seconds,
            "scatter": self.scatter_seconds,
            "host_adam": self.host_adam_seconds,
            "disk_read": self.disk_read_seconds,
            "disk_write": self.disk_write_seconds,
            "host_memory": self.host_memory_seconds,
        }

    @property
    def bound(self) -> str:
        """What bounds the step: the longest of the roofline, or where none fills 90 % of the step, what the GPU waits
        for most.
        """
        name = max(self.roofline, key=lambda key: self.roofline[key])
        if self.roofline[name] >= 0.9 * self.seconds:
            return name
        return max(self.stall_seconds, key=lambda key: self.stall_seconds[key])

    def roofline_line(self) -> str:
        """The roofline in one line; of collectives and the host's memory where there are several ranks."""
        always = ("compute", "upload", "download", "host_adam")
        shown = {name: seconds for name, seconds in self.roofline.items() if seconds > 0 or name in always}
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in shown.items())
        return f"roofline: {parts}; {self.bound.replace('_', ' ')} bounds the step of {self.seconds:.3f} s"


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What the simulator takes beside a plan: measured by an engine (csrc/engine/step_planner.h) or estimated."""

    rates: dict[str, float]
    """The fields of ``_C.Rates``. What a step did not show is so high that it does not matter."""
    compute_seconds: list[float]
    """By moment: the device's work until the next one, without waiting."""
    updates: list[str]
    """By chunk, how it is updated: names of ``_C.Recipe``."""
    activations: list[Sequence[int]] = dataclasses.field(default_factory=list)
    """By moment, bytes of activations that leave the device, that come back, and of these that the moment needs; empty:
    none leave.
    """

    @classmethod
    def of_core(cls, times: Mapping[str, Any]) -> StepTimes:
        """Of the dict that ``_C.Runtime.step_times`` returns."""
        rates = {name: getattr(times["rates"], name) for name in _RATES}
        updates = [update.name for update in times["updates"]]
        activations = [list(copies) for copies in times["activations"]]
        return cls(rates, list(times["compute_seconds"]), updates, activations)

    def as_core(self) -> dict[str, Any]:
        """What ``_C.Runtime.adopt_timeline`` takes.

        Raises:
            KeyError: a rate or an update is not known.
        """
        rates, known = _C.Rates(), {**_EARLIER_RATES, **self.rates}
        for name in _RATES:
            setattr(rates, name, float(known[name]))
        updates = [_C.Recipe.__members__[name] for name in self.updates]
        return {
            "rates": rates,
            "compute_seconds": self.compute_seconds,
            "updates": updates,
            "activations": [tuple(copies) for copies in self.activations],
        }

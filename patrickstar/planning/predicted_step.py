"""The simulator's prediction of a step (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C

_RATES = tuple(name for name, member in vars(_C.Rates).items() if isinstance(member, property))
_EARLIER_RATES = {"device_memory_gbps": 0.0}
"""Rates missing in plans of earlier versions."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step in the steady state."""

    seconds: float
    """From the end of one step to the end of the next."""
    compute_seconds: float
    """Forward and backward on the GPU without waits."""
    device_adam_seconds: float
    """Adam updates on the GPU's compute queue."""
    upload_seconds: float
    """Busy time of the upload queue."""
    download_seconds: float
    """Busy time of the download queue."""
    gather_seconds: float
    """Busy time of the all-gather queue (several ranks)."""
    scatter_seconds: float
    """Busy time of the reduce-scatter queue (several ranks)."""
    host_adam_seconds: float
    """Busy time of the host's updates."""
    stall_seconds: dict[str, float]
    """GPU stalls by cause: ``upload``, ``memory``, ``host_update``, ``launch``, ``collective``."""
    uploaded_bytes: int
    """Host to device, per rank and step, including returning activations."""
    downloaded_bytes: int
    """Device to host, per rank and step, including offloaded activations."""
    gathered_bytes: int
    """From other ranks, per step."""
    scattered_bytes: int
    """To other ranks, per step."""
    peak_bytes: int
    """Highest device memory in the step: activations, optimizer states and chunks."""
    disk_read_seconds: float = 0.0
    """Disk reads of optimizer states."""
    disk_write_seconds: float = 0.0
    """Disk writes of optimizer states."""
    disk_read_bytes: int = 0
    """From the disk, per rank and step."""
    disk_written_bytes: int = 0
    """To the disk, per rank and step."""
    round_trip_seconds: float = 0.0
    """Link time of GPU round-trip updates."""
    host_memory_seconds: float = 0.0
    """Time of transfers and updates at the host's memory bandwidth, if ranks share it; 0: not counted."""

    @property
    def roofline(self) -> dict[str, float]:
        """Busy seconds of each resource; the step takes at least the largest."""
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
        """The bottleneck: the busiest resource, or the largest stall if no resource is busy for 90 % of the step."""
        name = max(self.roofline, key=lambda key: self.roofline[key])
        if self.roofline[name] >= 0.9 * self.seconds:
            return name
        return max(self.stall_seconds, key=lambda key: self.stall_seconds[key])

    def roofline_line(self) -> str:
        """The roofline as a line of text; collectives and host memory only with several ranks."""
        always = ("compute", "upload", "download", "host_adam")
        shown = {name: seconds for name, seconds in self.roofline.items() if seconds > 0 or name in always}
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in shown.items())
        return f"roofline: {parts}; {self.bound.replace('_', ' ')} bounds the step of {self.seconds:.3f} s"


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The simulator's input beside a plan: measured by an engine (csrc/engine/step_planner.h) or estimated."""

    rates: dict[str, float]
    """Fields of ``_C.Rates``. Rates without measurement are so high that they have no effect."""
    compute_seconds: list[float]
    """By access: device work until the next access, without waits."""
    updates: list[str]
    """By chunk: its update, a name of ``_C.Recipe``."""
    activations: list[Sequence[int]] = dataclasses.field(default_factory=list)
    """By access: bytes of activations that leave the device, that return, and that the access needs of the returning
    ones. Empty: no offload.
    """

    @classmethod
    def of_core(cls, times: Mapping[str, Any]) -> StepTimes:
        """Converts the dict of ``_C.Runtime.step_times``."""
        rates = {name: getattr(times["rates"], name) for name in _RATES}
        updates = [update.name for update in times["updates"]]
        activations = [list(copies) for copies in times["activations"]]
        return cls(rates, list(times["compute_seconds"]), updates, activations)

    def as_core(self) -> dict[str, Any]:
        """Returns the argument of ``_C.Runtime.adopt_timeline``.

        Raises:
            KeyError: a rate or an update is unknown.
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

"""Summarises a traced step: time by cause, throughput of each resource, and the bottleneck."""

from __future__ import annotations

import dataclasses
from typing import Any

from patrickstar import _C

CAUSES = {
    _C.StallCause.UPLOAD: "upload",
    _C.StallCause.DOWNLOAD: "download",
    _C.StallCause.HOST_UPDATE: "host update",
    _C.StallCause.HOST_WORK: "host work",
    _C.StallCause.ROOM: "room",
    _C.StallCause.NORM: "norm",
    _C.StallCause.COLLECTIVE: "collective",
}
"""Names of stall causes in files (csrc/common/tracing.h)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one resource in a step."""

    seconds: float
    """Busy time."""
    amount: int
    """Bytes moved or parameters updated."""

    @property
    def rate(self) -> float:
        """Amount per busy second, in units of 10^9."""
        return self.amount / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one traced step. Durations are in seconds."""

    outcome: _C.StepOutcome
    """Applied or skipped."""
    seconds: float
    """From the first forward to the end of the optimizer's step."""
    num_accesses: int
    """Accesses of forward and backward."""
    stalled: dict[str, float]
    """Waiting time of the compute queue by cause; causes that did not occur are absent."""
    optimizer_seconds: float
    """The step's end after backward; part of ``seconds``."""
    upload: Work
    """Copies from host to device, in bytes."""
    download: Work
    """Copies from device to host, in bytes."""
    gather: Work
    """All-gathers including waits for other ranks, in bytes received."""
    scatter: Work
    """Reduce-scatters including waits for other ranks, in bytes received."""
    host_adam: Work
    """Host updates started by this step, also those whose result was not used."""
    host_states: Work
    """Phase two of two-phase updates: the states."""
    device_adam: Work
    """Updates on the device; part of ``compute_seconds``."""
    round_trips: Work
    """GPU round-trip updates."""
    deferred_seconds: float
    """Part of ``host_adam`` after the step's end."""
    dropped_seconds: float
    """Part of ``host_adam`` spent on speculative updates whose result was not used."""

    @property
    def compute_seconds(self) -> float:
        """Time in which the compute queue did not wait for PatrickStar."""
        return self.seconds - sum(self.stalled.values())

    @property
    def roofline(self) -> dict[str, float]:
        """Busy seconds of each resource; the step takes at least the largest."""
        return {
            "compute": self.compute_seconds,
            "upload": self.upload.seconds,
            "download": self.download.seconds,
            "gather": self.gather.seconds,
            "scatter": self.scatter.seconds,
            "host Adam": self.host_adam.seconds + self.host_states.seconds,
        }

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.roofline, key=lambda name: self.roofline[name])

    def text(self, step: int) -> str:
        """Returns a summary of a few lines."""
        outcome = "" if self.outcome == _C.StepOutcome.APPLIED else ", skipped"
        causes = sorted(self.stalled.items(), key=lambda item: -item[1])
        by_cause = "".join(f", {name} {show_seconds(value)}" for name, value in causes)
        adam = f"{self.host_adam.amount / 1e9:.3f} Gparam in {show_seconds(self.host_adam.seconds)}, "
        adam += f"{self.host_adam.rate:.2f} Gparam/s, {show_seconds(self.deferred_seconds)} of it after the step's end"
        if self.dropped_seconds > 0:
            adam += f", {show_seconds(self.dropped_seconds)} for nothing"
        busy = ", ".join(f"{name} {show_seconds(value)}" for name, value in self.roofline.items() if value > 0)
        ratio = self.seconds / max(self.roofline[self.bound], 1e-12)
        lines = [
            f"step {step}: {show_seconds(self.seconds)}{outcome}",
            f"  compute      {show_seconds(self.compute_seconds)}, {self.num_accesses} accesses; "
            f"the last {show_seconds(self.optimizer_seconds)} of the step are the optimizer's",
            f"  stalled      {show_seconds(sum(self.stalled.values()))}{by_cause}",
            f"  upload       {_transfer(self.upload)}",
            f"  download     {_transfer(self.download)}",
            *self._collective_lines(),
            f"  host Adam    {adam}",
            *self._states_lines(),
            f"  device Adam  {self.device_adam.amount / 1e9:.3f} Gparam in {show_seconds(self.device_adam.seconds)}, "
            f"{self.device_adam.rate:.2f} Gparam/s",
            *self._round_trip_lines(),
            f"  roofline     bound by {self.bound}, the step takes {ratio:.2f} x as long: {busy}",
        ]
        return "\n".join(lines) + "\n"

    def _states_lines(self) -> list[str]:
        if self.host_states.amount == 0:
            return []
        states = f"{self.host_states.amount / 1e9:.3f} Gparam in {show_seconds(self.host_states.seconds)}"
        return [f"  host states  {states}, behind their parameters"]

    def _round_trip_lines(self) -> list[str]:
        if self.round_trips.amount == 0:
            return []
        round_trips = f"{self.round_trips.amount / 1e9:.3f} Gparam in {show_seconds(self.round_trips.seconds)}"
        return [f"  visits       {round_trips}, updates of the host's on the device"]

    def _collective_lines(self) -> list[str]:
        if self.gather.amount == self.scatter.amount == 0:
            return []
        return [f"  gather       {_transfer(self.gather)}", f"  scatter      {_transfer(self.scatter)}"]


def summarize(trace: dict[str, Any]) -> Summary:
    """Returns the figures of a trace from ``_C.Runtime.take_trace``."""
    mine = [span for span in trace["spans"] if span["owner"] == _C.SpanOwner.THIS_STEP]
    on_track = {track: [span for span in mine if span["track"] == track] for track in _C.Track.__members__.values()}
    stalled: dict[str, float] = {}
    for span in on_track[_C.Track.STALL]:
        name = CAUSES[span["cause"]]
        stalled[name] = stalled.get(name, 0.0) + span["seconds"]
    host_adam = on_track[_C.Track.HOST_ADAM]
    late = (min(s["seconds"], s["begin_seconds"] + s["seconds"] - trace["seconds"]) for s in host_adam)
    return Summary(
        outcome=trace["outcome"],
        seconds=trace["seconds"],
        num_accesses=len(trace["accesses"]),
        stalled=stalled,
        optimizer_seconds=trace["seconds"] - trace["optimizer_begin_seconds"],
        upload=_work(on_track[_C.Track.UPLOAD], "num_bytes"),
        download=_work(on_track[_C.Track.DOWNLOAD], "num_bytes"),
        gather=_work(on_track[_C.Track.GATHER], "num_bytes"),
        scatter=_work(on_track[_C.Track.SCATTER], "num_bytes"),
        host_adam=_work(host_adam, "numel"),
        host_states=_work(on_track[_C.Track.HOST_STATES], "numel"),
        device_adam=_work(on_track[_C.Track.DEVICE_ADAM], "numel"),
        round_trips=_work(on_track[_C.Track.ROUND_TRIP], "numel"),
        deferred_seconds=sum(max(seconds, 0.0) for seconds in late),
        dropped_seconds=sum(span["seconds"] for span in host_adam if span["dropped"]),
    )


def _work(spans: list[dict[str, Any]], amount: str) -> Work:
    return Work(seconds=sum(span["seconds"] for span in spans), amount=sum(span[amount] for span in spans))


def show_seconds(value: float) -> str:
    """Formats seconds, as milliseconds below 1 s."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _transfer(work: Work) -> str:
    return f"{work.amount / 1e9:.3f} GB in {show_seconds(work.seconds)}, {work.rate:.1f} GB/s"

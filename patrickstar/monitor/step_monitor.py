"""The monitor of one run: collects figures of each step, logs lines, and feeds the sinks."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from patrickstar.monitor.batch import size_of_batch
from patrickstar.monitor.figures import StepFigures, model_tflops
from patrickstar.monitor.flops import FlopsProfiler, ProfiledStep
from patrickstar.monitor.losses import LossBuffer, LossOf
from patrickstar.monitor.options import MonitorOptions
from patrickstar.monitor.sinks import Sink, open_sinks
from patrickstar.monitor.stalls import StallSampler

logger = logging.getLogger("patrickstar")

_STEPS_PER_FLUSH = 10
"""Steps between flushes of metrics to the sinks if no lines are requested."""


class Phase(enum.Enum):
    """A part of a step, as DeepSpeed divides it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that are constant in a run, except the number of ranks."""

    num_parameters: int
    """Number of elements in all parameters of the whole model, on all ranks together."""
    num_trainable: int
    """Number of these elements that require a gradient."""
    rank: int = 0
    """The rank of this process, over all nodes."""
    num_ranks: int = 1
    """Number of ranks that train together."""
    ranks_per_sample: int = 1
    """Ranks that get the same samples, and compute a part of each."""
    device: torch.device = torch.device("cpu")
    """The device the model runs on."""
    loss_of: LossOf = LossOf.MICRO_BATCH
    """The meaning of the losses given to the monitor."""


@dataclasses.dataclass
class _Amounts:
    """Work of this rank in some steps."""

    began: float
    """By the clock, in seconds."""
    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    phase_seconds: dict[Phase, float] = dataclasses.field(default_factory=dict)


class StepMonitor:
    """See the package's docstring.

    The host waits for the device only where a line is logged or metrics are flushed; losses stay on their device until
    then (`LossBuffer`). Losses of steps that are not shown are not added. A line is skipped, with nothing read, if the
    logger is silent at INFO when it is due.

    Args:
        options: the requested output.
        facts: of the run.
        report: ``engine.report``.
        stalls: traces steps of the engine; None: lines show no stalls.
        clock: the host's, in seconds.

    Raises:
        ImportError: a package for a requested output is missing.
        ValueError: an existing file of metrics does not fit.
    """

    def __init__(
        self,
        options: MonitorOptions,
        facts: RunFacts,
        report: Callable[[], Mapping[str, Any]],
        stalls: StallSampler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._options = options
        self._facts = facts
        self._report = report
        self._stalls = stalls
        self._clock = clock
        self._sinks: list[Sink] = open_sinks(options) if facts.rank == 0 else []
        self._has_lines = bool(options.steps_per_print)
        self._flops = FlopsProfiler(options.flops_profiler) if options.flops_profiler.enabled else None
        self._is_active = facts.rank == 0 and (self._has_lines or bool(self._sinks) or self._flops is not None)
        self._interval = options.steps_per_print or _STEPS_PER_FLUSH
        self._num_steps = 0
        self._num_samples = 0
        self._num_skipped = 0  # from the report at the last line
        self._losses = LossBuffer(self._interval, facts.loss_of)
        self._pending: list[tuple[StepFigures, int]] = []  # the last steps, with the samples so far
        self._since_line: _Amounts | None = None
        self._this_step: _Amounts | None = None

    @property
    def is_active(self) -> bool:
        """True on rank 0, if any output is requested."""
        return self._is_active

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """Context around each training forward and backward, and the optimizer's step. Optional: without it the line
        lacks their times, and no operations are counted.
        """
        return self._observed(phase) if self._is_active else contextlib.nullcontext()

    @contextlib.contextmanager
    def _observed(self, phase: Phase) -> Iterator[None]:
        step = self._begun_step()
        counts = phase is Phase.FORWARD and self._is_profiled(self._num_steps)
        began = self._clock()
        with self._flops.count() if counts else contextlib.nullcontext():
            yield
        step.phase_seconds[phase] = step.phase_seconds.get(phase, 0.0) + self._clock() - began

    def add_micro_batch(self, batch: Any, loss: torch.Tensor | float | None = None) -> None:
        """Call after each training forward.

        Args:
            batch: the model's arguments: tensors, mappings and sequences of tensors.
            loss: a number or one-element tensor on any device, which is not waited for. With accumulation it must not
                be divided by the number of micro-batches, unless the run's facts say otherwise.
        """
        self.add_batch(batch)
        if loss is not None:
            self.add_loss(loss)

    def add_batch(self, batch: Any) -> None:
        """The batch part of :meth:`add_micro_batch`."""
        if not self._is_active:
            return
        step, size = self._begun_step(), size_of_batch(batch)
        step.num_samples += size.num_samples
        step.num_tokens += size.num_tokens

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """The loss part of :meth:`add_micro_batch`."""
        if not self._is_active:
            return
        if self._is_shown():
            self._losses.reserve(loss)
        if self._shows_step(self._num_steps + 1) or self._is_profiled(self._num_steps):
            self._losses.add(loss)

    def drop_losses(self) -> None:
        """Drops the losses of the present step, whose gradients were dropped."""
        self._losses.drop_step()

    def change_ranks(self, num_ranks: int) -> None:
        """Counts samples and tokens for so many ranks from now on."""
        self._facts = dataclasses.replace(self._facts, num_ranks=num_ranks)

    def end_step(self, lr: float | None = None) -> None:
        """Call after each optimizer step, also skipped ones; ``lr`` is the first group's rate in it."""
        if not self._is_active:
            return
        step = self._begun_step()
        self._num_steps += 1
        self._num_samples += step.num_samples * self._facts.num_ranks // self._facts.ranks_per_sample
        self._losses.end_step()
        until_line = -self._num_steps % self._interval
        if self._stalls is not None and self._is_shown():
            self._stalls.end_step(steps_until_line=until_line, steps_per_line=self._interval)
        if self._shows_step(self._num_steps):
            self._pending.append((self._figures(lr), self._num_samples or self._num_steps))
        if self._is_profiled(self._num_steps - 1):
            self._write_flops(step)
        self._add_to_interval(step)
        if until_line == 0 and self._is_shown():
            self._write_line()
        elif until_line == 0:
            self._losses.drop_all()
            self._since_line = None
        self._this_step = None

    def state_dict(self) -> dict[str, int]:
        """Counts for a checkpoint, so that a resumed run continues them."""
        return {"num_steps": self._num_steps, "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a checkpoint, between two steps."""
        self._write(self._take_pending())
        self._since_line = None
        self._num_steps, self._num_samples = int(state["num_steps"]), int(state["num_samples"])

    def close(self) -> None:
        """Writes pending metrics, after the last step; the engine may be closed already. Idempotent."""
        self._write(self._take_pending())
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        self._is_active = False

    def _is_shown(self) -> bool:
        """True if figures would be seen now."""
        return bool(self._sinks) or self._has_lines and logger.isEnabledFor(logging.INFO)

    def _shows_step(self, step: int) -> bool:
        """True if the figures of this step will be seen."""
        return bool(self._sinks) or (self._has_lines and step % self._interval == 0 and self._is_shown())

    def _begun_step(self) -> _Amounts:
        if self._this_step is None:
            self._this_step = _Amounts(self._clock())
        return self._this_step

    def _is_profiled(self, num_steps_before: int) -> bool:
        return self._flops is not None and num_steps_before == self._options.flops_profiler.profile_step

    def _add_to_interval(self, step: _Amounts) -> None:
        if self._since_line is None:
            self._since_line = _Amounts(step.began)
        total = self._since_line
        total.num_steps += 1
        total.num_samples += step.num_samples
        total.num_tokens += step.num_tokens
        for phase, seconds in step.phase_seconds.items():
            total.phase_seconds[phase] = total.phase_seconds.get(phase, 0.0) + seconds

    def _figures(self, lr: float | None) -> StepFigures:
        """Figures of a step that need no wait; the loss is added later."""
        report = self._report()
        norm, scale = float(report["grad_norm"]), float(report["loss_scale"])
        return StepFigures(
            step=self._num_steps,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=None if lr is None else float(lr),
            loss_scale=scale if scale != 1.0 else None,
        )

    def _write_line(self) -> None:
        pending = self._take_pending()  # here the host waits; the clock is read afterwards
        now = self._clock()
        figures, num_samples = pending.pop()
        figures = dataclasses.replace(figures, **self._interval_figures(now))
        self._write([*pending, (figures, num_samples)])
        if self._has_lines:
            logger.info("%s", figures.text())
        self._since_line = _Amounts(now)

    def _take_pending(self) -> list[tuple[StepFigures, int]]:
        """The steps that the sinks have not received, with their losses."""
        pending, self._pending = self._pending, []
        losses = self._losses.take()
        losses = losses[len(losses) - len(pending) :]
        return [
            (dataclasses.replace(figures, loss=loss), num_samples)
            for (figures, num_samples), loss in zip(pending, losses, strict=True)
        ]

    def _write(self, steps: list[tuple[StepFigures, int]]) -> None:
        for sink in self._sinks:
            for figures, num_samples in steps:
                sink.write(figures.step, num_samples, figures.metrics())
            sink.flush()

    def _interval_figures(self, now: float) -> dict[str, Any]:
        report, total, facts = self._report(), self._since_line, self._facts
        num_skipped = int(report["num_skipped_steps"])
        figures: dict[str, Any] = {
            "num_skipped": max(0, num_skipped - self._num_skipped),
            "device_name": "gpu" if facts.device.type == "cuda" else "device",
            "device_bytes": report["device_peak_bytes"],
            "host_bytes": report["host_peak_bytes"],
            "step_seconds": (now - total.began) / total.num_steps,
            "stalls": self._stalls.latest if self._stalls is not None else None,
        }
        self._num_skipped = num_skipped
        seconds = (now - total.began) * facts.ranks_per_sample  # of a whole sample, by one rank
        if seconds > 0 and total.num_samples > 0:
            figures["samples_per_second"] = total.num_samples * facts.num_ranks / seconds
        if seconds > 0 and total.num_tokens > 0:
            per_rank = total.num_tokens / seconds
            figures["tokens_per_second"] = per_rank * facts.num_ranks
            figures["tflops"] = model_tflops(facts.num_parameters, facts.num_trainable, per_rank)
        if self._options.wall_clock_breakdown:
            figures["phase_ms"] = {
                phase.value: 1e3 * total.phase_seconds[phase] / total.num_steps
                for phase in Phase
                if phase in total.phase_seconds
            }
        return figures

    def _write_flops(self, step: _Amounts) -> None:
        self._losses.wait()
        profiled = ProfiledStep(
            step=self._num_steps,
            seconds=self._clock() - step.began,
            num_tokens=step.num_tokens // self._facts.ranks_per_sample,
            num_parameters=self._facts.num_parameters,
            num_trainable=self._facts.num_trainable,
        )
        self._flops.write(self._flops.text(profiled))
        self._is_active = self._has_lines or bool(self._sinks)

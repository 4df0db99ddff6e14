"""The figures of a step: metric names, and the log line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from patrickstar.monitor.stalls import Stalls
from patrickstar.sizes import show_count, show_seconds, show_size

_GIB = 2**30

METRICS = (
    "Train/Samples/train_loss",
    "Train/Samples/lr",
    "Train/Samples/loss_scale",
    "Train/Samples/elapsed_time_ms_forward",
    "Train/Samples/elapsed_time_ms_backward",
    "Train/Samples/elapsed_time_ms_step",
    "patrickstar/grad_norm",
    "patrickstar/skipped_steps",
    "patrickstar/device_gib",
    "patrickstar/host_gib",
    "patrickstar/tokens_per_second",
    "patrickstar/samples_per_second",
    "patrickstar/model_tflops",
    "patrickstar/stalled_share",
)
"""All names of metrics: DeepSpeed's where it has them, else our own."""


def model_tflops(num_parameters: int, num_trainable: int, tokens_per_second: float) -> float:
    """10^12 floating point operations of a model per second.

    Per parameter and token it counts 2 in forward, 2 in backward for the gradients of activations, and 2 for the
    gradients of trained weights. That is 6 per parameter and token (Kaplan et al., "Scaling laws for neural language
    models", 2020, section 2.1). It is formula (3) of Narayanan et al., "Efficient large-scale language model training
    on GPU clusters using Megatron-LM", 2021, without recomputation, and without attention's scores, which add
    sequence / (6 * hidden size).
    """
    return (4 * num_parameters + 2 * num_trainable) * tokens_per_second / 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures after a step; None: unknown. Rates are over the steps since the last line."""

    step: int
    """Counted from 1 since the start of training."""
    loss: float | None = None
    """The loss of this step on this rank."""
    grad_norm: float | None = None
    """The norm of all ranks' mean gradients, before clipping; None if the step was skipped."""
    lr: float | None = None
    """The learning rate of the first parameter group."""
    loss_scale: float | None = None
    """Set if loss scaling is on."""
    num_skipped: int | None = None
    """Steps since the last line whose gradients were not finite."""
    device_name: str = "device"
    """``gpu``, or ``device`` for the simulated one."""
    device_bytes: int | None = None
    """Peak of the memory in use on the device."""
    host_bytes: int | None = None
    """Peak of host memory for model data."""
    step_seconds: float | None = None
    """Time per step, including the time between steps."""
    tokens_per_second: float | None = None
    """All ranks' rate since the last line: the first rank's tokens times the number of ranks."""
    samples_per_second: float | None = None
    """All ranks' rate since the last line: the first rank's samples times the number of ranks."""
    tflops: float | None = None
    """The model's TFLOPS, per rank."""
    stalls: Stalls | None = None
    """Stalls of a recent step."""
    phase_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds of the host's time per step, by phase."""

    def text(self) -> str:
        """The log line, without figures that are None."""
        parts = [
            f"step {self.step}",
            _part("loss {:.4f}", self.loss),
            _part("grad norm {:.3g}", self.grad_norm),
            _part("lr {}", self.lr, _exponent),
            _part("loss scale {:g}", self.loss_scale),
            f"skipped {self.num_skipped}" if self.num_skipped else None,
            _part(self.device_name + " {}", self.device_bytes, show_size),
            _part("host {}", self.host_bytes, show_size),
            _part("{}/step", self.step_seconds, show_seconds),
            _part("{} tokens/s", self.tokens_per_second, show_count),
            _part("{} samples/s", self.samples_per_second, show_count) if self.tokens_per_second is None else None,
            _part("{}", self.tflops, _flops),
            self.stalls.text() if self.stalls is not None else None,
            *(f"{name} {value:.1f} ms" for name, value in self.phase_ms.items()),
        ]
        return "  ".join(part for part in parts if part is not None)

    def metrics(self) -> dict[str, float]:
        """Values by the names of ``METRICS``, without unknown ones and ones that are not finite."""
        values = {
            "Train/Samples/train_loss": self.loss,
            "Train/Samples/lr": self.lr,
            "Train/Samples/loss_scale": self.loss_scale,
            "patrickstar/grad_norm": self.grad_norm,
            "patrickstar/skipped_steps": self.num_skipped,
            "patrickstar/device_gib": None if self.device_bytes is None else self.device_bytes / _GIB,
            "patrickstar/host_gib": None if self.host_bytes is None else self.host_bytes / _GIB,
            "patrickstar/tokens_per_second": self.tokens_per_second,
            "patrickstar/samples_per_second": self.samples_per_second,
            "patrickstar/model_tflops": self.tflops,
            "patrickstar/stalled_share": self.stalls.share if self.stalls is not None else None,
            **{f"Train/Samples/elapsed_time_ms_{name}": value for name, value in self.phase_ms.items()},
        }
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _part(pattern: str, value: Any, shown: Callable[[Any], Any] = lambda value: value) -> str | None:
    return None if value is None else pattern.format(shown(value))


def _exponent(value: float) -> str:
    """A number like ``3.00e-4``, without zeros that pad the exponent."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _flops(tflops: float) -> str:
    """Formats with three digits: ``353 TFLOPS``, ``2.1 GFLOPS``."""
    scale, name = next(((size, name) for size, name in ((1.0, "T"), (1e-3, "G")) if tflops >= size), (1e-6, "M"))
    return f"{tflops / scale:.3g} {name}FLOPS"

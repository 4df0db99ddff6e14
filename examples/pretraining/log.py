"""Log lines of a run's steps."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from patrickstar.sizes import show_count, show_seconds, show_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The steps since the line before, or one."""

    step: int
    """The last of them, counted from 1 since the beginning of the training."""
    loss: float
    """Mean over these steps and all ranks."""
    grad_norm: float
    """Norm in the last step, before clipping; NaN if it was skipped."""
    lr: float
    """Learning rate of the last step."""
    seconds: float
    """Per step."""
    tokens_per_second: float
    """All ranks' rate."""
    model_tflops_per_gpu: float
    """10^12 floating point operations of the model per second and rank, recomputation not counted."""

    def as_json(self) -> str:
        """One line; what is not finite is null."""
        figures = {name: value if math.isfinite(value) else None for name, value in dataclasses.asdict(self).items()}
        return json.dumps({"event": "step", **figures})

    def as_text(self) -> str:
        """One line."""
        return (
            f"step {self.step:6}  loss {self.loss:.4f}  norm {self.grad_norm:.3f}  lr {self.lr:.2e}  "
            f"{show_seconds(self.seconds)}  {self.tokens_per_second:.0f} tokens/s  "
            f"{self.model_tflops_per_gpu:.3g} model TFLOPS per GPU"
        )


_SUMMARY = (
    "num_parameters",
    "device_budget_bytes",
    "device_peak_bytes",
    "host_budget_bytes",
    "host_peak_bytes",
    "num_chunks",
    "num_chunk_elements",
    "num_device_state_chunks",
    "num_host_threads",
    "uploaded_bytes",
    "downloaded_bytes",
    "gathered_bytes",
    "scattered_bytes",
    "predicted_step_seconds",
)


def summary_json(report: dict[str, Any], num_ranks: int) -> str:
    """The last line: rank 0's figures of the whole run."""
    return json.dumps({"event": "end", "num_ranks": num_ranks, **{key: report[key] for key in _SUMMARY}})


def summary_text(report: dict[str, Any], num_steps: int, num_ranks: int) -> str:
    """The same for people."""
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    return "\n".join(
        [
            f"{show_count(report['num_parameters'])} parameters, {report['num_device_state_chunks']} of "
            f"{report['num_chunks']} chunks with optimizer states on the device",
            f"device peak {show_size(report['device_peak_bytes'])}, host peak {show_size(report['host_peak_bytes'])} "
            f"of model data{each}",
            f"per step {show_size(report['uploaded_bytes'] / num_steps)} up, "
            f"{show_size(report['downloaded_bytes'] / num_steps)} down, "
            f"{show_size((report['gathered_bytes'] + report['scattered_bytes']) / num_steps)} between ranks",
        ]
    )

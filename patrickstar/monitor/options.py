"""Options of the monitor, with the names and defaults of DeepSpeed's configuration."""

from __future__ import annotations

import dataclasses

from patrickstar.config.monitors import CsvMonitorConfig, FlopsProfilerConfig, TensorBoardConfig, WandbConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Options of the monitor; all are off by default."""

    steps_per_print: int | None = None
    """Optimizer steps between log lines; None or 0: no lines."""
    wall_clock_breakdown: bool = False
    """True if the line includes the host's time in forward, backward and step."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard's event files."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """Metrics in one CSV file."""
    wandb: WandbConfig = WandbConfig()
    """Metrics in a project of Weights & Biases."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """The operations of one step."""

    def __post_init__(self):
        if self.steps_per_print is not None and self.steps_per_print < 0:
            raise ValueError(f"steps_per_print is {self.steps_per_print}; give at least 1, or 0 for no lines")

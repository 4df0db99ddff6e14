"""What is asked of the monitor. Names and defaults are those of DeepSpeed's configuration."""

from __future__ import annotations

import dataclasses

from patrickstar.config.monitors import CsvMonitorConfig, FlopsProfilerConfig, TensorBoardConfig, WandbConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Everything that is asked of the monitor; by default nothing is."""

    steps_per_print: int | None = None
    """A line is logged after each so many optimizer steps; None or 0: none."""
    wall_clock_breakdown: bool = False
    """Whether the line says how long the host was in forward, backward and step."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """Whether and where TensorBoard's event files are written."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """Whether and where metrics are written as one CSV file."""
    wandb: WandbConfig = WandbConfig()
    """Whether metrics go to Weights & Biases, and to which project."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """The operations of one step."""

    def __post_init__(self):
        if self.steps_per_print is not None and self.steps_per_print < 0:
            raise ValueError(f"steps_per_print is {self.steps_per_print}; give at least 1, or 0 for no lines")

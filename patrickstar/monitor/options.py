"""What is asked of the monitor. Names and defaults are those of DeepSpeed's configuration."""

from __future__ import annotations

import dataclasses

_JOB_NAME = "DeepSpeedJobName"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoardOptions:
    """``tensorboard``."""

    enabled: bool = False
    """Whether metrics go there."""
    output_path: str = ""
    """The folder; relative to the working directory."""
    job_name: str = _JOB_NAME
    """A folder in that one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvOptions:
    """``csv_monitor``: the file ``metrics.csv``."""

    enabled: bool = False
    """Whether metrics go there."""
    output_path: str = ""
    """The folder; relative to the working directory."""
    job_name: str = _JOB_NAME
    """A folder in that one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """``wandb``: Weights & Biases."""

    enabled: bool = False
    """Whether metrics go there."""
    group: str | None = None
    """The group of runs."""
    team: str | None = None
    """The entity that owns the project."""
    project: str = "deepspeed"
    """The project."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsProfilerOptions:
    """``flops_profiler``: the floating point operations of one step, counted."""

    enabled: bool = False
    """Whether one step is counted."""
    profile_step: int = 1
    """After how many steps; that one is counted."""
    recompute_fwd_factor: float = 0.0
    """How much of the forward backward runs again: 1 with activation checkpointing of the whole model."""
    module_depth: int = -1
    """How deep modules are listed; -1: to the deepest."""
    top_modules: int = 1
    """How many modules of each depth are listed."""
    detailed: bool = True
    """Whether modules are listed at all."""
    output_file: str | None = None
    """Where the text goes; None: standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Everything that is asked of the monitor; by default nothing is."""

    steps_per_print: int | None = None
    """A line is printed after each so many optimizer steps; None: none."""
    wall_clock_breakdown: bool = False
    """Whether the line says how long the host was in forward, backward and step."""
    tensorboard: TensorBoardOptions = TensorBoardOptions()
    """TensorBoard's event files."""
    csv_monitor: CsvOptions = CsvOptions()
    """One CSV file."""
    wandb: WandbOptions = WandbOptions()
    """Weights & Biases."""
    flops_profiler: FlopsProfilerOptions = FlopsProfilerOptions()
    """The operations of one step."""

    def __post_init__(self):
        if self.steps_per_print is not None and self.steps_per_print < 1:
            raise ValueError(
                f"steps_per_print is {self.steps_per_print}; give at least 1, or leave it out to print nothing"
            )
        if self.flops_profiler.profile_step < 0:
            raise ValueError(
                f"flops_profiler.profile_step is {self.flops_profiler.profile_step}; give the number of steps before "
                "the one to profile, at least 0"
            )

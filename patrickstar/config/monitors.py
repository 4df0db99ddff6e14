"""Sections for logging and measurement, with DeepSpeed's keys. ``patrickstar.initialize`` acts on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED
from patrickstar.config.values import AtLeast0, FilePath, Integer, NonNegative, Section, Switch, Text


class TensorBoardConfig(Section):
    """The section ``tensorboard``: figures written to TensorBoard's event files."""

    enabled: Annotated[Switch, HONOURED] = False
    """True if figures are written to TensorBoard."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder for event files, absolute or relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """Name of the run's folder in ``output_path``."""


class WandbConfig(Section):
    """The section ``wandb``: figures reported to Weights & Biases."""

    enabled: Annotated[Switch, HONOURED] = False
    """True if figures are reported to Weights & Biases."""
    group: Annotated[Text | None, HONOURED] = None
    """Name of the group that the run belongs to."""
    team: Annotated[Text | None, HONOURED] = None
    """The entity (user or team) that owns the project."""
    project: Annotated[Text, HONOURED] = "deepspeed"
    """Name of the project that the run belongs to."""


class CsvMonitorConfig(Section):
    """The section ``csv_monitor``: figures written to a CSV file."""

    enabled: Annotated[Switch, HONOURED] = False
    """True if figures are written to ``metrics.csv``."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder for CSV files, absolute or relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """Name of the run's folder in ``output_path``."""


class FlopsProfilerConfig(Section):
    """The section ``flops_profiler``: a count of the floating point operations of one step."""

    enabled: Annotated[Switch, HONOURED] = False
    """True if the floating point operations of one step are counted."""
    profile_step: Annotated[AtLeast0, HONOURED] = 1
    """Number of steps that are done before the one that is counted."""
    recompute_fwd_factor: Annotated[NonNegative, HONOURED] = 0.0
    """Share of the forward that backward computes again: 1 with activation checkpointing of the whole model."""
    module_depth: Annotated[Integer, Field(ge=-1), HONOURED] = -1
    """Depth down to which modules are listed; -1: down to the deepest."""
    top_modules: Annotated[AtLeast0, HONOURED] = 1
    """Number of modules that are listed at each depth."""
    detailed: Annotated[Switch, HONOURED] = True
    """True if modules are listed, beside the totals of the model."""
    output_file: Annotated[FilePath | None, HONOURED] = None
    """Path of the file that the counts are written to; None: standard output."""

"""Sections about what is logged and measured, with DeepSpeed's keys. ``patrickstar.initialize`` acts on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED, no_effect, refused
from patrickstar.config.values import AtLeast0, AtLeast1, FilePath, Integer, Names, NonNegative, Section, Switch, Text

_WITH_COMET = no_effect("it is comet's, which is not supported")
_WITH_COMMS_LOGGER = no_effect("it is the communication logger's, which is not there; ``profile`` shows collectives")


class TensorBoardConfig(Section):
    """The section ``tensorboard``: figures written to TensorBoard's event files."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures are written to TensorBoard."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder for event files, absolute or relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """Name of the run's folder in ``output_path``."""


class WandbConfig(Section):
    """The section ``wandb``: figures reported to Weights & Biases."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures are reported to Weights & Biases."""
    group: Annotated[Text | None, HONOURED] = None
    """Name of the group that the run belongs to."""
    team: Annotated[Text | None, HONOURED] = None
    """The entity (user or team) that owns the project."""
    project: Annotated[Text, HONOURED] = "deepspeed"
    """Name of the project that the run belongs to."""


class CsvMonitorConfig(Section):
    """The section ``csv_monitor``: figures written to a CSV file."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures are written to ``metrics.csv``."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder for CSV files, absolute or relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """Name of the run's folder in ``output_path``."""


class FlopsProfilerConfig(Section):
    """The section ``flops_profiler``: a count of the floating point operations of one step."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether the floating point operations of one step are counted."""
    profile_step: Annotated[AtLeast0, HONOURED] = 1
    """Number of steps that are done before the one that is counted."""
    recompute_fwd_factor: Annotated[NonNegative, HONOURED] = 0.0
    """Share of the forward that backward computes again: 1 with activation checkpointing of the whole model."""
    module_depth: Annotated[Integer, Field(ge=-1), HONOURED] = -1
    """Depth down to which modules are listed; -1: down to the deepest."""
    top_modules: Annotated[AtLeast0, HONOURED] = 1
    """Number of modules that are listed at each depth."""
    detailed: Annotated[Switch, HONOURED] = True
    """Whether modules are listed, beside the totals of the model."""
    output_file: Annotated[FilePath | None, HONOURED] = None
    """Path of the file that the counts are written to; None: standard output."""


class CometConfig(Section):
    """The section ``comet``: figures reported to Comet."""

    enabled: Annotated[Switch, refused("there is no reporter to Comet; use tensorboard, wandb or csv_monitor")] = False
    """Whether figures are reported to Comet."""
    samples_log_interval: Annotated[AtLeast1, _WITH_COMET] = 100
    """Number of samples between two reports."""
    project: Annotated[Text | None, _WITH_COMET] = None
    """Name of the project in Comet."""
    workspace: Annotated[Text | None, _WITH_COMET] = None
    """Name of the workspace in Comet."""
    api_key: Annotated[Text | None, _WITH_COMET] = None
    """The key for access to Comet."""
    experiment_name: Annotated[Text | None, _WITH_COMET] = None
    """Name of the experiment in Comet."""
    experiment_key: Annotated[Text | None, _WITH_COMET] = None
    """Comet's identifier of the experiment, of 32 to 50 letters and digits."""
    online: Annotated[Switch | None, _WITH_COMET] = None
    """Whether figures are sent to Comet's server; else they are stored on this machine."""
    mode: Annotated[Text | None, _WITH_COMET] = None
    """How the experiment is started: ``"get"`` (an existing one), ``"create"`` (a new one) or ``"get_or_create"``."""


class CommsLoggerConfig(Section):
    """The section ``comms_logger``: DeepSpeed's log of collectives."""

    enabled: Annotated[
        Switch, refused('collectives are not logged; use profile ({"step": 4, "output": "profile"}), which shows them')
    ] = False
    """Whether collectives are logged, with their times and sizes."""
    prof_all: Annotated[Switch, _WITH_COMMS_LOGGER] = True
    """Whether all collectives are logged; else those of ``prof_ops``."""
    prof_ops: Annotated[Names, _WITH_COMMS_LOGGER] = ()
    """Names of the collectives that are logged, such as ``"all_reduce"``."""
    verbose: Annotated[Switch, _WITH_COMMS_LOGGER] = False
    """Whether each collective is printed as it happens."""
    debug: Annotated[Switch, _WITH_COMMS_LOGGER] = False
    """Whether the name of the calling function is added to each collective's name."""


class ThroughputTimerConfig(Section):
    """The section ``timers.throughput``: how DeepSpeed measures throughput."""

    enabled: Annotated[Switch, no_effect("the line of ``steps_per_print`` has the throughput")] = True
    """Whether samples per second are measured."""
    synchronized: Annotated[Switch, no_effect("the throughput is measured without waiting for the GPU")] = True
    """Whether the host waits for the GPU before each measurement."""


class TimersConfig(Section):
    """The section ``timers``: what DeepSpeed measures in every step."""

    throughput: ThroughputTimerConfig = Field(default_factory=ThroughputTimerConfig)
    """The measurement of throughput, in samples per second."""

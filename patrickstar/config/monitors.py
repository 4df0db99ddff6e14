"""Sections about what is logged and measured, with DeepSpeed's keys. ``patrickstar.initialize`` acts on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED, no_effect, refused
from patrickstar.config.values import AtLeast0, AtLeast1, FilePath, Integer, Names, NonNegative, Section, Switch, Text

_WITH_COMET = no_effect("it is comet's, which is not supported")
_WITH_COMMS_LOGGER = no_effect("it is the communication logger's, which is not there; ``profile`` shows collectives")


class TensorBoardConfig(Section):
    """``tensorboard``."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures go there."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder; relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """A folder in that one."""


class WandbConfig(Section):
    """``wandb``: Weights & Biases."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures go there."""
    group: Annotated[Text | None, HONOURED] = None
    """The group of runs."""
    team: Annotated[Text | None, HONOURED] = None
    """The entity that owns the project."""
    project: Annotated[Text, HONOURED] = "deepspeed"
    """The project."""


class CsvMonitorConfig(Section):
    """``csv_monitor``."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether figures go there."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder; relative to the working directory."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """A folder in that one."""


class FlopsProfilerConfig(Section):
    """``flops_profiler``: the floating point operations of one step, counted."""

    enabled: Annotated[Switch, HONOURED] = False
    """Whether one step is counted."""
    profile_step: Annotated[AtLeast0, HONOURED] = 1
    """After how many steps; that one is counted."""
    recompute_fwd_factor: Annotated[NonNegative, HONOURED] = 0.0
    """How much of the forward backward runs again: 1 with activation checkpointing of the whole model."""
    module_depth: Annotated[Integer, Field(ge=-1), HONOURED] = -1
    """How deep modules are listed; -1: to the deepest."""
    top_modules: Annotated[AtLeast0, HONOURED] = 1
    """How many modules of each depth are listed."""
    detailed: Annotated[Switch, HONOURED] = True
    """Whether modules are listed at all."""
    output_file: Annotated[FilePath | None, HONOURED] = None
    """Where the text goes; None: standard output."""


class CometConfig(Section):
    """``comet``: Comet experiments."""

    enabled: Annotated[Switch, refused("there is no reporter to Comet; use tensorboard, wandb or csv_monitor")] = False
    """Report to it."""
    samples_log_interval: Annotated[AtLeast1, _WITH_COMET] = 100
    """Samples between two reports."""
    project: Annotated[Text | None, _WITH_COMET] = None
    """The project."""
    workspace: Annotated[Text | None, _WITH_COMET] = None
    """The workspace."""
    api_key: Annotated[Text | None, _WITH_COMET] = None
    """The key."""
    experiment_name: Annotated[Text | None, _WITH_COMET] = None
    """The experiment's name."""
    experiment_key: Annotated[Text | None, _WITH_COMET] = None
    """The experiment's key."""
    online: Annotated[Switch | None, _WITH_COMET] = None
    """Whether it reports over the network."""
    mode: Annotated[Text | None, _WITH_COMET] = None
    """Whether it goes on with an experiment."""


class CommsLoggerConfig(Section):
    """``comms_logger``: DeepSpeed's log of collectives."""

    enabled: Annotated[
        Switch, refused('collectives are not logged; use profile ({"step": 4, "output": "profile"}), which shows them')
    ] = False
    """Log collectives."""
    prof_all: Annotated[Switch, _WITH_COMMS_LOGGER] = True
    """All of them."""
    prof_ops: Annotated[Names, _WITH_COMMS_LOGGER] = ()
    """Or these."""
    verbose: Annotated[Switch, _WITH_COMMS_LOGGER] = False
    """Each one."""
    debug: Annotated[Switch, _WITH_COMMS_LOGGER] = False
    """With the caller."""


class ThroughputTimerConfig(Section):
    """``timers.throughput``."""

    enabled: Annotated[Switch, no_effect("the line of ``steps_per_print`` has the throughput")] = True
    """Measure samples per second."""
    synchronized: Annotated[Switch, no_effect("the throughput is measured without waiting for the GPU")] = True
    """Wait for the GPU before each measurement."""


class TimersConfig(Section):
    """``timers``."""

    throughput: ThroughputTimerConfig = Field(default_factory=ThroughputTimerConfig)
    """The throughput."""

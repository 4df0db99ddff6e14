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
    """Write event files for TensorBoard."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder; empty: ``./runs``."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """The folder in it."""


class WandbConfig(Section):
    """``wandb``: Weights & Biases."""

    enabled: Annotated[Switch, HONOURED] = False
    """Report to it."""
    group: Annotated[Text | None, HONOURED] = None
    """The group of runs."""
    team: Annotated[Text | None, HONOURED] = None
    """The team."""
    project: Annotated[Text, HONOURED] = "deepspeed"
    """The project."""


class CsvMonitorConfig(Section):
    """``csv_monitor``."""

    enabled: Annotated[Switch, HONOURED] = False
    """Write a CSV file."""
    output_path: Annotated[Text, HONOURED] = ""
    """The folder; empty: the working directory's."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """The folder in it."""


class FlopsProfilerConfig(Section):
    """``flops_profiler``: what one step computes."""

    enabled: Annotated[Switch, HONOURED] = False
    """Print parameters, FLOPs and speed of a step."""
    profile_step: Annotated[AtLeast1, HONOURED] = 1
    """Which step, counted from 1."""
    output_file: Annotated[FilePath | None, HONOURED] = None
    """Where to; None: printed."""
    recompute_fwd_factor: Annotated[NonNegative, no_effect("the FLOPs are the model's, without recomputation")] = 0.0
    """How much of the forward is computed again."""
    module_depth: Annotated[Integer, no_effect("there is no table of modules; ``profile`` has each one's times")] = -1
    """Depth of the table of modules."""
    top_modules: Annotated[AtLeast0, no_effect("there is no table of modules; ``profile`` has each one's times")] = 1
    """Rows of the table of modules."""
    detailed: Annotated[Switch, no_effect("there is no table of modules; ``profile`` has each one's times")] = True
    """The whole table of modules."""


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

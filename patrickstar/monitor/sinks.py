"""Destinations of metrics: TensorBoard, Weights & Biases, a CSV file. Opened on rank 0 only."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from patrickstar.config.monitors import CsvMonitorConfig, TensorBoardConfig, WandbConfig
from patrickstar.monitor.figures import METRICS
from patrickstar.monitor.options import MonitorOptions


class Sink(Protocol):
    """Takes the metrics of steps, in order."""

    def write(self, step: int, num_samples: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of one step by name (``figures.METRICS``), after ``num_samples`` samples of all ranks."""

    def flush(self) -> None:
        """Makes written metrics visible to other processes."""

    def close(self) -> None:
        """Closes the sink after the last step. Idempotent."""


def open_sinks(options: MonitorOptions) -> list[Sink]:
    """Opens the enabled sinks.

    Raises:
        ImportError: a package is missing; the message has the command that installs it.
        ValueError: an existing CSV file has other columns.
    """
    sinks: list[Sink] = []
    if options.tensorboard.enabled:
        sinks.append(TensorBoardSink(options.tensorboard))
    if options.wandb.enabled:
        sinks.append(WandbSink(options.wandb))
    if options.csv_monitor.enabled:
        sinks.append(CsvSink(options.csv_monitor))
    return sinks


class TensorBoardSink:
    """Event files in ``output_path/job_name``; the horizontal axis is samples, as in DeepSpeed."""

    def __init__(self, options: TensorBoardConfig):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard.enabled is true, but TensorBoard cannot be imported ({error}); pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(log_dir=str(Path(options.output_path) / options.job_name))

    def write(self, step: int, num_samples: int, values: Mapping[str, float]) -> None:
        """Adds each metric of the step as a scalar at ``num_samples``."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, num_samples)

    def flush(self) -> None:
        """Writes pending events to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Writes pending events and closes the file."""
        self._writer.close()


class WandbSink:
    """The user's run if there is one, else its own, which it finishes; the axis is samples, as in DeepSpeed."""

    def __init__(self, options: WandbConfig):
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"wandb.enabled is true, but wandb cannot be imported ({error}); pip install wandb"
            ) from error
        self._is_own = wandb.run is None
        self._run: Any = wandb.run
        if self._is_own:
            self._run = wandb.init(project=options.project, group=options.group, entity=options.team)

    def write(self, step: int, num_samples: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of the step at ``num_samples``, which is W&B's ``step``."""
        self._run.log(dict(values), step=num_samples)

    def flush(self) -> None:
        """Does nothing: W&B sends logged values by itself."""

    def close(self) -> None:
        """Finishes the run if it is the sink's own; the user's goes on."""
        if self._is_own:
            self._run.finish()
            self._is_own = False


class CsvSink:
    """``output_path/job_name/metrics.csv``: a header, then a row for each step, with empty cells for unknown metrics. A
    resumed run appends to it.
    """

    HEADER = ["step", "samples", *METRICS]

    def __init__(self, options: CsvMonitorConfig):
        self.path = Path(options.output_path) / options.job_name / "metrics.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", newline="", encoding="utf-8")
        self._file.seek(0)
        header = next(csv.reader(self._file), None)
        if header is not None and header != self.HEADER:
            self._file.close()
            raise ValueError(
                f"{self.path} has other columns than this run; move it away or change csv_monitor.job_name"
            )
        self._writer = csv.writer(self._file)
        if header is None:
            self._writer.writerow(self.HEADER)
            self._file.flush()

    def write(self, step: int, num_samples: int, values: Mapping[str, float]) -> None:
        """Appends a row: the step, the samples and all of ``METRICS``, empty where a metric is unknown."""
        self._writer.writerow([step, num_samples, *(values.get(name, "") for name in METRICS)])

    def flush(self) -> None:
        """Flushes buffered rows, so that other processes can read them."""
        self._file.flush()

    def close(self) -> None:
        """Writes buffered rows and closes the file."""
        self._file.close()

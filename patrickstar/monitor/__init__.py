"""Monitoring of a run: a log line at intervals on rank 0, and metrics for TensorBoard, W&B or a CSV file.

    monitor = StepMonitor(options, RunFacts(...), engine.report)
    with monitor.phase(Phase.FORWARD):
        loss = engine(**batch)
    ...
    monitor.add_micro_batch(batch, loss)
    optimizer.step()
    monitor.end_step(lr)

Every rank makes one and calls it in the same way; only rank 0 does any work. It does not depend on an engine. Values
are read back from a device only in steps that are shown. docs/logging.md defines each figure.
"""

from patrickstar.config.monitors import CsvMonitorConfig, FlopsProfilerConfig, TensorBoardConfig, WandbConfig
from patrickstar.monitor.losses import LossOf
from patrickstar.monitor.options import MonitorOptions
from patrickstar.monitor.shown import show_log
from patrickstar.monitor.sinks import Sink, open_sinks
from patrickstar.monitor.stalls import Stalls, StallSampler
from patrickstar.monitor.step_monitor import Phase, RunFacts, StepMonitor

__all__ = [
    "CsvMonitorConfig",
    "FlopsProfilerConfig",
    "LossOf",
    "MonitorOptions",
    "Phase",
    "RunFacts",
    "Sink",
    "StallSampler",
    "Stalls",
    "StepMonitor",
    "TensorBoardConfig",
    "WandbConfig",
    "open_sinks",
    "show_log",
]

"""``initialize_engine``: the one call that turns a model function into an engine and an optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from patrickstar.config import Config, log_accepted_options, parse_config
from patrickstar.engine.engine import Engine
from patrickstar.engine.optim import HybridOptimizer, make_optimizer
from patrickstar.engine.run_log import begin_run_log, make_monitor
from patrickstar.engine.start import opening, start_session
from patrickstar.module.preprocess import ModelSource
from patrickstar.monitor import LossOf, MonitorOptions, show_log
from patrickstar.optimizer.groups import ModelParameters

__all__ = ["initialize_engine"]


def initialize_engine(
    model_func: ModelSource,
    local_rank: int = 0,
    config: Mapping[str, Any] | Config | str | os.PathLike[str] | None = None,
    model_parameters: ModelParameters = None,
) -> tuple[Engine, HybridOptimizer]:
    """Builds the model inside chunks and returns the engine and its optimizer.

    Args:
        model_func: the model (any ``nn.Module``, also from ``from_pretrained``), or a function without arguments that
            returns it. A model's own parameter memory is freed as it moves into chunks. The ranks of a machine call a
            function one after another. Parameters on the meta device (``with torch.device("meta")``) are initialised on
            the training device by ``reset_parameters`` or Hugging Face's ``_init_weights``, and never exist outside
            chunks.
        local_rank: index of the GPU on this machine; without a GPU the device is simulated in host memory.
        config: a dict, the path of a JSON file, or None for the defaults (docs/config.md).
        model_parameters: parameter groups: a callable that takes the module and returns parameters or groups, or a list
            of dicts whose ``params`` are name patterns. None: one group of all parameters.

    Raises:
        ValueError: a wrong argument or configuration value.
        MemoryBudgetError: the model does not fit into the budgets beside this process's other engines.
    """
    show_log()
    parsed = parse_config(config)
    log_accepted_options(parsed)
    session, groups = start_session(model_func, local_rank, parsed, model_parameters)
    with opening(session):
        engine, optimizer = Engine(session), make_optimizer(session, groups, parsed)
        options = MonitorOptions(steps_per_print=parsed.steps_per_print)
        monitor = make_monitor(session, options, LossOf.STEP)
    begin_run_log(session, monitor)
    return engine, optimizer

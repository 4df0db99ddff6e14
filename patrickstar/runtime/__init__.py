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
        model_func: the model (any ``nn.Module``, also from ``from_pretrained``), whose parameters' own memory is freed
            as they go into chunks, or a function without arguments that returns it, which the ranks of a machine call
            one after the other. What is on the meta device (``with torch.device("meta")``) is initialised on the
            training device by its modules' ``reset_parameters`` or Hugging Face's ``_init_weights``: fast, and never
            whole outside of chunks.
        local_rank: which GPU of this machine; without a GPU the device is simulated in host memory.
        config: the configuration (docs/config.md): a dict, the path of a JSON file, or None for the defaults.
        model_parameters: parameter groups: a callable that takes the module and returns parameters or groups, or a list
            of dicts whose ``params`` are name patterns. None: one group of all parameters.

    Raises:
        ValueError: an argument or a configuration value is wrong.
        MemoryBudgetError: the model does not fit into the budgets, beside what other engines of this process have.
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

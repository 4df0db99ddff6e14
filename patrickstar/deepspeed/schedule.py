"""The learning-rate schedule of ``patrickstar.initialize``: the configuration's, or the user's."""

from __future__ import annotations

import logging
from typing import Any

import torch

from patrickstar.config import Config
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.lr_schedules import make_scheduler

logger = logging.getLogger("patrickstar")


def choose_scheduler(config: Config, given: Any, optimizer: HybridOptimizer) -> Any:
    """The schedule for ``optimizer``, or None.

    Args:
        config: its ``scheduler`` is used if the user gives none.
        given: the user's: a schedule of an optimizer that was taken over, or a function that makes one from an
            optimizer.
        optimizer: the optimizer that trains.
    """
    if given is None:
        if config.scheduler is None:
            return None
        params = config.scheduler.params
        values = {} if params is None else params.model_dump(mode="json", exclude_unset=True)
        return make_scheduler(optimizer, config.scheduler.type, values)
    if config.scheduler is not None:
        logger.info("lr_scheduler was given to initialize: the configuration's %s is not used", config.scheduler.type)
    if not hasattr(given, "step") and callable(given):
        return given(optimizer)
    return _moved(given, optimizer)


def _moved(scheduler: Any, optimizer: HybridOptimizer) -> Any:
    """Moves ``scheduler`` to another optimizer with the same groups; its position and base rates are kept."""
    old = getattr(scheduler, "optimizer", None)
    if old is None or old is optimizer:
        return scheduler
    for group, old_group in zip(optimizer.param_groups, old.param_groups, strict=True):
        group.update({key: value for key, value in old_group.items() if key in ("lr", "initial_lr")})
    # PyTorch's schedules warn unless the optimizer's step is marked as called, which each schedule arranges in its
    # constructor. This one is made for that alone and dropped.
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.optimizer = optimizer
    return scheduler

"""DeepSpeed's learning-rate schedules with its names, parameters, defaults and numbers, for any
``torch.optim.Optimizer``.

Call ``step()`` once after each optimizer step. Iterations are counted as in DeepSpeed: the first optimizer step runs at
iteration -1, and each ``step()`` adds one. A checkpoint holds only that number (``{"last_batch_iteration": n}``, as in
DeepSpeed), because the learning rate is a function of the iteration and the parameters.

Formulas: ``deepspeed/runtime/lr_schedules.py`` of DeepSpeed 0.19.8, after Smith, "A disciplined approach to neural
network hyper-parameters: Part 1", 2018 (arXiv:1803.09820) and Loshchilov & Hutter, "SGDR", 2017 (arXiv:1608.03983). In
the formulas i is the iteration.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedules

from patrickstar.config.nearest import nearest
from patrickstar.lr_schedules.base import Schedule
from patrickstar.lr_schedules.cycles import LRRangeTest, OneCycle
from patrickstar.lr_schedules.warmups import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_scheduler",
]

SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""DeepSpeed's schedules by ``scheduler.type``."""


def make_scheduler(
    optimizer: torch.optim.Optimizer, type_name: str, params: Mapping[str, Any] | None = None
) -> torch_schedules.LRScheduler:
    """Returns the schedule of a configuration's ``scheduler.type`` and ``scheduler.params``. The type may also be a
    class of ``torch.optim.lr_scheduler``, as with DeepSpeed.

    Raises:
        ValueError: the type or a parameter is unknown (the message suggests the nearest), a parameter is missing, or a
            value is impossible.
    """
    cls = SCHEDULES.get(type_name) or _torch_schedule(type_name)
    if cls is None:
        raise ValueError(
            f"scheduler.type is {type_name!r}: did you mean {nearest(type_name, SCHEDULES)!r}? There are "
            f"{', '.join(SCHEDULES)}, and the classes of torch.optim.lr_scheduler"
        )
    params = dict(params or {})
    known = {name: p for name, p in inspect.signature(cls).parameters.items() if name != "optimizer"}
    for name in params:
        if name not in known:
            raise ValueError(
                f"unknown key scheduler.params.{name}: did you mean {nearest(name, known)!r}? "
                f"{type_name} takes {', '.join(known)}"
            )
    missing = [name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in params]
    if missing:
        raise ValueError(f"scheduler.params.{missing[0]} is missing; {type_name} needs it")
    return cls(optimizer, **params)


def _torch_schedule(name: str) -> type[torch_schedules.LRScheduler] | None:
    cls = getattr(torch_schedules, name, None)
    return cls if inspect.isclass(cls) and issubclass(cls, torch_schedules.LRScheduler) else None

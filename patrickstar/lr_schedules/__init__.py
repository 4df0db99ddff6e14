"""DeepSpeed's learning-rate schedules, by the same names, parameters, defaults and numbers, for any
``torch.optim.Optimizer``.

``step()`` is called once after each optimizer step. Iterations are counted as DeepSpeed counts them: a schedule begins
at iteration -1, which is what the first optimizer step runs with, and each ``step()`` goes one further. A checkpoint
holds that number alone (``{"last_batch_iteration": n}``, as DeepSpeed's does), since each learning rate is a function
of the iteration and the parameters.

The formulas are those of ``deepspeed/runtime/lr_schedules.py`` of DeepSpeed 0.19.8, which follows Smith, "A disciplined
approach to neural network hyper-parameters: Part 1", 2018 (arXiv:1803.09820) and Loshchilov & Hutter, "SGDR", 2017
(arXiv:1608.03983). In them i is the iteration.
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
"""DeepSpeed's schedules by the name that ``scheduler.type`` gives them."""


def make_scheduler(
    optimizer: torch.optim.Optimizer, type_name: str, params: Mapping[str, Any] | None = None
) -> torch_schedules.LRScheduler:
    """The schedule that a configuration's ``scheduler.type`` and ``scheduler.params`` ask for. As with DeepSpeed, the
    type may also be one of ``torch.optim.lr_scheduler``.

    Raises:
        ValueError: the type or a parameter is unknown (naming the nearest), one is missing, or a value is impossible.
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

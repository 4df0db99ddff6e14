"""``scheduler``: learning-rate schedules of ``patrickstar.initialize``, and their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from patrickstar.config.fates import HONOURED
from patrickstar.config.nearest import nearest
from patrickstar.config.values import (
    AtLeast0,
    AtLeast1,
    Integer,
    Number,
    PerGroup,
    Section,
    Switch,
    unexpected,
)

LastBatch = Annotated[Integer, Field(ge=-1), HONOURED]
Warmup = Annotated[Literal["log", "linear"], HONOURED]


def _torch_schedule(value: Any) -> str:
    from torch.optim import lr_scheduler

    cls = getattr(lr_scheduler, value, None) if isinstance(value, str) else None
    if not inspect.isclass(cls) or not issubclass(cls, lr_scheduler.LRScheduler):
        raise unexpected(
            f"did you mean {nearest(str(value), SCHEDULERS)!r}? There are {', '.join(SCHEDULERS)}, and the classes of "
            "torch.optim.lr_scheduler"
        )
    return str(value)


class LRRangeTestParams(Section):
    """``scheduler.params`` of ``LRRangeTest``: the rate grows, to find where training diverges."""

    lr_range_test_min_lr: Annotated[PerGroup, HONOURED] = 1e-3
    """The first learning rate; a list gives one for each parameter group."""
    lr_range_test_step_size: Annotated[AtLeast1, HONOURED] = 2000
    """Steps in which the rate grows by ``lr_range_test_step_rate`` times the first one."""
    lr_range_test_step_rate: Annotated[Number, HONOURED] = 1.0
    """Growth of the rate in each ``lr_range_test_step_size`` steps, as a multiple of the first rate."""
    lr_range_test_staircase: Annotated[Switch, HONOURED] = False
    """True: the rate grows once in ``lr_range_test_step_size`` steps; else it grows in every step."""
    last_batch_iteration: LastBatch = -1
    """The step to go on from; -1: from the beginning."""


class OneCycleParams(Section):
    """``scheduler.params`` of ``OneCycle``: the rate rises and falls once, then decays; the momentum moves the opposite
    way.
    """

    cycle_min_lr: Annotated[PerGroup, HONOURED]
    """The learning rate at both ends of the cycle; a list gives one for each parameter group."""
    cycle_max_lr: Annotated[PerGroup, HONOURED]
    """The learning rate in the middle of the cycle; a list gives one for each parameter group."""
    decay_lr_rate: Annotated[Number, HONOURED] = 0.0
    """After d intervals of decay the learning rate is ``cycle_min_lr`` / (1 + this x d)."""
    cycle_first_step_size: Annotated[AtLeast1, HONOURED] = 2000
    """Number of steps in which the learning rate rises."""
    cycle_second_step_size: Annotated[AtLeast0 | None, HONOURED] = None
    """Number of steps in which the learning rate falls; None: ``cycle_first_step_size``."""
    cycle_first_stair_count: Annotated[AtLeast0, HONOURED] = 0
    """Number of stairs in which the learning rate rises; 0: in every step."""
    cycle_second_stair_count: Annotated[AtLeast0 | None, HONOURED] = None
    """Number of stairs in which the learning rate falls; None: ``cycle_first_stair_count``."""
    decay_step_size: Annotated[AtLeast0, HONOURED] = 0
    """Number of steps of one interval of decay after the cycle; 0: no decay."""
    cycle_momentum: Annotated[Switch, HONOURED] = True
    """True: the momentum (the first of ``betas``) cycles too."""
    cycle_min_mom: Annotated[PerGroup, HONOURED] = 0.8
    """The least momentum, in the middle of the cycle."""
    cycle_max_mom: Annotated[PerGroup, HONOURED] = 0.9
    """The largest momentum, at both ends of the cycle."""
    decay_mom_rate: Annotated[Number, HONOURED] = 0.0
    """After d intervals of decay the momentum is ``cycle_max_mom`` x (1 + this x d)."""
    last_batch_iteration: LastBatch = -1
    """The step to go on from; -1: from the beginning."""


class WarmupLRParams(Section):
    """``scheduler.params`` of ``WarmupLR``: the rate rises, then stays."""

    warmup_min_lr: Annotated[PerGroup, HONOURED] = 0.0
    """The learning rate that the warm-up begins with."""
    warmup_max_lr: Annotated[PerGroup | None, HONOURED] = None
    """The learning rate that the warm-up ends with; None: that of the optimizer."""
    warmup_num_steps: Annotated[AtLeast0, HONOURED] = 1000
    """Number of steps of the warm-up; less than 2 counts as 2."""
    warmup_type: Warmup = "log"
    """Shape of the warm-up: ``"log"`` (logarithmic) or ``"linear"``."""
    last_batch_iteration: LastBatch = -1
    """The step to go on from; -1: from the beginning."""


class WarmupDecayLRParams(Section):
    """``scheduler.params`` of ``WarmupDecayLR``: the rate rises, then falls to 0 in a line."""

    total_num_steps: Annotated[AtLeast1 | None, HONOURED] = None
    """Number of steps of the whole run. It must be given, as a number or as ``"auto"``, which leaves None."""
    warmup_min_lr: Annotated[PerGroup, HONOURED] = 0.0
    """The learning rate that the warm-up begins with."""
    warmup_max_lr: Annotated[PerGroup, HONOURED] = 1e-3
    """The learning rate that the warm-up ends with."""
    warmup_num_steps: Annotated[AtLeast0, HONOURED] = 1000
    """Number of steps of the warm-up; less than 2 counts as 2."""
    warmup_type: Warmup = "log"
    """Shape of the warm-up: ``"log"`` (logarithmic) or ``"linear"``."""
    last_batch_iteration: LastBatch = -1
    """The step to go on from; -1: from the beginning."""


class WarmupCosineLRParams(Section):
    """``scheduler.params`` of ``WarmupCosineLR``: the rate rises to the optimizer's, then falls as a cosine."""

    total_num_steps: Annotated[AtLeast1 | None, HONOURED] = None
    """Number of steps of the whole run. It must be given, as a number or as ``"auto"``, which leaves None."""
    warmup_min_ratio: Annotated[Number, HONOURED] = 0.0
    """The learning rate that the warm-up begins with, as a share of the optimizer's."""
    warmup_num_steps: Annotated[AtLeast0, HONOURED] = 1000
    """Number of steps of the warm-up; less than 2 counts as 2."""
    cos_min_ratio: Annotated[Number, HONOURED] = 1e-4
    """The learning rate that the cosine ends with, as a share of the optimizer's."""
    warmup_type: Warmup = "log"
    """Shape of the warm-up: ``"log"`` (logarithmic) or ``"linear"``."""
    last_batch_iteration: LastBatch = -1
    """The step to go on from; -1: from the beginning."""


class LRRangeTest(Section):
    """The section ``scheduler`` with type ``LRRangeTest``, a schedule of DeepSpeed."""

    type: Annotated[Literal["LRRangeTest"], HONOURED]
    """Name of the schedule: ``"LRRangeTest"``."""
    params: LRRangeTestParams = Field(default_factory=LRRangeTestParams)
    """Parameters of ``LRRangeTest``, by their names."""


class OneCycle(Section):
    """The section ``scheduler`` with type ``OneCycle``, a schedule of DeepSpeed."""

    type: Annotated[Literal["OneCycle"], HONOURED]
    """Name of the schedule: ``"OneCycle"``."""
    params: OneCycleParams
    """Parameters of ``OneCycle``, by their names."""


class WarmupLR(Section):
    """The section ``scheduler`` with type ``WarmupLR``, a schedule of DeepSpeed."""

    type: Annotated[Literal["WarmupLR"], HONOURED]
    """Name of the schedule: ``"WarmupLR"``."""
    params: WarmupLRParams = Field(default_factory=WarmupLRParams)
    """Parameters of ``WarmupLR``, by their names."""


class WarmupDecayLR(Section):
    """The section ``scheduler`` with type ``WarmupDecayLR``, a schedule of DeepSpeed."""

    type: Annotated[Literal["WarmupDecayLR"], HONOURED]
    """Name of the schedule: ``"WarmupDecayLR"``."""
    params: WarmupDecayLRParams = Field(default_factory=WarmupDecayLRParams)
    """Parameters of ``WarmupDecayLR``, by their names."""


class WarmupCosineLR(Section):
    """The section ``scheduler`` with type ``WarmupCosineLR``, a schedule of DeepSpeed."""

    type: Annotated[Literal["WarmupCosineLR"], HONOURED]
    """Name of the schedule: ``"WarmupCosineLR"``."""
    params: WarmupCosineLRParams = Field(default_factory=WarmupCosineLRParams)
    """Parameters of ``WarmupCosineLR``, by their names."""


class TorchScheduleParams(Section):
    """``scheduler.params`` of a schedule of PyTorch: its arguments, without the optimizer."""

    model_config = ConfigDict(extra="allow")


class TorchSchedule(Section):
    """``scheduler`` with the name of a class of ``torch.optim.lr_scheduler``."""

    type: Annotated[str, BeforeValidator(_torch_schedule), HONOURED]
    """Name of the schedule: that of its class."""
    params: TorchScheduleParams = Field(default_factory=TorchScheduleParams)
    """Arguments of that class, without the optimizer."""


SCHEDULERS: dict[str, type[Section]] = {
    section.__name__: section for section in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""DeepSpeed's schedules by the value of ``scheduler.type``."""


def _model_of(values: Any) -> str:
    name = values.get("type") if isinstance(values, Mapping) else getattr(values, "type", None)
    return name if isinstance(name, str) and name in SCHEDULERS else TorchSchedule.__name__


SchedulerConfig = Annotated[
    Annotated[LRRangeTest, Tag("LRRangeTest")]
    | Annotated[OneCycle, Tag("OneCycle")]
    | Annotated[WarmupLR, Tag("WarmupLR")]
    | Annotated[WarmupDecayLR, Tag("WarmupDecayLR")]
    | Annotated[WarmupCosineLR, Tag("WarmupCosineLR")]
    | Annotated[TorchSchedule, Tag("TorchSchedule")],
    Discriminator(_model_of),
]

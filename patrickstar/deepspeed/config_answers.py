"""What a DeepSpeed script asks an engine about its configuration."""

from __future__ import annotations

from typing import Any

from patrickstar.config import Config
from patrickstar.engine.session import Session

_FP16_DYNAMIC = 0.0


class ConfigAnswers:
    """Methods of DeepSpeed's engine that say what its configuration says, by the same names: what scripts branch on.

    They tell of the configuration, not of where anything is: ``zero_optimization_stage`` is what was asked for.
    """

    _session: Session

    @property
    def _config(self) -> Config:
        return self._session.config

    def zero_optimization_stage(self) -> int:
        """``zero_optimization.stage`` of the configuration, from 0 to 3."""
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether the stage is 1 or more."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the stage is 3: whether a script gathers parameters before it looks at them."""
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always True: ``save_16bit_model`` needs no option."""
        return True

    def fp16_enabled(self) -> bool:
        """Whether training is in float16."""
        return self._config.fp16 is not None

    def bfloat16_enabled(self) -> bool:
        """Whether training is in bfloat16."""
        return self._config.bf16 is not None

    def loss_scale(self) -> float:
        """``fp16.loss_scale``: the static one, 0 for a dynamic one; the present one is ``optimizer.loss_scale``."""
        return self._config.fp16.loss_scale if self._config.fp16 is not None else _FP16_DYNAMIC

    def dynamic_loss_scale(self) -> bool:
        """Whether :meth:`loss_scale` is 0, which stands for a dynamic loss scale."""
        return self.loss_scale() == _FP16_DYNAMIC

    def initial_dynamic_scale(self) -> float:
        """What a dynamic loss scale begins with."""
        return 2.0 ** (self._config.fp16.initial_scale_power if self._config.fp16 is not None else 16)

    def gradient_clipping(self) -> float:
        """``gradient_clipping`` of the configuration: the largest global norm; 0: gradients are not clipped."""
        return self._config.gradient_clipping

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches to tell which ``step()`` updates; False: each one does."""
        return self._config.managed_gradient_accumulation

    def steps_per_print(self) -> int | None:
        """Optimizer steps from one logged line to the next; 0 or None: none is logged."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether logged lines say how long the host was in forward, backward and step."""
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str:
        """``optimizer.type``, or that of the optimizer that was taken over: Adam or AdamW."""
        return self._config.optimizer.type.value

    def optimizer_params(self) -> dict[str, Any]:
        """``optimizer.params`` as far as they are given."""
        return self._config.optimizer.params.model_dump(exclude_unset=True)

    def scheduler_name(self) -> str | None:
        """``scheduler.type`` of the configuration, such as ``"WarmupLR"``; None without a scheduler."""
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """``scheduler.params`` as far as they are given."""
        if self._config.scheduler is None:
            return None
        return self._config.scheduler.params.model_dump(exclude_unset=True)

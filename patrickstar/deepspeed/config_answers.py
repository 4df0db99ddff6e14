"""DeepSpeed's queries of an engine's configuration."""

from __future__ import annotations

from typing import Any

from patrickstar.config import Config
from patrickstar.session.session import Session

_FP16_DYNAMIC = 0.0


class ConfigAnswers:
    """Methods of DeepSpeed's engine that return configuration values, for scripts that branch on them.

    They report the configuration, not where data is: ``zero_optimization_stage`` is the requested stage.
    """

    _session: Session

    @property
    def _config(self) -> Config:
        return self._session.config

    def zero_optimization_stage(self) -> int:
        """``zero_optimization.stage`` of the configuration, from 0 to 3."""
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """True if the stage is 1 or more."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """True if the stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """True if the stage is 3; scripts then gather parameters before reading them."""
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always True: ``save_16bit_model`` needs no option."""
        return True

    def fp16_enabled(self) -> bool:
        """True if training is in float16."""
        return self._config.fp16 is not None

    def bfloat16_enabled(self) -> bool:
        """True if training is in bfloat16."""
        return self._config.bf16 is not None

    def loss_scale(self) -> float:
        """``fp16.loss_scale``: the static scale, or 0 for a dynamic one; the present scale is
        ``optimizer.loss_scale``.
        """
        return self._config.fp16.loss_scale if self._config.fp16 is not None else _FP16_DYNAMIC

    def dynamic_loss_scale(self) -> bool:
        """True if :meth:`loss_scale` is 0, which means a dynamic loss scale."""
        return self.loss_scale() == _FP16_DYNAMIC

    def initial_dynamic_scale(self) -> float:
        """The initial value of a dynamic loss scale."""
        return 2.0 ** (self._config.fp16.initial_scale_power if self._config.fp16 is not None else 16)

    def gradient_clipping(self) -> float:
        """``gradient_clipping`` of the configuration: the largest global norm; 0: no clipping."""
        return self._config.gradient_clipping

    def managed_gradient_accumulation(self) -> bool:
        """True if the engine counts micro-batches to decide which ``step()`` updates; False: each one does."""
        return self._config.managed_gradient_accumulation

    def steps_per_print(self) -> int | None:
        """Optimizer steps between logged lines; 0 or None: no lines."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """True if logged lines include the host's time in forward, backward and step."""
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str:
        """``optimizer.type``, or the type of an optimizer that was taken over: Adam or AdamW."""
        return self._config.optimizer.type.value

    def optimizer_params(self) -> dict[str, Any]:
        """The given keys of ``optimizer.params``."""
        return self._config.optimizer.params.model_dump(exclude_unset=True)

    def scheduler_name(self) -> str | None:
        """``scheduler.type`` of the configuration, such as ``"WarmupLR"``; None without a scheduler."""
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The given keys of ``scheduler.params``."""
        if self._config.scheduler is None:
            return None
        return self._config.scheduler.params.model_dump(exclude_unset=True)

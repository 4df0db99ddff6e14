"""TRL's vLLM on the GPU that trains: it takes weights by bucket, and the device is lent while vLLM is awake."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patrickstar.engine.engine import Engine


def connect_generator(generation: Any, engine_of: Callable[[], Engine]) -> None:
    """Changes a trainer's ``VLLMGeneration`` so that ``engine_of()`` feeds it. With ``vllm_enable_sleep_mode`` the
    engine also lends its device's memory for each ``generate``.

    Other modes than ``"colocate"``, and models with adapters, keep TRL's own transfer of weights: nothing is lent.
    """
    if generation.mode == "colocate" and not hasattr(generation.model, "peft_config"):
        generation.engine_of = engine_of
        generation.__class__ = _fed_class(type(generation))


class _FedByEngine:
    """Methods before those of ``VLLMGeneration``."""

    engine_of: Callable[[], Engine]
    enable_sleep_mode: bool
    llm: Any

    def sync_weights(self) -> None:
        """TRL's call before ``generate``. A sleeping generator has no memory yet: ``generate`` loads its weights."""
        if not self.enable_sleep_mode:
            self._load_weights()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's method; a generator that sleeps is awake within a loan alone."""
        if not self.enable_sleep_mode:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        with self.engine_of().lend():
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False  # else TRL would load them again
            self._load_weights()
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _load_weights(self) -> None:
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        self.engine_of().export_to(model.load_weights)
        self.llm.reset_prefix_cache()


@functools.cache
def _fed_class(base: type) -> type:
    return type(base.__name__, (_FedByEngine, base), {"__module__": base.__module__})

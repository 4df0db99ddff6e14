"""Log hooks of a session: the interface of the run log, and the line about chunks that made room for activations."""

from __future__ import annotations

import logging

import torch

from patrickstar import _C
from patrickstar.session.kept_plan import Inputs

logger = logging.getLogger("patrickstar")


class NoRunLog:
    """Hooks that log nothing. ``patrickstar.engine.run_log.RunLog`` overrides them on rank 0."""

    def note_forward(self, inputs: Inputs | None) -> None:
        """Called after each training forward of the whole module; None: unknown inputs."""

    def note_backward(self, loss: torch.Tensor) -> None:
        """Called after each backward."""

    def note_zero_grad(self) -> None:
        """Called after gradients were dropped."""

    def note_step_without_gradients(self) -> None:
        """Called after each optimizer step that found no gradients and did nothing."""

    def end_step(self, lr: float) -> None:
        """Called after each optimizer step with the first group's learning rate."""

    def resume(self) -> None:
        """Called after a checkpoint was loaded whose step count goes on."""

    def change_ranks(self) -> None:
        """Called after the session was reopened with another number of ranks."""


class PressureLog:
    """Logs after a step how many arrays of chunks were evicted for activations since the step before."""

    def __init__(self, runtime: _C.Runtime):
        self._runtime = runtime
        self._count = 0

    def end_step(self) -> None:
        """Logs the first eviction at INFO and later ones at DEBUG."""
        count = self._runtime.num_pressure_evictions
        if count > self._count:
            logger.log(
                logging.INFO if self._count == 0 else logging.DEBUG,
                "device memory ran short for activations: %d arrays of chunks made room; the next step is planned anew",
                count - self._count,
            )
        self._count = count

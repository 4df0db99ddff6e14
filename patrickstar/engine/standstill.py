"""Warnings about a run that trains nothing: each once, with a remedy."""

from __future__ import annotations

import logging

from patrickstar import _C

logger = logging.getLogger("patrickstar")

_FORWARDS_IN_A_ROW = 100
"""More forwards than a loop makes before their common backward."""
_IDLE_STEPS_IN_A_ROW = 10
_SKIPPED_STEPS_IN_A_ROW = 20
"""A dynamic loss scale has fallen by a factor of 2^19 then: more than a sound start in float16 needs."""
_IN_FLOAT16 = ", or in bfloat16, where the GPU has it. Lower fp16.initial_scale_power if it is above 16"
_AT_STATIC_SCALE = ". Set fp16.loss_scale to 0, for a dynamic scale"


class Standstill:
    """Counts calls in a row that change no parameter."""

    def __init__(self) -> None:
        self._num_forwards = self._num_idle = self._num_skipped = 0
        self._said: set[str] = set()

    def note_forward(self) -> None:
        """Counts a forward that tracks gradients."""
        self._num_forwards += 1
        if self._num_forwards == _FORWARDS_IN_A_ROW:
            self._say(
                "%d forwards in a row had no backward: nothing is trained by them. Call model.backward(loss) after "
                "each in training; run evaluation under torch.no_grad()",
                self._num_forwards,
            )

    def note_backward(self) -> None:
        """Ends the rows of forwards and of steps without gradients."""
        self._num_forwards = self._num_idle = 0

    def note_step_without_gradients(self) -> None:
        """Counts a step that found no gradients."""
        self._num_idle += 1
        if self._num_idle == _IDLE_STEPS_IN_A_ROW:
            self._say(
                "optimizer.step() was called %d times in a row without gradients: nothing is trained. Call "
                "model.backward(loss) before each step, and zero_grad() after it",
                self._num_idle,
            )

    def note_step(self, applied: bool, scaler: _C.optim.LossScaler | None) -> None:
        """Counts a step that was skipped, because its gradients were not finite; an applied one ends the row.

        Args:
            applied: whether parameters were updated.
            scaler: of the loss in float16; None: another dtype.
        """
        self._num_skipped = 0 if applied else self._num_skipped + 1
        if self._num_skipped != _SKIPPED_STEPS_IN_A_ROW:
            return
        self._say(
            "%d steps in a row were skipped, since their gradients are not finite%s: nothing is trained. Look for "
            "infinities and NaNs in inputs and loss; go on from a checkpoint with a lower learning rate%s",
            self._num_skipped,
            "" if scaler is None else f" at loss scales down to {scaler.scale:g}",
            "" if scaler is None else _IN_FLOAT16 if scaler.is_dynamic else _AT_STATIC_SCALE,
        )

    def _say(self, message: str, *values: object) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *values)

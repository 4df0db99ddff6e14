"""Which micro-batch of a step it is."""

from __future__ import annotations

from patrickstar import _C


class Accumulation:
    """Counts the micro-batches of each step.

    Args:
        num_micro_batches: of a step.
    """

    def __init__(self, num_micro_batches: int):
        self.num_micro_batches = num_micro_batches
        self.num_done = 0
        """Micro-batches since the beginning of the training."""
        self._index = 0  # of the present one in its step
        self._has_backward = False
        self._said: bool | None = None

    @property
    def is_boundary(self) -> bool:
        """Whether the step comes after the present micro-batch."""
        return self._index + 1 >= self.num_micro_batches if self._said is None else self._said

    @property
    def is_between_steps(self) -> bool:
        """Whether no micro-batch of the next step was done yet."""
        return self._index == 0 and not self._has_backward

    def say_boundary(self, is_boundary: bool) -> None:
        """The caller decides from now on."""
        self._said = is_boundary

    def note_backward(self) -> None:
        """A backward of the present micro-batch is over."""
        self._has_backward = True

    def check_backward(self) -> None:
        """Raises StateError when there was none."""
        if not self._has_backward:
            raise _C.StateError(
                "step() before backward(): call loss = engine(batch), engine.backward(loss), then engine.step(), for "
                "every micro-batch"
            )

    def end_micro_batch(self) -> None:
        """The present micro-batch is over, and with it the step at a boundary."""
        self._index = 0 if self.is_boundary else self._index + 1
        self.num_done += 1
        self._has_backward = False

    def forget_step(self) -> None:
        """The gradients of the present step are dropped: it begins anew."""
        self._index = 0
        self._has_backward = False

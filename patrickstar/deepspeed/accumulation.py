"""Gradient accumulation: the position of a micro-batch in its step."""

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
        """Micro-batches since the start of training."""
        self._index = 0  # index of the present micro-batch in its step
        self._num_backwards = 0  # of the present micro-batch
        self._said: bool | None = None

    @property
    def is_boundary(self) -> bool:
        """True if the step ends with the present micro-batch."""
        return self._index + 1 >= self.num_micro_batches if self._said is None else self._said

    @property
    def step_updates(self) -> bool:
        """True if a step called now updates parameters."""
        return self.is_boundary

    @property
    def num_in_step(self) -> int:
        """Micro-batches of the step that ends now."""
        return self.num_micro_batches

    @property
    def is_between_steps(self) -> bool:
        """True if no micro-batch of the next step has begun."""
        return self._index == 0 and self._num_backwards == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """Sets, from now on by the caller, whether the step ends with the present micro-batch."""
        self._said = is_boundary

    def note_backward(self) -> None:
        """Records a finished backward of the present micro-batch."""
        self._num_backwards += 1

    def check_backward(self) -> None:
        """Raises StateError if the micro-batch had no backward."""
        if self._num_backwards == 0:
            raise _C.StateError(
                "step() before backward(): call loss = engine(batch), engine.backward(loss), then engine.step(), for "
                "every micro-batch"
            )

    def end_micro_batch(self) -> None:
        """Ends the present micro-batch, and at a boundary the step."""
        self._index = 0 if self.is_boundary else self._index + 1
        self.num_done += 1
        self._num_backwards = 0

    def forget_step(self) -> None:
        """Restarts the present step after its gradients were dropped."""
        self._index = 0
        self._num_backwards = 0


class CallersAccumulation(Accumulation):
    """Accumulation counted by the caller (``managed_gradient_accumulation`` False): each backward is a micro-batch, and
    each step takes those since the last one.
    """

    @property
    def is_boundary(self) -> bool:
        """False until the caller's step."""
        return False

    @property
    def step_updates(self) -> bool:
        """Always True: each of the caller's steps updates."""
        return True

    @property
    def num_in_step(self) -> int:
        """Backward passes since the last step."""
        return self._num_backwards

    def set_boundary(self, is_boundary: bool) -> None:
        """Raises StateError: every step updates, so there is no boundary to set."""
        raise _C.StateError(
            "set_gradient_accumulation_boundary with managed_gradient_accumulation False: every step() updates; call "
            "step() where the boundary is"
        )

    def end_micro_batch(self) -> None:
        """Ends the step; each backward since the last one counts as a finished micro-batch."""
        self.num_done += self._num_backwards
        self._num_backwards = 0

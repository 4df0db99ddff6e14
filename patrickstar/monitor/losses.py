"""Losses of some steps, kept on their device until somebody wants to see them.

    losses.add(loss)        # of each micro-batch: an enqueued addition, the host does not wait
    losses.end_step()
    values = losses.take()  # the mean of each step; here the host waits

[Note: one buffer for losses] They go into one tensor that is allocated once. Tensors kept one by one would make the
tide of every step a little higher than that of the step before, and each time the engine would plan anew.
"""

from __future__ import annotations

import enum

import torch

from patrickstar import _C


class LossOf(enum.Enum):
    """What the losses of a step's micro-batches are, and so what the step's is."""

    MICRO_BATCH = "each is that of its micro-batch: the step's is their mean"
    STEP = "each is its micro-batch's part of the step's: the step's is their sum"


class LossBuffer:
    """Holds up to ``capacity`` steps.

    On the simulated device it is no memory of the device's: the tide is what it is without a monitor.
    """

    def __init__(self, capacity: int, loss_of: LossOf = LossOf.MICRO_BATCH):
        self._capacity = capacity
        self._loss_of = loss_of
        self._sums: torch.Tensor | None = None
        self._counts = [0]

    @torch.no_grad()
    def add(self, loss: torch.Tensor | float) -> None:
        """The loss of a micro-batch of the present step, of one element, on the device of those before."""
        self.reserve(loss)
        with _C.HostAllocations():
            slot = self._sums[len(self._counts) - 1]
            slot.add_(loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss)
        self._counts[-1] += 1

    def reserve(self, loss: torch.Tensor | float) -> None:
        """Allocates the tensor on the device of ``loss``, unless it is there: in the first step, as all that stays."""
        if self._sums is None:
            device = loss.device if isinstance(loss, torch.Tensor) else "cpu"
            with _C.HostAllocations():
                self._sums = torch.zeros(self._capacity, dtype=torch.float64, device=device)

    def drop_step(self) -> None:
        """The losses of the present step so far count no more."""
        if self._counts[-1] > 0:
            self._sums[len(self._counts) - 1].zero_()
            self._counts[-1] = 0

    def drop_all(self) -> None:
        """Nobody will ask for those of the steps so far."""
        self._counts = [0]
        if self._sums is not None:
            self._sums.zero_()

    def end_step(self) -> None:
        """What is added from here on is of the next step."""
        self._counts.append(0)

    def wait(self) -> None:
        """Until the device has done all that was enqueued."""
        if self._sums is not None:
            self._sums[0].item()

    def take(self) -> list[float | None]:
        """The loss of each step that has ended since the last call; None for one without a loss."""
        counts, self._counts = self._counts[:-1], [0]
        if self._sums is None:
            return [None] * len(counts)
        sums = self._sums.tolist()
        self._sums.zero_()
        is_mean = self._loss_of is LossOf.MICRO_BATCH
        divisors = [count if is_mean else min(count, 1) for count in counts]
        return [total / by if by > 0 else None for total, by in zip(sums, divisors, strict=False)]

"""Losses of recent steps, kept on their device until they are read.

    losses.add(loss)        # of each micro-batch: an enqueued addition, the host does not wait
    losses.end_step()
    values = losses.take()  # the mean of each step; here the host waits

They go into one tensor, allocated once (`LossBuffer`). Separate tensors would raise the activation memory of each step
above the last one's, and the engine would make a new plan each time.
"""

from __future__ import annotations

import enum

import torch

from patrickstar import _C


class LossOf(enum.Enum):
    """Meaning of a micro-batch's loss, and thus of the step's."""

    MICRO_BATCH = "each is that of its micro-batch: the step's is their mean"
    STEP = "each is its micro-batch's part of the step's: the step's is their sum"


class LossBuffer:
    """Holds up to ``capacity`` steps. On the simulated device it does not count as device memory, so a monitor does not
    change activation memory.
    """

    def __init__(self, capacity: int, loss_of: LossOf = LossOf.MICRO_BATCH):
        self._capacity = capacity
        self._loss_of = loss_of
        self._sums: torch.Tensor | None = None
        self._counts = [0]

    @torch.no_grad()
    def add(self, loss: torch.Tensor | float) -> None:
        """Adds the loss of a micro-batch of the present step: one element, on the device of earlier losses."""
        self.reserve(loss)
        with _C.HostAllocations():
            slot = self._sums[len(self._counts) - 1]
            slot.add_(loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss)
        self._counts[-1] += 1

    def reserve(self, loss: torch.Tensor | float) -> None:
        """Allocates the tensor on the device of ``loss`` if necessary: in the first step, like other
        permanent memory.
        """
        if self._sums is None:
            device = loss.device if isinstance(loss, torch.Tensor) else "cpu"
            with _C.HostAllocations():
                self._sums = torch.zeros(self._capacity, dtype=torch.float64, device=device)

    def drop_step(self) -> None:
        """Drops the losses of the present step so far."""
        if self._counts[-1] > 0:
            self._sums[len(self._counts) - 1].zero_()
            self._counts[-1] = 0

    def drop_all(self) -> None:
        """Drops the losses of all steps so far."""
        self._counts = [0]
        if self._sums is not None:
            self._sums.zero_()

    def end_step(self) -> None:
        """Ends the present step."""
        self._counts.append(0)

    def wait(self) -> None:
        """Waits until the device has done all enqueued work."""
        if self._sums is not None:
            self._sums[0].item()

    def take(self) -> list[float | None]:
        """The loss of each step that has ended since the last call; None for a step without a loss."""
        counts, self._counts = self._counts[:-1], [0]
        if self._sums is None:
            return [None] * len(counts)
        sums = self._sums.tolist()
        self._sums.zero_()
        is_mean = self._loss_of is LossOf.MICRO_BATCH
        divisors = [count if is_mean else min(count, 1) for count in counts]
        return [total / by if by > 0 else None for total, by in zip(sums, divisors, strict=False)]

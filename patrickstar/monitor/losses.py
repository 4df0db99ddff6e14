"""Losses of some steps, kept on their device until somebody wants to see them.

    losses.add(loss)        # of each micro-batch: an enqueued addition, the host does not wait
    losses.end_step()
    values = losses.take()  # the mean of each step; here the host waits

[Note: one buffer for losses] They go into one tensor that is allocated once. Tensors kept one by one would make the
tide of every step a little higher than that of the step before, and each time the engine would plan anew.
"""

from __future__ import annotations

import torch


class LossBuffer:
    """Holds up to ``capacity`` steps."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._sums: torch.Tensor | None = None
        self._counts = [0]

    @torch.no_grad()
    def add(self, loss: torch.Tensor | float) -> None:
        """The loss of a micro-batch of the present step, of one element, on the device of those before."""
        if self._sums is None:
            device = loss.device if isinstance(loss, torch.Tensor) else "cpu"
            self._sums = torch.zeros(self._capacity, dtype=torch.float64, device=device)
        slot = self._sums[len(self._counts) - 1]
        slot.add_(loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss)
        self._counts[-1] += 1

    def end_step(self) -> None:
        """What is added from here on is of the next step."""
        self._counts.append(0)

    def wait(self) -> None:
        """Until the device has done all that was enqueued."""
        if self._sums is not None:
            self._sums[0].item()

    def take(self) -> list[float | None]:
        """The mean of each step that has ended since the last call; None for one without a loss."""
        counts, self._counts = self._counts[:-1], [0]
        if self._sums is None:
            return [None] * len(counts)
        sums = self._sums.tolist()
        self._sums.zero_()
        return [total / count if count > 0 else None for total, count in zip(sums, counts, strict=False)]

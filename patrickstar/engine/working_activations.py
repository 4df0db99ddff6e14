"""What an engine learns of its activations: the memory that a step needs beside those that are kept.

[Note: working activations] The share that activations have of the device is also for what forward and backward have
beside those that are kept: one layer's operations, the loss. How much that is at most, the first step shows: between
two tensors that are kept or used, the highest tide of what was alive, less what was kept. From then on what leaves is
what the device has no room for beside it and chunks ([Note: what stays], planning/activation_rules.py), and the plan
after the first step counts what had left in it and will stay. What is kept beyond
(:meth:`patrickstar.engine.stashed_activations.ActivationStash.keep`) may not take more of the device than plans leave
to activations. In the first step the share is compared with the tide itself, which on CUDA counts memory that PyTorch
holds for later allocations, so that nearly everything leaves once the share was exceeded. The same holds where a
forward keeps a larger tensor than its predecessors did of that kind, and where it ran out of memory and is run again:
what it needs, no step has shown.
"""

from __future__ import annotations

import torch

from patrickstar import _C
from patrickstar.planning.activation_rules import DeviceShares, SeenStep


class WorkingBytes:
    """[Note: working activations]

    Attributes:
        held_bytes: of what is kept, on the device.
        beyond_bytes: of these, what autograd did not save by itself.
        absent_bytes: of what is kept, on the host alone, while a device with room for everything would have it.
        seen: what steps have shown; None: nothing that would hold for this one.
    """

    def __init__(self, runtime: _C.Runtime, shares: DeviceShares):
        self._runtime = runtime
        self._shares = shares
        self._least_held = shares.first_bytes // 32  # of less nothing will have to leave, so nobody asks for peaks
        self.held_bytes = 0
        self.beyond_bytes = 0
        self.absent_bytes = 0
        self.seen: SeenStep | None = None
        self._most_held = 0
        self._most_working = -1  # of all steps; what was alive beside what was kept
        self._highest_whole = 0  # of all steps, if nothing had left
        self._is_measuring = True
        self._held_before: int | None = None  # None: the peak since the last call is of no interest

    def hold(self, num_bytes: int, beyond: int) -> None:
        """So much more is on the device, or less."""
        self.held_bytes += num_bytes
        self.beyond_bytes += beyond

    def note_return(self, num_bytes: int) -> None:
        """So much has come back and is used now, as what is kept on the device would be."""
        if self._held_before is not None:
            self._held_before += num_bytes

    def measure_always(self) -> None:
        """However little is kept: attention wants to keep more."""
        self._least_held = -1

    def learn(self) -> SeenStep | None:
        """What was measured counts from now on. None where nothing was."""
        if self._most_working >= 0:
            self.seen = self._shares.seen(self._most_working, self._highest_whole)
        return self.seen

    def forget(self) -> None:
        """Until it is learned again, with what this step will show."""
        self.seen = None
        self._is_measuring = True

    def start_anew(self) -> None:
        """What steps have shown holds no more: layers' activations rest elsewhere from now on."""
        self._most_held, self._most_working, self._highest_whole = 0, -1, 0
        self.forget()

    def begin_forward(self) -> None:
        """Steps show it again only where they keep more: on CUDA each measurement resets PyTorch's own peaks."""
        self._held_before = None
        self._is_measuring = self.seen is None

    def measure(self) -> None:
        """A tensor is about to be kept or used."""
        if self.held_bytes > self._most_held:
            self._most_held = self.held_bytes
            self._is_measuring = True
        is_of_interest = self._is_measuring and self.held_bytes + self.absent_bytes > self._least_held
        if is_of_interest or self._held_before is not None:
            tide = self._runtime.take_live_tide_peak()
            if self._held_before is not None:
                self._highest_whole = max(self._highest_whole, tide + self.absent_bytes)
                self._most_working = max(self._most_working, tide - self._held_before)
        self._held_before = self.held_bytes if is_of_interest else None


class ExpectedInputs:
    """What autograd saves in a forward: how many tensors, by the last one, and how large of which kind."""

    def __init__(self) -> None:
        self._most_bytes: dict[tuple[torch.dtype, int], int] = {}  # by the last dimension, in all forwards
        self._count = 0
        self._count_before = 0
        self._num_bytes = 0

    def begin_forward(self) -> None:
        """Nothing is saved yet."""
        self._count_before, self._count = self._count, 0

    def is_larger(self, tensor: torch.Tensor) -> bool:
        """Whether it is larger than all before with so many elements in the last dimension; if there was none, than
        all. Which place in its forward it has does not count, since what has left may be saved once more.
        """
        kind = (tensor.dtype, tensor.shape[-1] if tensor.dim() > 0 else 0)
        before = self._most_bytes.get(kind, max(self._most_bytes.values(), default=0))
        self._most_bytes[kind] = max(self._most_bytes.get(kind, 0), tensor.nbytes)
        return tensor.nbytes > before

    def note(self, num_bytes: int) -> None:
        """One was."""
        self._count += 1
        self._num_bytes = num_bytes

    def outstanding_bytes(self) -> int:
        """Of those that are still to come, if they are as large as the last one."""
        return max(self._count_before - self._count, 0) * self._num_bytes

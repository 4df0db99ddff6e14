"""Working memory of forward and backward beside kept activations, measured in each step.

``DeviceShares`` limits kept activations and working memory together. Working memory is that of one layer's operations,
or of the loss. The first step measures it: at each kept or used tensor, the peak of live memory since the last one,
minus the bytes of kept activations. Later steps offload activations only if the device has no room for them beside
working memory and chunks. The plan after the first step counts activations that had left in it and will now stay.

In the first step the limit applies to all of PyTorch's memory; on CUDA that includes its cache. Nearly all kept
activations leave in that step once the limit was exceeded. Two other kinds of forward count as a first one, since no
step has shown their needs:

* a forward that keeps a larger tensor of its kind than earlier forwards;
* a forward that is run again after it ran out of memory.
"""

from __future__ import annotations

import torch

from patrickstar import _C
from patrickstar.activations.activation_rules import DeviceShares, SeenStep


class WorkingBytes:
    """Counts kept activations and measures working memory.

    Attributes:
        held_bytes: kept activations on the device.
        beyond_bytes: their part that autograd did not save itself (:meth:`OffloadStore.keep`).
        absent_bytes: kept activations only on the host, because the device had no room.
        seen: the measurement that holds for this step; None: no measurement.
    """

    def __init__(self, runtime: _C.Runtime, shares: DeviceShares):
        self._runtime = runtime
        self._shares = shares
        self._least_held = shares.first_bytes // 32  # fewer bytes never have to leave, so peaks are not measured
        self.held_bytes = 0
        self.beyond_bytes = 0
        self.absent_bytes = 0
        self.seen: SeenStep | None = None
        self._most_held = 0
        self._most_working = -1  # live bytes beside kept activations, in all steps
        self._highest_whole = 0  # live bytes if nothing had left, in all steps
        self._is_measuring = True
        self._held_before: int | None = None  # None: the peak since the last call is not needed

    def hold(self, num_bytes: int, beyond: int) -> None:
        """Adds to the kept bytes on the device; negative amounts leave it."""
        self.held_bytes += num_bytes
        self.beyond_bytes += beyond

    def note_return(self, num_bytes: int) -> None:
        """Counts bytes that came back and are used now as kept ones, which they would be with room for everything."""
        if self._held_before is not None:
            self._held_before += num_bytes

    def measure_always(self) -> None:
        """Measures peaks even where few bytes are kept, since attention may keep more."""
        self._least_held = -1

    def learn(self) -> SeenStep | None:
        """Puts the measurement of the steps so far into ``seen`` and returns it. None: no step was measured."""
        if self._most_working >= 0:
            self.seen = self._shares.seen(self._most_working, self._highest_whole)
        return self.seen

    def forget(self) -> None:
        """Clears ``seen`` until the next ``learn``, which includes this step."""
        self.seen = None
        self._is_measuring = True

    def start_anew(self) -> None:
        """Drops all measurements, since activations of layers rest on other tiers from now on."""
        self._most_held, self._most_working, self._highest_whole = 0, -1, 0
        self.forget()

    def begin_forward(self) -> None:
        """Measures again only while ``seen`` is None, or once a step keeps more: on CUDA each measurement resets
        PyTorch's own peaks.
        """
        self._held_before = None
        self._is_measuring = self.seen is None

    def measure(self) -> None:
        """Called before a tensor is kept or used; measures the peak since the last call where it is needed."""
        if self.held_bytes > self._most_held:
            self._most_held = self.held_bytes
            self._is_measuring = True
        is_of_interest = self._is_measuring and self.held_bytes + self.absent_bytes > self._least_held
        if is_of_interest or self._held_before is not None:
            activation_memory = self._runtime.take_live_activation_peak()
            if self._held_before is not None:
                self._highest_whole = max(self._highest_whole, activation_memory + self.absent_bytes)
                self._most_working = max(self._most_working, activation_memory - self._held_before)
        self._held_before = self.held_bytes if is_of_interest else None


class ExpectedInputs:
    """Tensors that autograd is expected to save in a forward: as many as in the last one, and their sizes by kind."""

    def __init__(self) -> None:
        self._most_bytes: dict[tuple[torch.dtype, int], int] = {}  # by the last dimension, in all forwards
        self._count = 0
        self._count_before = 0
        self._num_bytes = 0

    def begin_forward(self) -> None:
        """Counts the tensors of a new forward."""
        self._count_before, self._count = self._count, 0

    def is_larger(self, tensor: torch.Tensor) -> bool:
        """True where ``tensor`` is larger than all earlier ones of its kind; the first of a kind is compared with all.

        A kind is a dtype and a size of the last dimension. The position in the forward does not count, since a tensor
        that has left may be saved once more.
        """
        kind = (tensor.dtype, tensor.shape[-1] if tensor.dim() > 0 else 0)
        before = self._most_bytes.get(kind, max(self._most_bytes.values(), default=0))
        self._most_bytes[kind] = max(self._most_bytes.get(kind, 0), tensor.nbytes)
        return tensor.nbytes > before

    def note(self, num_bytes: int) -> None:
        """Counts a saved tensor of ``num_bytes``."""
        self._count += 1
        self._num_bytes = num_bytes

    def outstanding_bytes(self) -> int:
        """Bytes of the tensors that this forward will still save, if they are as large as the last one."""
        return max(self._count_before - self._count, 0) * self._num_bytes

"""The case of an engine: its plan and placement for one chunk size and one set of budgets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.setting import Setting
from patrickstar.planning.step_plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Plan and placement for one chunk size."""

    chunk_numel: int
    """Elements in a chunk."""
    setting: Setting
    """The plan's budgets; the shortest step may use less than was given (planning/shortest_step.py)."""
    plan: Plan
    num_device_state_chunks: int
    """Chunks with optimizer states on the device."""
    num_device_quantized_chunks: int
    """Chunks with codes and scales on the device."""
    num_speculated_chunks: int
    """Chunks whose updates start during backward."""
    num_two_phase_updates: int
    """Chunks among them with two-phase updates, because memory suffices for their parameters only."""
    num_disk_chunks: int
    """Chunks with optimizer states on the disk."""
    disk_bytes: int
    """Disk bytes of one rank."""
    host_bytes: int
    """One rank's parameters and optimizer states on the host, with the buffers of states on the disk."""
    host_peak_bytes: int
    """Highest host memory of one rank's engine. Includes new values of speculative updates, gradients in transfer, and
    states that move to the device after the first step.
    """
    least_host_bytes: int
    """Least ``host_memory`` that works with all states on the host or on the disk."""
    offloaded_bytes: int
    """Offloaded activations on the host, beside :attr:`host_bytes`."""
    selective_attention: int
    """Attention calls of checkpointed layers whose results are kept for backward."""
    saved: tuple[Saved, ...]
    """Activations that checkpointed calls save, by number of the call within a forward; empty: none."""
    waste_bytes: int
    """Highest unused bytes in an access's chunks, beside the parameters that it needs."""
    step: Prediction
    """The step without clipping."""
    play_clipped: Callable[[], Prediction] = dataclasses.field(repr=False, compare=False)
    """Computes :attr:`clipped_step`."""
    find_least_device: Callable[[], int] = dataclasses.field(repr=False, compare=False)
    """Computes :attr:`least_device_bytes`."""

    @property
    def is_hidden(self) -> bool:
        """True if computation hides transfers and updates, within the simulator's tolerance."""
        return self.step.seconds <= (1 + _C.PREDICTION_TOLERANCE) * self.step.compute_seconds

    @functools.cached_property
    def least_device_bytes(self) -> int:
        """Least ``device_memory`` that works with all states on the host."""
        return self.find_least_device()

    @functools.cached_property
    def clipped_step(self) -> Prediction:
        """The step when clipping acts in every step: backward computes only parameters, the rest follows the norm."""
        return self.play_clipped()

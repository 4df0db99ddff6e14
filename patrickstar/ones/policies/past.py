"""Records of jobs that ended: the data from which policies learn lengths."""

from __future__ import annotations

import dataclasses

from patrickstar.ones.measurements import Scaling


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch of a job that has ended."""

    epoch_samples: float
    """Samples of an epoch."""
    initial_loss: float
    """Loss of its first epoch."""
    loss: float
    """Loss of this epoch."""
    accuracy: float
    """Accuracy after it, 0 to 1."""
    epochs_seen: float
    """Epochs so far."""
    progress_seen: float
    """``epochs_seen`` over the whole job's."""


@dataclasses.dataclass(frozen=True)
class PastJob:
    """A job that has ended."""

    length_s: float
    """Its work in seconds on the requested GPUs with the configured batch."""
    scaling: Scaling | None = None
    """Measured; None if it never ran on several sizes."""
    noise_ratio: float = 0.0
    """Its noise scale over its base batch; 0 if it was not measured."""
    epochs: tuple[EpochRecord, ...] = ()
    """Ascending."""


History = tuple[PastJob, ...]

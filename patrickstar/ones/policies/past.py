"""Records of jobs that ended: the data from which policies learn lengths."""

from __future__ import annotations

import dataclasses


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
    """A job that has ended, as it was measured."""

    name: str
    length_s: float
    """Its work in seconds on the requested GPUs with the configured batch."""
    within: float | None = None
    """Its :class:`patrickstar.ones.measurements.Scaling` between GPUs of a node; None if it was not measured there."""
    between: float | None = None
    """The same between nodes."""
    parameter_s: float = 0.0
    """Seconds that one GPU computes for its base batch, over the parameters of its model; 0 if one is not known. Times
    ``within`` or ``between`` it is the synchronisation of a parameter, which links decide.
    """
    noise_ratio: float = 0.0
    """Its noise scale over its base batch; 0 if it was not measured."""
    epochs: tuple[EpochRecord, ...] = ()
    """Ascending."""


History = tuple[PastJob, ...]

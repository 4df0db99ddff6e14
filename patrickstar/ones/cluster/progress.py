"""A job's progress on the cluster, from its reports: samples, and what they are worth by the measured noise scale."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Progress:
    """Samples of a job that has one batch between two calls of :meth:`note_batch_change`."""

    samples: float = 0.0
    """Processed samples."""
    noise_scale: float = 0.0
    """The last measured one, in samples; 0: none so far."""
    _worth: float = 1.0  # of a sample of the present batch, in samples of the base batch
    _done_before: float = 0.0
    _samples_before: float = 0.0
    _samples_at_resize: float = 0.0

    @classmethod
    def ended(cls, done_samples: float, noise_scale: float) -> Progress:
        """The progress of a job that has ended."""
        return cls(samples=done_samples, noise_scale=noise_scale)

    @property
    def done_samples(self) -> float:
        """Progress in samples of the base batch."""
        return self._done_before + (self.samples - self._samples_before) * self._worth

    @property
    def since_resize(self) -> float:
        """Samples since the number of GPUs last changed."""
        return self.samples - self._samples_at_resize

    def note(self, samples: float, noise_scale: float | None, batch: int, base_batch: int) -> None:
        """Takes a report. A job that went on from a checkpoint repeats samples, which count once."""
        self.samples = max(self.samples, float(samples))
        self.noise_scale = noise_scale or self.noise_scale
        self._worth = (self.noise_scale + base_batch) / (self.noise_scale + batch)

    def note_batch_change(self) -> None:
        """The batch may change from now on; earlier samples keep their worth."""
        self._done_before, self._samples_before = self.done_samples, self.samples

    def note_resize(self) -> None:
        """The number of GPUs changes."""
        self._samples_at_resize = self.samples

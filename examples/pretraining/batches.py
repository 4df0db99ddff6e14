"""Batches for a model's task: which samples a rank trains on in a step, and what it has to predict."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from .models import ModelKind, ModelShape
from .tokens import TokenSource

_MASK_SHARE = 0.15
_IGNORED = -100  # transformers' label for what is not to be predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """A step trains on the next ``num_rows * num_ranks`` samples, of which each rank takes ``num_rows`` neighbours.

    So what a step trains on depends on that product alone, and a run that goes on from a checkpoint needs to know only
    how many samples were used before.
    """

    source: TokenSource
    """Source of the sequences."""
    shape: ModelShape
    """The model's."""
    num_rows: int
    """Sequences per step and rank."""
    rank: int = 0
    """This rank."""
    num_ranks: int = 1
    """Number of ranks of the run."""
    seed: int = 0
    """Seed of BERT's masks."""

    @property
    def samples_per_step(self) -> int:
        """Samples of a step over all ranks."""
        return self.num_rows * self.num_ranks

    def after(self, num_samples: int) -> dict[str, torch.Tensor]:
        """This rank's ``input_ids`` and ``labels``, each (rows, length) of int64, once ``num_samples`` were used."""
        begin = num_samples + self.rank * self.num_rows
        rows = [self._row(index) for index in range(begin, begin + self.num_rows)]
        inputs, labels = (torch.from_numpy(np.stack(values)) for values in zip(*rows, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.source.sample(index)
        return self._masked(tokens, index) if self.shape.kind is ModelKind.BERT else (tokens, tokens)

    def _masked(self, tokens: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
        """BERT's task: of the chosen tokens 80 % become the mask, 10 % others, 10 % stay. Each sequence has as many of
        them, so that the mean over ranks is the mean over all of them.
        """
        random = np.random.default_rng((self.seed, index, 1))
        chosen = random.choice(len(tokens), max(1, round(_MASK_SHARE * len(tokens))), replace=False)
        dice = random.random(len(chosen))
        others = random.integers(0, self.shape.num_data_tokens, len(chosen))
        shown = np.where(dice < 0.8, self.shape.vocab - 1, np.where(dice < 0.9, others, tokens[chosen]))
        inputs, labels = tokens.copy(), np.full_like(tokens, _IGNORED)
        inputs[chosen], labels[chosen] = shown, tokens[chosen]
        return inputs, labels

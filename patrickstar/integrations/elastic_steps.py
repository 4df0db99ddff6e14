"""Optimizer steps as the batches of a Trainer's epoch ([Note: steps of an elastic Trainer])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from patrickstar.elastic import ElasticLoader, ElasticSampler


class StepBatches(list[Any]):
    """This rank's micro-batches of one optimizer step, as one batch of the Trainer's loop."""


class StepLoader(DataLoader[Any]):
    """The Trainer's data loader: yields an epoch's steps as :class:`StepBatches`. Steps are loaded on demand, so each
    is sharded over the present ranks.

    Args:
        dataset: with as many samples as the sampler.
        sampler: selects each step's samples.
        **options: of the ``DataLoader`` that loads micro-batches.
    """

    def __init__(self, dataset: Dataset[Any], sampler: ElasticSampler, **options: Any):
        self.num_samples = sampler.num_steps * sampler.global_batch
        """Samples of an epoch with the first global batch."""
        # Loaders draw seeds for their workers, which must not change the model's random numbers.
        steps = _Steps(
            ElasticLoader(dataset, sampler, generator=torch.Generator().manual_seed(sampler.seed), **options)
        )
        numbers: Any = [[step] for step in range(sampler.num_samples // sampler.batches.min)]
        super().__init__(steps, batch_sampler=numbers, collate_fn=_only, generator=torch.Generator())

    def begin_epoch(self, epoch: int, first_step: int) -> None:
        """Sets the next step to be loaded. Within an epoch a sampler whose batch may change knows its own place."""
        self.dataset.begin_epoch(epoch, first_step)


class _Steps(Dataset[StepBatches]):
    """The steps of the present epoch by number, read in order."""

    def __init__(self, loader: ElasticLoader):
        self._loader = loader
        self._steps = iter(loader)

    def begin_epoch(self, epoch: int, first_step: int) -> None:
        sampler = self._loader.sampler
        sampler.epoch = epoch
        if sampler.batches.is_fixed or first_step == 0:
            sampler.cursor = first_step * sampler.global_batch
        self._steps = iter(self._loader)

    def __len__(self) -> int:
        return self._loader.sampler.num_samples // self._loader.sampler.batches.min

    def __getitem__(self, step: int) -> StepBatches:
        return StepBatches(next(self._steps))


def _only(items: list[StepBatches]) -> StepBatches:
    (item,) = items
    return item


# Replacements where the Trainer's loop passes on a batch.


def step_of_micro_batches(
    trainer: Any, training_step: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, *others: Any
) -> torch.Tensor:
    """Calls ``training_step`` for each micro-batch of ``inputs``; returns the sum of their losses."""
    trainer.current_gradient_accumulation_steps = len(inputs)
    losses = [training_step(model, one, *others) for one in inputs]
    return torch.stack(losses).sum()


def sum_of_micro_batches(call: Callable[[Any], float], inputs: StepBatches) -> float:
    """Sums the results of ``call`` over the micro-batches."""
    return sum(map(call, inputs))


def each_micro_batch(call: Callable[[Any], None], inputs: StepBatches) -> None:
    """Calls ``call`` with each micro-batch."""
    for one in inputs:
        call(one)

"""Hugging Face: a ``Trainer`` that changes its number of ranks on orders while it trains.

    trainer = ElasticTrainer(
        model=model, args=args, train_dataset=data, elastic=ElasticTraining(global_batch=32),
        patrickstar_config={"device_memory": "24GiB"},
    )
    trainer.train()

For other trainers put the mixin first: ``class MySFTTrainer(ElasticTrainerMixin, SFTTrainer)``. docs/guides/elastic.md
describes how ranks are started and ordered.

[Note: steps of an elastic Trainer] The Trainer's loop counts micro-batches and expects a fixed number per step, but
that number depends on the ranks. So the loop gets one batch per optimizer step: a list of this rank's micro-batches
(:class:`StepBatches`), which is unpacked where the loop passes it on. An epoch then has as many batches on any number
of ranks, and the loop's counters, logs and schedules stay right after a resize. A resize takes place between two steps,
before the next one is loaded. So logging, saving and evaluation after a step are done by the ranks that made it. Other
rank-dependent state of the loop is user state (:class:`TrainerProgress`). A joining process starts the loop as if it
resumed from a checkpoint, at the step that the others are about to make.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from patrickstar.elastic import BatchRange, divide_batch
from patrickstar.elastic.run import joins_others
from patrickstar.integrations.decided_config import Decision
from patrickstar.integrations.elastic_loop import ElasticLoop, ElasticTraining, LeftRun
from patrickstar.integrations.elastic_steps import (
    StepBatches,
    StepLoader,
    each_micro_batch,
    step_of_micro_batches,
    sum_of_micro_batches,
)
from patrickstar.integrations.transformers import PatrickStarTrainerMixin
from patrickstar.ranks.failures import is_lost_rank

__all__ = ["ElasticSeq2SeqTrainer", "ElasticTrainer", "ElasticTrainerMixin", "ElasticTraining", "LeftRun"]

_JOINED = "patrickstar: the state of the ranks that train"  # replaces a checkpoint's path


class ElasticTrainerMixin(PatrickStarTrainerMixin):
    """Changes a ``Trainer`` so that its number of ranks may change while it trains ([Note: steps of an elastic
    Trainer]). It must precede the trainer's class among the bases.

    The order of samples follows from the seed and the epoch, for any number of ranks and any batches. Samples after an
    epoch's last whole global batch are dropped, as by ``dataloader_drop_last``. A rank that has left raises
    :class:`LeftRun`. A run that is ordered to stop saves a checkpoint, if ``save_strategy`` is "steps" or "epoch", and
    returns from ``train``. ``train(resume_from_checkpoint=...)`` continues from it on any number of ranks. A joining
    process takes the state of the others, whatever checkpoint its script names.

    Args:
        elastic: the global batch, and the source of orders.
        **kwargs: of :class:`PatrickStarTrainerMixin`.

    Raises:
        ValueError: an argument is not supported for changing ranks.
    """

    def __init__(self, *args: Any, elastic: ElasticTraining, **kwargs: Any):
        self._elastic = elastic
        super().__init__(*args, **kwargs)
        self._loop = ElasticLoop(self, elastic)
        # On the object, so that overriding methods get micro-batches too.
        self.training_step = functools.partial(step_of_micro_batches, self, self.training_step)
        self.floating_point_ops = functools.partial(sum_of_micro_batches, self.floating_point_ops)
        self._track_num_input_tokens = functools.partial(each_micro_batch, self._track_num_input_tokens)

    def create_accelerator_and_postprocess(self) -> None:
        """Calls the mixin's method; refuses arguments that do not fit changing ranks."""
        _check_arguments(self.args)
        if self._signals is not None:
            raise ValueError("resume is set, and an elastic run goes on by itself; leave it out")
        super().create_accelerator_and_postprocess()
        if self.accelerator.ranks_per_sample > 1:
            raise ValueError(
                "sequence_parallel and tensor_parallel have ranks that share samples, whose number cannot change yet; "
                "leave them out of patrickstar_config, or use PatrickStarTrainer"
            )
        self.accelerator.keeps_ranks = None
        most = self.args.per_device_train_batch_size
        largest = BatchRange.of(self._elastic.global_batch).max
        self.accelerator.accumulated_batches = divide_batch(largest, 1, most).accumulation

    def _global_batch(self) -> Decision:
        batch = BatchRange.of(self._elastic.global_batch).base
        return Decision(key="train_batch_size", value=batch, source="ElasticTraining.global_batch")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The global batch, at the start of its range."""
        return BatchRange.of(self._elastic.global_batch).base

    def set_initial_training_values(self, args: TrainingArguments, *others: Any, **options: Any) -> Any:
        """The Trainer's values; with a range of batches, an epoch has room for the smallest."""
        values = super().set_initial_training_values(args, *others, **options)
        if self._loop.batches.is_fixed:
            return values
        epochs, steps = self._loop.steps_of_epochs(args.num_train_epochs, args.max_steps)
        return epochs, *values[1:-1], steps

    # The loop.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains once, as the Trainer does.

        Raises:
            StateError: it has trained before.
            LeftRun: this process has left the run.
            ResizeError: this process could not join.
            RankFailure: a rank has failed: continue from a checkpoint.
        """
        self._loop.begin_training()
        return super().train(None if joins_others() else resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The steps of an epoch, with the data set, collator and workers of the Trainer's loader."""
        return self._loop.make_loader(super().get_train_dataloader())

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The Trainer's method, for a :class:`StepLoader` too."""
        return dataloader.num_samples if isinstance(dataloader, StepLoader) else super().num_examples(dataloader)

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, num_epochs: int, *others: Any) -> Any:
        place = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, *others)
        joined = self._loop.enter(max_steps, num_epochs)
        return place if joined is None else joined

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # the scheduler stays: it has the ranks' state
        made, self._created_lr_scheduler = self._created_lr_scheduler, False
        try:
            return super()._prepare_for_training(*args, **kwargs)
        finally:
            self._created_lr_scheduler = made

    def _run_epoch(self, **options: Any) -> None:
        is_first = options["epoch"] == options["epochs_trained"]
        resumes = self._loop.begin_epoch(options["epoch"], options["steps_trained_in_current_epoch"] if is_first else 0)
        while True:
            try:
                return super()._run_epoch(**options | ({"resume_from_checkpoint": _JOINED} if resumes else {}))
            except RuntimeError as error:
                if not is_lost_rank(error):
                    raise
                epoch, first_step = self._loop.recover(error)
            options |= {"epoch": epoch, "epochs_trained": epoch, "steps_trained_in_current_epoch": first_step}
            resumes = self._loop.begin_epoch(epoch, first_step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _JOINED:  # random numbers came from the other ranks
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Carries out orders, then calls the Trainer's method."""
        return super().get_batch_samples(*args, **kwargs) if self._loop.goes_on() else ([], None)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # An evaluation's batches are no steps.
        steps = (step if isinstance(step, StepBatches) else [step] for step in batch_samples)
        return super()._get_num_items_in_batch([one for step in steps for one in step], device)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._loop.note_epoch()
        if not self._loop.has_stopped:
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._loop.note_position()
        super()._save_checkpoint(*args, **kwargs)
        self._loop.note_checkpoint()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._loop.end()
        return super()._finalize_training(*args, **kwargs)


def _check_arguments(args: TrainingArguments) -> None:
    strategy = getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)
    reasons = [
        (
            args.gradient_accumulation_steps != 1,
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but with ElasticTraining it follows "
            "from global_batch, per_device_train_batch_size and the number of ranks; leave it out",
        ),
        (
            strategy != "random",
            f"train_sampling_strategy is {strategy!r}, and the samples of a step must be the same on any number of "
            "ranks: ElasticTraining draws them at random; leave it out",
        ),
        (
            args.ignore_data_skip,
            "ignore_data_skip would begin an epoch anew, and processes that join begin within one; leave it out",
        ),
        (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices is False, with which the loss depends on how samples are divided among "
            "ranks; leave it out",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise ValueError(reason)


class ElasticTrainer(ElasticTrainerMixin, Trainer):
    """A ``transformers.Trainer`` whose number of ranks may change while it trains."""


class ElasticSeq2SeqTrainer(ElasticTrainerMixin, Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose number of ranks may change while it trains."""

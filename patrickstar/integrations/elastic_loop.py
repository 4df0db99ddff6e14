"""Elastic ranks under a Trainer's loop: its sampler, its run, and its user state ([Note: steps of an elastic Trainer],
elastic_trainer.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import SaveStrategy

from patrickstar._C import StateError
from patrickstar.elastic import (
    BatchRange,
    ElasticRun,
    ElasticSampler,
    GradientParts,
    Membership,
    MicroBatches,
    Next,
    Resized,
    ScaledRates,
)
from patrickstar.elastic.batches import start_batch
from patrickstar.elastic.phases import Recovered
from patrickstar.elastic.run import joins_others
from patrickstar.integrations.elastic_steps import StepLoader
from patrickstar.integrations.trainer_progress import TrainerProgress
from patrickstar.session.interrupts import deferred_signals

_POSITION = "patrickstar.elastic"  # among the states of callbacks in a checkpoint's trainer state
_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class LeftRun(SystemExit):  # noqa: N818 (it ends a script, and is no error)
    """Raised when this process is no longer a rank, and its model has no values: ends the script with status 0, unless
    caught.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticTraining:
    """Options of an elastic trainer beside its ``TrainingArguments``."""

    global_batch: int | BatchRange
    """Samples of an optimizer step on all ranks, for any number of ranks. ``per_device_train_batch_size`` is the most
    that a rank computes at once; the number of micro-batches follows. With a range, orders may change the batch.
    ``max_steps``, learning rates and their schedule are then given for the range's base.
    """
    micro_batches: MicroBatches = MicroBatches.AT_MOST
    """Tells whether ``per_device_train_batch_size`` is constant, or follows measurements."""
    look_seconds: float = 1.0
    """Approximate seconds between checks for orders."""
    redundancy: int | None = None
    """1: after each step each rank's shards are copied to the next rank, and a lost rank costs the others its step.
    None: they end, and start again from a checkpoint.
    """
    rendezvous: str | None = None
    """ "host:port" of the rendezvous; None: that of ``PATRICKSTAR_ELASTIC``, or no orders."""
    resize_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of ``Engine.resize`` (``folder``, ``timeout_seconds``)."""

    def __post_init__(self) -> None:
        if self.redundancy not in (None, 1):
            raise ValueError(
                f"redundancy is {self.redundancy}; give 1, or leave it out: a trainer's process goes on from its "
                "checkpoints when it starts again"
            )


class ElasticLoop:
    """The elastic part of a trainer's loop: its sampler, its run, and the start of a joining process."""

    def __init__(self, trainer: Any, options: ElasticTraining):
        self._trainer = trainer
        self._options = options
        self._has_begun = False
        self._run: ElasticRun | None = None
        self._ranks, self._progress = _TrainerRanks(trainer), TrainerProgress(trainer)
        self.batches = BatchRange.of(options.global_batch)
        self.has_stopped = False
        """True if an order has stopped the run."""

    def begin_training(self) -> None:
        """Raises StateError if the trainer has trained already."""
        if self._has_begun:
            raise StateError(
                "an elastic trainer trains once: processes that join must know what they join; make another"
            )
        self._has_begun = True

    def make_loader(self, plain: DataLoader[Any]) -> StepLoader:
        """The loop's loader.

        Raises:
            ValueError: the data has no length, fewer samples than a global batch, or the global batch is not divisible
                by the ranks.
        """
        dataset, args = plain.dataset, self._trainer.args
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "train_dataset is an IterableDataset, of which nobody can say which samples a step takes; give one "
                "with __len__ and __getitem__"
            )
        self._sampler = ElasticSampler(
            len(dataset),
            self.batches,
            args.per_device_train_batch_size,
            args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            num_ranks=args.world_size,
            micro_batches=self._options.micro_batches,
        )
        self._loader = StepLoader(dataset, self._sampler, **{name: getattr(plain, name) for name in _LOADER_OPTIONS})
        return self._loader

    def steps_of_epochs(self, num_epochs: float, max_steps: int) -> tuple[int, int]:
        """(epochs, steps of the base batch) that the loop makes; by ``max_steps`` if positive."""
        samples, batches = self._sampler.num_samples, self.batches
        if max_steps > 0:
            return math.ceil(max_steps * batches.base / (samples - batches.max + 1)), max_steps
        return math.ceil(num_epochs), math.ceil(num_epochs * (samples // batches.base))

    def enter(self, max_steps: int, num_epochs: int) -> tuple[int, int] | None:
        """Puts the model into an engine and starts following orders. Returns the next epoch and the next step in it, if
        this process joins, or if the checkpoint's batches may have changed.
        """
        trainer, options = self._trainer, self._options
        self._progress.max_steps, self._num_epochs = max_steps, num_epochs
        trainer._ensure_engine()
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=trainer.optimizer)
        if not self.batches.is_fixed:
            trainer.lr_scheduler = self._scaled(trainer.lr_scheduler)
        saves = trainer.args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH)
        self._run = ElasticRun(
            self._ranks,
            {"schedule": trainer.lr_scheduler, "sampler": self._sampler, "trainer": self._progress},
            checkpoint=trainer.args.output_dir if saves else None,
            checkpoint_seconds=float("inf"),  # the Trainer decides when
            look_seconds=options.look_seconds,
            redundancy=options.redundancy,
            rendezvous=options.rendezvous,
            resize_options=options.resize_options,
        )
        if joins_others():
            return self._taken_place()
        place = (trainer.state.stateful_callbacks or {}).get(_POSITION)
        if place is None:
            self._run.go_on_from(trainer.state.global_step, trainer.state.global_step * self._run.batch.global_batch)
            return None
        self._take_position(place["attributes"])
        return self._place()

    def _taken_place(self) -> tuple[int, int]:
        """Takes over the state that this process was given; returns the next epoch and the next step in it."""
        self._progress.take_state(self._num_epochs)
        return self._place()

    def _place(self) -> tuple[int, int]:
        if not self.batches.is_fixed and self._sampler.remaining_steps == 0:
            self._sampler.next_epoch()
        return self._sampler.epoch, self._sampler.cursor // self.batches.min

    def _scaled(self, schedule: Any) -> ScaledRates:
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                f"a {type(schedule).__name__} follows evaluations, and with a range of batches the schedule follows "
                "samples; choose another lr_scheduler_type, or one global batch"
            )
        return ScaledRates(self._trainer.optimizer, self.batches, schedule)

    def note_position(self) -> None:
        """Puts the position into the trainer's state, which is about to be saved."""
        trainer, run = self._trainer, self._run
        if self.batches.is_fixed or run is None:
            return
        trainer.state.stateful_callbacks[_POSITION] = {
            "args": {},
            "attributes": {
                "sampler": self._sampler.state_dict(),
                "num_samples": trainer.lr_scheduler.num_samples,
                "noise": run.batch.noise.state_dict(),
            },
        }

    def _take_position(self, place: dict[str, Any]) -> None:
        assert self._run is not None
        start, sampler = self._run.batch.global_batch, self._sampler
        sampler.load_state_dict(place["sampler"])
        self._run.batch.noise.load_state_dict(place["noise"])
        self._run.go_on_from(self._trainer.state.global_step, place["num_samples"])
        sampler.set_batch(start if start_batch() is not None else sampler.global_batch)
        sampler.set_ranks(sampler.rank, sampler.division.num_ranks)

    def recover(self, error: RuntimeError) -> tuple[int, int]:
        """Goes on with the ranks that are left, and returns the next epoch and the next step in it.

        Raises:
            RuntimeError: it cannot.
            LeftRun: this process is no longer a rank.
        """
        if self._run is None:
            raise error
        self._run.recover(error)
        if self._run.next is Next.LEAVE:
            raise LeftRun(0)
        return self._taken_place()

    def begin_epoch(self, epoch: int, first_step: int) -> bool:
        """Begins an epoch; returns True if it must be resumed as from a checkpoint, since this process has joined
        within it.
        """
        rates = self._trainer.lr_scheduler
        if isinstance(rates, ScaledRates):  # a checkpoint's rates may be of the batch before this start
            rates.set_batch(self._sampler.global_batch)
        self._loader.begin_epoch(epoch, first_step)
        return self._progress.take_sums()

    def goes_on(self) -> bool:
        """Carries out orders, between two steps. Returns False if the run stops, or the epoch has no further batch.

        Raises:
            LeftRun: this process is no longer a rank.
        """
        run, trainer = self._run, self._trainer
        assert run is not None
        if not self._ranks.has_begun:
            self._ranks.has_begun = True
            run.copy_state()
        if run.num_steps < trainer.state.global_step:  # a step since the last call
            if self._options.redundancy is not None:
                self._ranks.share_sums()
            following = run.step_done(self._progress.last_loss)
            if following is Next.LEAVE:
                raise LeftRun(0)
            if following is Next.STOP:
                self.has_stopped = trainer.control.should_training_stop = True
        if self.has_stopped:
            return False
        if self.batches.is_fixed:
            return True
        rest = self._progress.max_steps * self.batches.base - run.num_samples
        trainer.state.max_steps = trainer.state.global_step + max(0, math.ceil(rest / run.batch.global_batch))
        trainer.control.should_epoch_stop = self._sampler.remaining_steps == 0
        return not trainer.control.should_epoch_stop

    def note_epoch(self) -> None:
        """Corrects the fraction of the epoch, which the Trainer counts in steps of one size."""
        sampler, state = self._sampler, self._trainer.state
        if not self.batches.is_fixed:
            done = 1.0 if sampler.remaining_steps == 0 else sampler.cursor / sampler.num_samples
            state.epoch = sampler.epoch + done

    def note_checkpoint(self) -> None:
        """Records a checkpoint of the present step."""
        if self._run is not None:
            self._run.note_checkpoint(self._trainer.state.global_step)

    def end(self) -> None:
        """Ends the run after the loop."""
        assert self._run is not None
        run, num_steps = self._run, self._trainer.state.global_step
        run.num_samples += run.batch.global_batch * (num_steps - run.num_steps)
        run.num_steps = num_steps
        run.end()


class _TrainerRanks:
    """A trainer in the role of an :class:`ElasticRun`'s engine."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.has_begun = joins_others()
        """True once the loop has loaded what it goes on from."""

    @property
    def device(self) -> torch.device:
        return self._trainer.accelerator.device

    @property
    def rank_timeout_seconds(self) -> float:
        return self._trainer.accelerator.rank_timeout_seconds

    @property
    def num_parameters(self) -> int:
        return self._trainer.accelerator.num_parameters

    @property
    def ranks_per_sample(self) -> int:
        return self._trainer.accelerator.ranks_per_sample

    def share_sums(self) -> None:
        """Losses not logged yet are each rank's own, and are logged as the mean."""
        trainer = self._trainer
        trainer.store_flos()
        trainer._tr_loss = trainer.accelerator.gather(trainer._tr_loss.detach()).mean()

    def keep_copies(self, name: str, **options: Any) -> None:
        if self.has_begun:
            self._trainer.accelerator.keep_copies(name, **options)

    def recover(self, error: BaseException, **options: Any) -> Recovered:
        with deferred_signals():
            recovered = self._trainer.accelerator.recover(error, **options)
            if recovered.resized.membership is Membership.RANK:
                self._changed()
        return recovered

    def resize(self, num_ranks: int, **options: Any) -> Resized:
        trainer = self._trainer
        self.share_sums()
        with deferred_signals():  # the engine and the trainer change together
            resized = trainer.accelerator.resize(num_ranks, **options)
            if resized.membership is Membership.RANK:
                self._changed()
        return resized

    def join(self, **options: Any) -> Resized:
        with deferred_signals():
            resized = self._trainer.accelerator.join(**options)
            self._changed()
        return resized

    def _changed(self) -> None:
        trainer = self._trainer
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        getattr(trainer, "_eval_dataloaders", {}).clear()  # kept if workers are persistent

    @property
    def gradient_parts(self) -> GradientParts | None:
        return self._trainer.engine.gradient_parts

    def measure_gradient_parts(self) -> None:
        self._trainer.engine.measure_gradient_parts()

    def save_checkpoint(self, directory: str, /, *, client_state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def load_checkpoint(self, directory: str, /) -> tuple[Any, dict[str, Any]]:
        raise StateError("a trainer goes on from its own checkpoints: train(resume_from_checkpoint=...)")

"""Elastic ranks under a Trainer's loop: its sampler, its run, and its user state ([Note: steps of an elastic Trainer],
elastic_trainer.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from patrickstar._C import StateError
from patrickstar.elastic import ElasticRun, ElasticSampler, Membership, MicroBatches, Next, Resized
from patrickstar.elastic.phases import Recovered
from patrickstar.elastic.run import joins_others
from patrickstar.integrations.elastic_steps import StepLoader
from patrickstar.session.interrupts import deferred_signals

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


# Sums that the Trainer zeroes at the start of its loop; its versions have more and fewer.
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")


class LeftRun(SystemExit):  # noqa: N818 (it ends a script, and is no error)
    """Raised when this process is no longer a rank, and its model has no values: ends the script with status 0, unless
    caught.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticTraining:
    """Options of an elastic trainer beside its ``TrainingArguments``."""

    global_batch: int
    """Samples of an optimizer step on all ranks, for any number of ranks. ``per_device_train_batch_size`` is the most
    that a rank computes at once; the number of micro-batches follows.
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
        self._ranks, self._progress = _TrainerRanks(trainer), _Progress(trainer)
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
            self._options.global_batch,
            args.per_device_train_batch_size,
            args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            num_ranks=args.world_size,
            micro_batches=self._options.micro_batches,
        )
        self._loader = StepLoader(dataset, self._sampler, **{name: getattr(plain, name) for name in _LOADER_OPTIONS})
        return self._loader

    def enter(self, max_steps: int, num_epochs: int) -> tuple[int, int] | None:
        """Puts the model into an engine and starts following orders. For a joining process, returns the next epoch and
        the next step in it.
        """
        trainer, options = self._trainer, self._options
        self._progress.max_steps, self._num_epochs = max_steps, num_epochs
        trainer._ensure_engine()
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=trainer.optimizer)
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
        if not joins_others():
            self._run.go_on_from(trainer.state.global_step)
            return None
        return self._taken_place()

    def _taken_place(self) -> tuple[int, int]:
        """Takes over the state that this process was given; returns the next epoch and the next step in it."""
        self._progress.take_state(self._num_epochs)
        return self._sampler.epoch, self._sampler.cursor // self._sampler.global_batch

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
        self._loader.begin_epoch(epoch, first_step)
        return self._progress.take_sums()

    def goes_on(self) -> bool:
        """Carries out orders, between two steps. Returns False if the run stops.

        Raises:
            LeftRun: this process is no longer a rank.
        """
        assert self._run is not None
        if not self._ranks.has_begun:
            self._ranks.has_begun = True
            self._run.copy_state()
        if self._run.num_steps == self._trainer.state.global_step:  # no step since the last call
            return True
        if self._options.redundancy is not None:
            self._ranks.share_sums()
        following = self._run.step_done(self._progress.last_loss)
        if following is Next.LEAVE:
            raise LeftRun(0)
        if following is Next.STOP:
            self.has_stopped = self._trainer.control.should_training_stop = True
        return not self.has_stopped

    def note_checkpoint(self) -> None:
        """Records a checkpoint of the present step."""
        if self._run is not None:
            self._run.note_checkpoint(self._trainer.state.global_step)

    def end(self) -> None:
        """Ends the run after the loop."""
        assert self._run is not None
        self._run.num_steps = self._trainer.state.global_step
        self._run.end()


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

    def save_checkpoint(self, directory: str, /, *, client_state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def load_checkpoint(self, directory: str, /) -> tuple[Any, dict[str, Any]]:
        raise StateError("a trainer goes on from its own checkpoints: train(resume_from_checkpoint=...)")


class _Progress:
    """The position of a trainer's loop, as user state of a resize; equal on all ranks."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.max_steps = 0
        """Steps that the loop makes."""
        self._taken: dict[str, Any] | None = None  # by a joining process

    @property
    def last_loss(self) -> float | None:
        """The last logged loss, or None."""
        return next((entry["loss"] for entry in reversed(self._trainer.state.log_history) if "loss" in entry), None)

    def state_dict(self) -> dict[str, Any]:
        """The state of a rank whose sums are those of all."""
        if self._taken is not None:  # the loop has not applied it yet
            return self._taken
        trainer = self._trainer
        return {
            "state": json.dumps(dataclasses.asdict(trainer.state)),
            "callbacks": json.dumps([(type(item).__name__, item.state()["attributes"]) for item in self._exported()]),
            "sums": {
                "_tr_loss": trainer._tr_loss.item(),
                **{name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            },
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Validates the state before a process joins.

        Raises:
            ValueError: its script would train another number of steps, or has other callbacks.
        """
        told, own = json.loads(state["state"])["max_steps"], self.max_steps
        if told != own:
            raise ValueError(
                f"the ranks that train make {told} steps, and this process would make {own}; start it with the same "
                "arguments and data"
            )
        theirs = [name for name, _ in json.loads(state["callbacks"])]
        mine = [type(item).__name__ for item in self._exported()]
        if theirs != mine:
            raise ValueError(
                f"the ranks that train have the callbacks {theirs}, and this process {mine}; start it with the same "
                "script"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the state until the loop can take it."""
        self._taken = state

    def _exported(self) -> list[ExportableState]:
        return [item for item in self._trainer.callback_handler.callbacks if isinstance(item, ExportableState)]

    def take_state(self, num_epochs: int) -> None:
        """Applies the state that the Trainer creates before its loop."""
        assert self._taken is not None
        trainer, state = self._trainer, TrainerState(**json.loads(self._taken["state"]))
        state.init_training_references(trainer, self.max_steps, num_epochs, None)
        trainer.state = state
        for item, (_, attributes) in zip(self._exported(), json.loads(self._taken["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(item, name, value)

    def take_sums(self) -> bool:
        """Applies the sums that the Trainer zeroes at the start of its loop; False if there are none."""
        taken, self._taken = self._taken, None
        if taken is None:
            return False
        trainer = self._trainer
        sums = dict(taken["sums"])
        trainer._tr_loss = torch.tensor(sums.pop("_tr_loss"), device=trainer.args.device)
        for name, value in sums.items():
            setattr(trainer, name, value)
        return True

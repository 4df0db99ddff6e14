"""Hugging Face: a ``Trainer`` whose model is in an engine.

    trainer = PatrickStarTrainer(
        model=model, args=args, train_dataset=data, patrickstar_config={"device_memory": "24GiB"}
    )
    trainer.train()

For other trainers put the mixin first: ``class MySFTTrainer(PatrickStarTrainerMixin, SFTTrainer)``. The model is
converted in place when training or evaluation begins, and stays in the engine until ``trainer.close()``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from patrickstar.config import parse_config
from patrickstar.engine.engine import Engine
from patrickstar.integrations.accelerate import PatrickStarAccelerator, PatrickStarOptimizer
from patrickstar.integrations.colocated_generator import connect_generator
from patrickstar.integrations.decided_config import Decision, own_config, with_parallelism
from patrickstar.integrations.engine_states import (
    by_step,
    engine_states,
    last_complete,
    leaves_no_complete,
    naming,
    read_optimizer_state,
    save_states,
    was_interrupted,
)
from patrickstar.integrations.replaced_classes import as_it_is
from patrickstar.integrations.trainer_arguments import (
    check_arguments,
    global_batch,
    load_off_devices,
    own_optimizer,
    precision_of,
    schedule_params,
    settled_config,
    taken_deepspeed,
    without_optimizer,
)
from patrickstar.integrations.trainer_callback import EngineCallback
from patrickstar.integrations.trainer_signals import signals_of
from patrickstar.integrations.weights import (
    adapter_state,
    export_into,
    exports_like_save_pretrained,
    has_sharded_matrices,
    load_adapter,
    load_into,
)
from patrickstar.lr_schedules import make_scheduler
from patrickstar.module.pretrained import weight_files

_OPTIMIZER_NAME = "optimizer.pt"  # the Trainer's file names
_SCHEDULER_NAME = "scheduler.pt"
_GIB = 2**30
_METRICS = {
    "device_gib": "device_peak_bytes",
    "host_gib": "host_bytes",
    "uploaded_gib": "uploaded_bytes",
    "downloaded_gib": "downloaded_bytes",
}


class TrainerAccelerator(PatrickStarAccelerator):
    """A trainer's accelerator; the trainer calls its ``free_memory`` before each training of the same model."""

    keeps_ranks: str | None = (
        "PatrickStarTrainer's loop and data loaders keep the ranks that they began with; use ElasticTrainer "
        "(docs/guides/elastic.md)"
    )
    """Why its engine's ranks cannot change; None: they can."""

    def _open(self, *args: Any) -> Any:
        optimizer = super()._open(*args)
        self.engine._session.owner.keeps_ranks = self.keeps_ranks
        return optimizer

    def _check_loaders(self, call: str) -> None:
        """Accepts all: the trainer's own loader follows the ranks, and evaluation loaders are made again."""

    def free_memory(self, *objects: Any) -> Any:
        """``Accelerator.free_memory``; the engine stays open."""
        return super(PatrickStarAccelerator, self).free_memory(*objects)


class PatrickStarTrainerMixin:
    """Changes a ``Trainer`` so that its model is in an engine. It must precede the trainer's class among the bases.

    Args:
        patrickstar_config: PatrickStar's configuration (docs/config.md), a dict or the path of a JSON file. Precision,
            clipping, batches and AdamW's options come from the ``TrainingArguments``. ``"resume": "auto"``: see
            trainer_signals.py.
        **kwargs: the trainer's.

    Raises:
        ValueError: an argument is not supported, or the configuration contradicts one.
    """

    accelerator: TrainerAccelerator

    def __init__(
        self,
        *args: Any,
        patrickstar_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ):
        self._engine_config = own_config(patrickstar_config)
        self._signals = signals_of(self, self._engine_config)
        load_off_devices([*args, *kwargs.values()])
        super().__init__(*args, **kwargs)
        self._given_optimizer = self.optimizer
        self._engine_callback = EngineCallback(lambda: self.engine)
        self.add_callback(self._engine_callback)
        if self._signals is not None:
            self.add_callback(self._signals)
        self._arguments_name_optimizer = self.optimizer is None and self.optimizer_cls_and_kwargs is None
        self._settle_optimizer()
        # The Trainer's filter would make the launching thread wait for each micro-batch; see training_step.
        self._filters_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False
        if getattr(self, "vllm_generation", None) is not None:  # of TRL's GRPO, RLOO and distillation
            connect_generator(self.vllm_generation, lambda: self.engine)

    @property
    def engine(self) -> Engine:
        """The model's engine.

        Raises:
            StateError: neither training nor evaluation has begun.
        """
        return self.accelerator.engine

    def close(self) -> None:
        """Closes the engine, if there is one: the model is an ordinary one again, whole on each rank. Idempotent.

        A later training or evaluation makes another engine, with new optimizer states.
        """
        self.accelerator.close_engine()

    # Setup.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}
        self._accelerator_args = args
        return args

    def create_accelerator_and_postprocess(self) -> None:
        """Calls the Trainer's method, then makes an accelerator that knows the engine."""
        check_arguments(self.args, self.model)
        config = {**taken_deepspeed(self.args), **self._engine_config}
        self._engine_config = with_parallelism(config, getattr(self.args, "parallelism_config", None))
        self.args.parallelism_config = None  # the engine alone handles it
        self._settled = settled_config(self._engine_config, self.args, self._global_batch())
        self._schedule = self._settled.pop("scheduler", None)
        parse_config(self._settled)  # reports errors now, not when training begins
        with as_it_is(Accelerator):
            super().create_accelerator_and_postprocess()
            args = {**self._accelerator_args, "mixed_precision": precision_of(self.args)}
            self.accelerator = TrainerAccelerator(patrickstar_config=self._settled, **args)
        self.accelerator.accumulated_batches = self.args.gradient_accumulation_steps
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _settle_optimizer(self) -> None:
        if self._arguments_name_optimizer:
            self.optimizer_cls_and_kwargs = own_optimizer(self.args)
            self.accelerator.replace_config(without_optimizer(self._settled, self.args))

    def _hp_search_setup(self, trial: Any) -> None:
        """The Trainer's method: arguments of a search's ``trial``, and an accelerator that obeys them."""
        searches = trial is not None and self.hp_search_backend is not None
        if searches:
            self.accelerator.close_engine(discard=True)  # of the former trial; model_init makes the next one's model
        super()._hp_search_setup(trial)
        if searches:
            self._settle_optimizer()

    def _global_batch(self) -> Decision:
        return global_batch(self._engine_config, self.args)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine decides where parameters are."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer; a new one if the present one belonged to an engine that is closed."""
        if isinstance(self.optimizer, PatrickStarOptimizer) and not self.accelerator.has_engine:
            self.optimizer = self._given_optimizer
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The Trainer's scheduler; a DeepSpeed one if the configuration has a ``scheduler``."""
        if self._schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = self.optimizer if optimizer is None else optimizer
        params = schedule_params(self._schedule.get("params", {}), self.args, num_training_steps)
        plain = getattr(optimizer, "optimizer", optimizer)
        self.lr_scheduler = make_scheduler(plain, self._schedule.get("type", ""), params)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Discards the former model first, so that there is never more than one, then calls the Trainer's method."""
        self.accelerator.close_engine(discard=True)
        return super().call_model_init(*args, **kwargs)

    def _ensure_engine(self) -> None:
        if not self.accelerator.has_engine:
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the engine if necessary, then calls the Trainer's method."""
        self._ensure_engine()
        return super().evaluation_loop(*args, **kwargs)

    # A step.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``. ``resume_from_checkpoint=True`` passes over checkpoints whose save was interrupted."""
        output = Path(self.args.output_dir)
        resumes = resume_from_checkpoint is True or (resume_from_checkpoint is None and self._signals is not None)
        if resumes and output.is_dir() and (found := last_complete(output.iterdir())) is not None:
            resume_from_checkpoint = str(found)
        with self._signals or contextlib.nullcontext():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The Trainer's step. ``logging_nan_inf_filter`` replaces a loss that is not finite by the average since the
        last log; here on the device, without a wait.
        """
        loss = super().training_step(*args, **kwargs)
        if not self._filters_losses:
            return loss
        average = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, average)

    def compute_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """The Trainer's loss. The Trainer multiplies it by the number of processes, over which the engine averages;
        processes that share a sequence have one loss, so it is divided by their number.
        """
        found = super().compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)
        shared, counts = self.accelerator.ranks_per_sample, self.model_accepts_loss_kwargs or self.compute_loss_func
        if shared == 1 or not (self.args.average_tokens_across_devices and counts and num_items_in_batch is not None):
            return found
        return (found[0] / shared, *found[1:]) if isinstance(found, tuple) else found / shared

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The Trainer's size, counting processes that share a sequence once."""
        return super().get_total_train_batch_size(args) // self.accelerator.ranks_per_sample

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tensor(self.engine.grad_norm()) if grad_norm is None else grad_norm

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's method. Several ranks generate in lockstep, since each forward all-gathers shards."""
        if self.args.world_size > 1 and getattr(self.args, "predict_with_generate", False):
            self._gen_kwargs = {"synced_gpus": True, **getattr(self, "_gen_kwargs", {})}
        loss, outputs, labels = super().prediction_step(*args, **kwargs)
        if self.accelerator.ranks_per_sample > 1 and isinstance(outputs, torch.Tensor) and outputs.dim() > 1:
            outputs = self.engine.gather_tokens(outputs)
        return loss, outputs, labels

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's method. Training logs also have ``patrickstar/device_gib`` (the peak), ``host_gib``,
        ``uploaded_gib`` and ``downloaded_gib`` (since the engine was made). ``stalled`` is the share of a recent step
        in which the device waited for PatrickStar.
        """
        if "loss" in logs and self.accelerator.has_engine:
            report = self.engine.report()
            logs.update({f"patrickstar/{name}": round(report[key] / _GIB, 4) for name, key in _METRICS.items()})
            sampler = self._engine_callback.sampler
            if sampler is not None and sampler.latest is not None:
                logs["patrickstar/stalled"] = round(sampler.latest.share, 4)
        super().log(logs, *args, **kwargs)

    # Saving and loading. Adapters, and other mostly frozen models, are saved as the Trainer does: the engine's
    # checkpoint would contain the whole base. Tensor-parallel ones do use it, since each rank has other states.

    @property
    def _is_adapted(self) -> bool:
        return hasattr(self.model, "peft_config")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's method, called by all ranks: the same files, with weights streamed into them."""
        if not self.accelerator.has_engine:
            super().save_model(output_dir, _internal_call)
            return
        self._save_weights(self.args.output_dir if output_dir is None else output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_weights(self, folder: str) -> None:
        dtype = self.accelerator.user_dtype
        if self._is_adapted:
            state = adapter_state(self.engine)
            if self.args.should_save:
                self._save(folder, state_dict=state)
            # PEFT may query the model itself, on every rank
            elif callable(getattr(self.model, "get_base_model", None)):
                self.model.save_pretrained(folder, state_dict=state, is_main_process=False)
        elif dtype is not None and exports_like_save_pretrained(self.model):
            if self.args.should_save:
                self._save(folder, state_dict={})  # everything but the weights
            export_into(self.engine, folder, dtype, is_first_rank=self.args.should_save)
        else:
            state = self.model.state_dict()
            if self.args.should_save:
                self._save(folder, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._is_adapted and not has_sharded_matrices(self.engine):
            state = self.optimizer.state_dict()
            if self.args.should_save:
                torch.save(state, Path(output_dir) / _OPTIMIZER_NAME)
        else:
            self.engine.wait_for_save()  # the one before is complete, or its failure is raised
            folders = by_step(Path(output_dir).parent.iterdir())
            others = [was_interrupted(path) for path in folders if path != Path(output_dir)]
            save_states(self.engine, output_dir, waits=leaves_no_complete(others, self.args.save_total_limit))
        if self.args.should_save:
            with warnings.catch_warnings():  # schedulers warn about being saved without their optimizer
                warnings.simplefilter("ignore", UserWarning)
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if engine_states(resume_from_checkpoint) is not None:
            return  # the weights come with the optimizer
        self._check_optimizer_file(resume_from_checkpoint)
        self._load_weights(resume_from_checkpoint, functools.partial(super()._load_from_checkpoint, model=model))

    def _check_optimizer_file(self, folder: str) -> None:
        """Raises ValueError, before any weight is loaded, if an ordinary Trainer's optimizer state is not supported."""
        path = Path(folder) / _OPTIMIZER_NAME
        if not path.is_file():
            return
        state = read_optimizer_state(path)
        if self._is_adapted or not weight_files(folder):
            return  # the engine is made when the weights are loaded
        self._ensure_engine()
        with naming(path):
            self.optimizer.optimizer.checked_state(state)

    def _load_best_model(self) -> None:
        self._load_weights(
            self.state.best_model_checkpoint, lambda _: super(PatrickStarTrainerMixin, self)._load_best_model()
        )

    def _load_weights(self, folder: str, load_otherwise: Any) -> None:
        if self._is_adapted and self.accelerator.has_engine and has_sharded_matrices(self.engine):
            load_adapter(self.engine, folder)
        elif self._is_adapted or not weight_files(folder):
            load_otherwise(folder)
        else:
            self._ensure_engine()  # values go straight into chunks, even for a model on the meta device
            self._issue_warnings_after_load(load_into(self.model, folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer, scheduler = Path(checkpoint) / _OPTIMIZER_NAME, Path(checkpoint) / _SCHEDULER_NAME
        states = engine_states(checkpoint)
        if states is not None:
            devices = [self.engine.device] if self.engine.device.type == "cuda" else []
            with torch.random.fork_rng(devices):  # the Trainer restores them later, when the epoch's order is drawn
                self.engine.load_checkpoint(states)
        elif optimizer.is_file():  # adapters, or saved by an ordinary Trainer
            with naming(optimizer):
                self.optimizer.load_state_dict(read_optimizer_state(optimizer))
        else:
            return
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))


class PatrickStarTrainer(PatrickStarTrainerMixin, Trainer):
    """A ``transformers.Trainer`` whose model trains in an engine."""


class PatrickStarSeq2SeqTrainer(PatrickStarTrainerMixin, Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose model trains in an engine."""

"""Checkpoints and weights of ``patrickstar.initialize``'s engine: the run, with the schedule and the counts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import latest_tag
from patrickstar.checkpoint.foreign import find_foreign
from patrickstar.checkpoint.runs.universal import COUNT_KEYS, DEEPSPEED_COUNTS
from patrickstar.checkpoint.writer import Latest, SaveOptions
from patrickstar.deepspeed.accumulation import Accumulation
from patrickstar.deepspeed.weights_file import read_16bit_weights, save_16bit_weights
from patrickstar.engine.engine import Engine
from patrickstar.monitor import StepMonitor
from patrickstar.session.interrupts import deferred_signals
from patrickstar.state.parts import Completion, Frozen, LoadOptions, Names, Part
from patrickstar.state.rank_peers import RankPeers
from patrickstar.state.save_load import Scheduler, load_session, save_session

logger = logging.getLogger("patrickstar")


class SavingEngine(Engine):
    """An engine whose checkpoints include the schedule and the counts."""

    lr_scheduler: Any
    """The learning-rate schedule, or None; stepped with every applied update."""
    global_steps: int
    """Optimizer steps, including skipped ones."""
    global_samples: int
    """Samples of all ranks that were trained on."""
    skipped_steps: int
    """Steps whose gradients were not finite."""
    _accumulation: Accumulation
    _monitor: StepMonitor

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool | None = None,
    ) -> bool:
        """Saves the run between two steps, with the schedule and the counts (docs/checkpoints.md).

        With ``"checkpoint": {"writer": {"decoupled": true}}`` a thread completes it while training goes on. Then the
        next save or load, :meth:`wait_for_save` and :meth:`destroy` wait for it, and a failure is raised there or in
        the next optimizer step.

        Args:
            save_dir: created if absent.
            tag: None: ``global_step<n>``.
            client_state: user state made of numbers, strings, bools, None, lists, tuples, dicts.
            save_latest: make this checkpoint the latest.
            exclude_frozen_parameters: leave out parameters that require no grad; load such a checkpoint with
                ``load_module_strict=False``, into a model that has their values.
            wait: whether the call returns when the checkpoint is complete; None: as the configuration says.

        Raises:
            CheckpointError: it was not saved; earlier checkpoints are unchanged.
            StateError: there are gradients that no step has used, or ranks gave different tags.
            ValueError: ``save_dir`` is empty.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint(save_dir={save_dir!r}): give the path of a folder")
        session = self._session
        session.check_open()
        state = {**(client_state or {}), DEEPSPEED_COUNTS: self._own_state()}
        options = SaveOptions(
            peers=RankPeers(session.ranks.control), latest=Latest.NEW if save_latest else Latest.AS_BEFORE
        )
        frozen = Frozen.LEFT_OUT if exclude_frozen_parameters else Frozen.SAVED
        wait = not session.config.checkpoint.writer.decoupled if wait is None else wait
        completion = Completion.NOW if wait else Completion.LATER
        tag = None if tag is None else str(tag)
        with deferred_signals() as signals, session.guard("save_checkpoint"), signals.allowed():
            session.ranks.check_agreement("the tag of save_checkpoint", str(tag))
            save_session(session, save_dir, tag, state, self._saved_scheduler(), options, frozen, completion)
        return True

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continues from a checkpoint, saved with any number of ranks and any budget.

        Args:
            load_dir: as given to :meth:`save_checkpoint`, also to DeepSpeed's (docs/checkpoints.md).
            tag: None: the latest.
            load_module_strict: False: parameters and buffers that only the model or only the checkpoint has are
                skipped.
            load_optimizer_states: False: optimizer states, step counts, the groups' options and the loss scale are
                unchanged.
            load_lr_scheduler_states: False: the schedule is unchanged.
            load_module_only: True: only parameters, buffers and modules' extra states are loaded; schedule, counts and
                random number generators are unchanged too.
            custom_load_fn: must be None.

        Returns:
            the checkpoint's folder and the ``client_state``; (None, None) if ``load_dir`` has no checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model, or there is none of that tag.
            ValueError: ``custom_load_fn`` is given.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint(custom_load_fn=...): values go from files into chunks; leave it out")
        self.wait_for_save()
        if tag is None and find_foreign(load_dir) is None and latest_tag(load_dir) is None:
            logger.warning("%s has no checkpoint: nothing was loaded", os.fspath(load_dir))
            return None, None
        part = Part.EVERYTHING if load_optimizer_states else Part.ALL_BUT_OPTIMIZER
        part = Part.MODULE if load_module_only else part
        names = Names.SAME if load_module_strict else Names.COMMON
        scheduler = self._saved_scheduler() if load_lr_scheduler_states and part is not Part.MODULE else None
        tag = None if tag is None else str(tag)
        options = LoadOptions(part=part, names=names)
        self._session.train_unfrozen()
        with deferred_signals() as signals:
            with self._session.guard("load_checkpoint"), signals.allowed():
                path, client_state = load_session(self._session, load_dir, tag, scheduler, options=options)
            self._accumulation.forget_step()
            own = client_state.pop(DEEPSPEED_COUNTS, {})
            is_foreign = find_foreign(path) is not None
            theirs = {key: client_state.pop(key) for key in COUNT_KEYS if is_foreign and key in client_state}
            if part is not Part.MODULE:
                self._set_own_state(own)
                for key, count in theirs.items():
                    setattr(self, key, count)
        return str(path), client_state

    def _saved_scheduler(self) -> Scheduler | None:
        return self.lr_scheduler if callable(getattr(self.lr_scheduler, "state_dict", None)) else None

    def _own_state(self) -> dict[str, Any]:
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self._accumulation.num_done,
            "monitor": self._monitor.state_dict(),
        }

    def _set_own_state(self, state: Mapping[str, Any]) -> None:
        if not state:  # saved by an engine of initialize_engine
            return
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        self._accumulation.num_done = state["micro_steps"]
        self._monitor.load_state_dict(state["monitor"])

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the module's ``state_dict`` in the compute dtype (bfloat16 in float32 training) into one file:
        PyTorch's format, or safetensors by its suffix. All ranks must call it; the first writes. An existing file stays
        until the new one is complete.

        Safetensors are written parameter by parameter; PyTorch's format needs a 16-bit copy on the first rank.
        ``export_weights`` writes Hugging Face's sharded files.

        Raises:
            CheckpointError: on all ranks, if it cannot be written; training can go on.
        """
        path = Path(save_dir) / save_filename
        with deferred_signals() as signals, signals.allowed():
            save_16bit_weights(self._session, path, with_frozen=not exclude_frozen_parameters)
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The content of :meth:`save_16bit_model`'s file, on the first rank; None on the others. All ranks must call
        it. Scripts call this private method of DeepSpeed's.
        """
        return read_16bit_weights(self._session, with_frozen=not exclude_frozen_parameters)

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """``module.state_dict()``, optionally without parameters that require no grad."""
        state = self.module.state_dict(**kwargs)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(kwargs.get("prefix", "") + name, None)
        return state

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """``module.load_state_dict``; returns its missing and unexpected keys."""
        return self.load_state_dict(state_dict, strict)

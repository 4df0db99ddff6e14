"""What ``patrickstar.initialize``'s engine saves and loads: its run, with the schedule and the counts, and weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import latest_tag
from patrickstar.checkpoint.writer import Latest, SaveOptions
from patrickstar.deepspeed.accumulation import Accumulation
from patrickstar.deepspeed.weights_file import read_16bit_weights, save_16bit_weights
from patrickstar.engine.engine import Engine
from patrickstar.engine.engine_state import RankPeers, Scheduler, load_session, save_session
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.state_parts import Frozen, LoadOptions, Names, Part
from patrickstar.monitor import StepMonitor

logger = logging.getLogger("patrickstar")

_OWN_STATE = "patrickstar.deepspeed"  # beside the user's, in a checkpoint's client_state


class SavingEngine(Engine):
    """An engine with a schedule and counts, which go into its checkpoints and come back."""

    lr_scheduler: Any
    """The learning-rate schedule, or None; it is stepped with every update that was applied."""
    global_steps: int
    """Optimizer steps, skipped ones too."""
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
    ) -> bool:
        """Saves the run between two steps, with the schedule and the counts (docs/checkpoints.md).

        Args:
            save_dir: made if there is none.
            tag: ``global_step<n>`` for None.
            client_state: the user's, of numbers, strings, bools, None, lists, tuples, dicts.
            save_latest: whether the latest checkpoint is this one from then on.
            exclude_frozen_parameters: whether parameters that require no grad are left out; such a checkpoint is loaded
                with ``load_module_strict=False``, into a model that has their values.

        Raises:
            CheckpointError: it was not saved; what was saved before is as it was.
            StateError: there are gradients that no step has used, or ranks gave different tags.
            ValueError: ``save_dir`` is empty.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint(save_dir={save_dir!r}): give the path of a folder")
        session = self._session
        session.check_open()
        state = {**(client_state or {}), _OWN_STATE: self._own_state()}
        options = SaveOptions(peers=RankPeers(session), latest=Latest.NEW if save_latest else Latest.AS_BEFORE)
        frozen = Frozen.LEFT_OUT if exclude_frozen_parameters else Frozen.SAVED
        tag = None if tag is None else str(tag)
        with deferred_signals() as signals, session.guard("save_checkpoint"), signals.allowed():
            session.ranks.check_agreement("the tag of save_checkpoint", str(tag))
            save_session(session, save_dir, tag, state, self._saved_scheduler(), options, frozen)
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
        """Goes on from a checkpoint, saved with any number of ranks and any budget.

        Args:
            load_dir: as given to :meth:`save_checkpoint`.
            tag: the latest for None.
            load_module_strict: False: parameters and buffers that only the model or only the checkpoint has are left
                alone.
            load_optimizer_states: False: Adam's states, counts of updates, the groups' options and the loss scale stay
                as they are.
            load_lr_scheduler_states: False: the schedule stays as it is.
            load_module_only: True: parameters, buffers and modules' extra states alone are loaded; schedule, counts and
                random number generators stay as they are too.
            custom_load_fn: None.

        Returns:
            The checkpoint's folder and the ``client_state``; (None, None) where ``load_dir`` has no checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model, or there is none of that tag.
            ValueError: ``custom_load_fn`` is given.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint(custom_load_fn=...): values go from files into chunks; leave it out")
        if tag is None and latest_tag(load_dir) is None:
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
            own = client_state.pop(_OWN_STATE, {})
            if part is not Part.MODULE:
                self._set_own_state(own)
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
        """Writes the module's ``state_dict`` in the compute dtype (bfloat16 in float32 training) into one file: of
        PyTorch, or of safetensors when its name ends so. All ranks call it, the first writes; what has its name before
        stays until the file is complete. Safetensors are written parameter by parameter; a file of PyTorch's goes
        through a 16-bit copy on the first rank. ``export_weights`` writes Hugging Face's sharded files.

        Raises:
            CheckpointError: on all ranks, when it cannot be written; the engine trains on.
        """
        path = Path(save_dir) / save_filename
        with deferred_signals() as signals, signals.allowed():
            save_16bit_weights(self._session, path, with_frozen=not exclude_frozen_parameters)
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """What :meth:`save_16bit_model` writes, on the first rank; None on the others. All ranks call it. Scripts call
        this private method of DeepSpeed's.
        """
        return read_16bit_weights(self._session, with_frozen=not exclude_frozen_parameters)

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """``module.state_dict()``, without parameters that require no grad if so wanted."""
        state = self.module.state_dict(**kwargs)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(kwargs.get("prefix", "") + name, None)
        return state

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """``module.load_state_dict``, and what that returns: missing and unexpected keys."""
        return self.load_state_dict(state_dict, strict)

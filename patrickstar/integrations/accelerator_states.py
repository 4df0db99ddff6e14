"""``save_state`` and ``load_state`` of an accelerator with an engine, and the end of training."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from patrickstar.engine.engine import Engine
from patrickstar.integrations.engine_states import (
    CHECKPOINT_FOLDER,
    engine_states,
    is_incomplete,
    leaves_no_complete,
    naming,
    read_optimizer_state,
    save_states,
)
from patrickstar.integrations.weights import load_into
from patrickstar.module.pretrained import weight_files

_OPTIMIZER_FILE = "optimizer.bin"  # Accelerate's name


class AcceleratorStates(Accelerator):
    """A base class of an ``Accelerator`` whose model and optimizer an engine saves."""

    engine: Engine
    has_engine: bool

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """``Accelerator.save_state``. Schedulers, data loaders, random numbers and registered objects are saved by
        Accelerate, model and optimizer as the engine's checkpoint, in the folder ``patrickstar``. Hooks get no models.

        Training goes on before the checkpoint is complete. It is complete, or its failure is raised, in the next
        ``save_state``, ``load_state``, ``end_training`` or ``free_memory``; the engine's next step raises the failure
        of a save that is over. A save into a folder with an older state is complete when the call returns, and so is
        one after which ``total_limit`` would leave no other complete state.
        """
        engine = self.engine
        engine.wait_for_save()  # before Accelerate removes the one before it
        limit = self.project_configuration.total_limit
        is_named = self.project_configuration.automatic_checkpoint_naming
        waits = is_named and leaves_no_complete([*map(is_incomplete, self._named_states())], limit)
        with _Aside(self), self._with_total_limit(None if waits else limit):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        save_states(engine, folder, waits=waits)
        if waits and self.is_main_process:
            for state in self._named_states()[:-limit]:
                shutil.rmtree(state)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """``Accelerator.load_state``, for results of :meth:`save_state`, also Accelerate's own, alone or with DDP,
        DeepSpeed or FSDP.
        """
        self.engine.wait_for_save()
        folder = Path(input_dir).expanduser() if input_dir is not None else self._latest_state()
        states, optimizer_file = engine_states(folder), folder / _OPTIMIZER_FILE
        if states is None and optimizer_file.is_file() and weight_files(folder):
            optimizer, state = self._optimizers[0].optimizer, read_optimizer_state(optimizer_file)
            with naming(optimizer_file):
                optimizer.checked_state(state)
            load_into(self.engine.module, folder)
            optimizer.load_state_dict(state)
        else:
            self.engine.load_checkpoint(states or folder / CHECKPOINT_FOLDER)
        with _Aside(self):
            super().load_state(str(folder), load_kwargs, **kwargs)

    def end_training(self) -> None:
        """``Accelerator.end_training``, after the last :meth:`save_state` is complete."""
        if self.has_engine:
            self.engine.wait_for_save()
        super().end_training()

    @contextlib.contextmanager
    def _with_total_limit(self, limit: int | None) -> Iterator[None]:
        project = self.project_configuration
        held, project.total_limit = project.total_limit, limit
        try:
            yield
        finally:
            project.total_limit = held

    def _named_states(self) -> list[Path]:
        """The folders of automatic names, by number."""
        found = {
            int(match.group(1)): folder
            for folder in Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            if (match := re.fullmatch(r"checkpoint_(\d+)", folder.name))
        }
        return [found[number] for number in sorted(found)]

    def _latest_state(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        found = [state for state in self._named_states() if not is_incomplete(state)]
        if not found:
            raise ValueError(
                f"there is no complete checkpoint in {self.project_dir}/checkpoints; call save_state first"
            )
        return found[-1]

    def save_checkpoint(self, directory: str | os.PathLike[str], **options: Any) -> Path:
        """The engine's method (for :class:`patrickstar.elastic.ElasticRun`)."""
        return self.engine.save_checkpoint(directory, **options)

    def load_checkpoint(self, directory: str | os.PathLike[str], **options: Any) -> tuple[Path, dict[str, Any]]:
        """The engine's method."""
        return self.engine.load_checkpoint(directory, **options)


class _Aside:
    """Context in which an accelerator has no models and optimizers: the engine saves and loads them."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    def __enter__(self) -> None:
        accelerator = self._accelerator
        self._held = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []

    def __exit__(self, *error: object) -> None:
        self._accelerator._models, self._accelerator._optimizers = self._held

"""The engine of ``patrickstar.initialize``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from patrickstar import _C
from patrickstar.checkpoint import latest_tag
from patrickstar.checkpoint.engine_state import Scheduler
from patrickstar.config import BatchSizes
from patrickstar.engine import Engine
from patrickstar.monitor import MonitorOptions, Phase
from patrickstar.optim import HybridAdam
from patrickstar.session import Session
from patrickstar.training.accumulation import Accumulation
from patrickstar.training.weights_file import save_16bit_weights

logger = logging.getLogger("patrickstar")

_OWN_STATE = "patrickstar.training"  # beside the user's, in a checkpoint's client_state


class TrainingEngine(Engine):
    """Trains a module step by step, with micro-batches, a schedule and logs:

        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    ``step`` is called for every micro-batch and updates at the boundary of accumulation. Methods have the names and
    meaning of DeepSpeed's engine; attributes that are not the engine's are the module's.
    """

    optimizer: HybridAdam
    """The optimizer; its ``step`` is called by :meth:`step`."""
    lr_scheduler: Any
    """The learning-rate schedule, or None; it is stepped with every update that was applied."""
    training_dataloader: DataLoader[Any] | None
    """The loader of ``training_data``."""
    global_steps: int
    """Optimizer steps, skipped ones too."""
    global_samples: int
    """Samples of all ranks that were trained on."""
    skipped_steps: int
    """Steps whose gradients were not finite."""

    def __init__(
        self,
        session: Session,
        optimizer: HybridAdam,
        batch_sizes: BatchSizes,
        monitor_options: MonitorOptions,
        lr_scheduler: Any = None,
        training_dataloader: DataLoader[Any] | None = None,
    ):
        super().__init__(session)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self._micro_batch_size = batch_sizes.micro_batch_size
        self._accumulation = Accumulation(batch_sizes.accumulation_steps)
        self._monitor = self.make_monitor(monitor_options)
        self._inputs: Any = None
        self._is_syncing = True
        self._step_applied = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
            return getattr(module, name)

    # A step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; see :meth:`patrickstar.engine.Engine.forward`."""
        if not (self.training and torch.is_grad_enabled() and self._monitor.is_active):
            return super().forward(*args, **kwargs)
        self._inputs = (args, kwargs)
        with self._monitor.phase(Phase.FORWARD):
            return super().forward(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Backward of one micro-batch.

        Args:
            loss: of one element.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: whether the loss is divided by the micro-batches of a step, so that gradients are their mean.
            **kwargs: passed to ``Tensor.backward``.

        Returns:
            The loss as it was divided.

        Raises:
            ValueError, StateError, MemoryBudgetError: as :meth:`patrickstar.engine.Engine.backward`.
        """
        steps = self._accumulation.num_micro_batches
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        with self._monitor.phase(Phase.BACKWARD):
            super().backward(scaled, retain_graph=retain_graph, **kwargs)
        self._monitor.add_micro_batch(self._inputs, loss.detach() if scale_wrt_gas else loss.detach() * steps)
        self._inputs = None
        self._accumulation.note_backward()
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the boundary of accumulation also clips, updates, and steps the schedule where the
        update was applied.

        Args:
            lr_kwargs: passed to the schedule's ``step``.

        Raises:
            StateError: no backward came before, or it is called within :meth:`no_sync`.
        """
        if not self._is_syncing:
            raise _C.StateError("step() within no_sync(): leave the with statement before the step")
        self._accumulation.check_backward()
        self._step_applied = False
        if self._accumulation.is_boundary:
            self._update(lr_kwargs or {})
        self._accumulation.end_micro_batch()

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        lr = self.get_lr()[0]
        with self._monitor.phase(Phase.STEP):
            self.optimizer.step()
        self._step_applied = self._session.outcome.applied
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._monitor.end_step(lr)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside accumulate only; :meth:`step` is refused there. Gradients of ranks are summed in shards
        as they come, in any case: a rank keeps no more of them than its share.
        """
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the :meth:`step` of the present micro-batch updates."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the caller says which :meth:`step` updates."""
        self._accumulation.say_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` updated parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the last step's gradients before clipping; not a number when it was skipped, None before
        the first step.
        """
        return self._session.outcome.grad_norm if self._session.num_steps > 0 else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients since the last update: the step begins anew."""
        super().zero_grad(set_to_none)
        self._accumulation.forget_step()

    # Options and counts.

    def get_lr(self) -> list[float]:
        """The groups' learning rates."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[tuple[float, float]]:
        """The groups' betas."""
        return [group["betas"] for group in self.optimizer.param_groups]

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self._accumulation.num_done

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._session.ranks.context.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self._session.ranks.context.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return len(self._session.ranks.members)

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without float16."""
        return self._session.loss_scale

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self._micro_batch_size * self._accumulation.num_micro_batches * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation.num_micro_batches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes how many micro-batches make a step. Between two steps.

        Raises:
            ValueError: it is no multiple of micro-batch x ranks.
            StateError: a step has begun.
        """
        if not self._accumulation.is_between_steps:
            raise _C.StateError("set_train_batch_size within a step; call it after the step's last micro-batch")
        samples = self._micro_batch_size * self.world_size
        if train_batch_size <= 0 or train_batch_size % samples != 0:
            raise ValueError(
                f"train_batch_size is {train_batch_size}; give a multiple of micro-batch x ranks, {samples}"
            )
        self._accumulation.num_micro_batches = train_batch_size // samples

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        **accepted: Any,
    ) -> bool:
        """Saves the run between two steps, with the schedule and the counts (docs/checkpoints.md).

        Args:
            save_dir: made if there is none.
            tag: ``global_step<n>`` for None.
            client_state: the user's, of numbers, strings, bools, None, lists, tuples, dicts.
            **accepted: ``save_latest`` and ``exclude_frozen_parameters`` of DeepSpeed, at their defaults.

        Raises:
            CheckpointError: it was not saved; what was saved before is as it was.
            StateError: there are gradients that no step has used.
            ValueError: an option that is not supported.
        """
        _refuse(accepted, {"save_latest": True, "exclude_frozen_parameters": False}, "save_checkpoint")
        state = {**(client_state or {}), _OWN_STATE: self._own_state()}
        super().save_checkpoint(
            save_dir, None if tag is None else str(tag), state, lr_scheduler=self._saved_scheduler()
        )
        return True

    def load_checkpoint(  # type: ignore[override]
        self, load_dir: str | os.PathLike[str], tag: str | None = None, **accepted: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Goes on from a checkpoint, saved with any number of ranks and any budget.

        Args:
            load_dir: as given to :meth:`save_checkpoint`.
            tag: the latest for None.
            **accepted: DeepSpeed's options, at their defaults; ``load_lr_scheduler_states=False`` leaves the schedule.

        Returns:
            The checkpoint's folder and the ``client_state``; (None, {}) where ``load_dir`` has no checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model, or there is none of that tag.
        """
        with_schedule = accepted.pop("load_lr_scheduler_states", True)
        _refuse(
            accepted,
            {
                "load_module_strict": True,
                "load_optimizer_states": True,
                "load_module_only": False,
                "custom_load_fn": None,
            },
            "load_checkpoint",
        )
        if tag is None and latest_tag(load_dir) is None:
            logger.warning("%s has no checkpoint: nothing was loaded", os.fspath(load_dir))
            return None, {}
        scheduler = self._saved_scheduler() if with_schedule else None
        self._accumulation.forget_step()
        path, client_state = super().load_checkpoint(
            load_dir, None if tag is None else str(tag), lr_scheduler=scheduler
        )
        self._set_own_state(client_state.pop(_OWN_STATE, {}))
        return str(path), client_state

    def _saved_scheduler(self) -> Scheduler | None:
        return self.lr_scheduler if callable(getattr(self.lr_scheduler, "state_dict", None)) else None

    def _own_state(self) -> dict[str, Any]:
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self.micro_steps,
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
        PyTorch, or of safetensors when its name ends so. All ranks call it, the first writes.

        ``export_weights`` writes Hugging Face's sharded files without a copy of the model in memory.
        """
        path = Path(save_dir) / save_filename
        save_16bit_weights(self._session, path, with_frozen=not exclude_frozen_parameters)
        return True

    def module_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """``module.state_dict()``."""
        return self.module.state_dict(**kwargs)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """``module.load_state_dict``."""
        return self.load_state_dict(state_dict, strict)

    def close(self) -> None:
        """As :meth:`patrickstar.engine.Engine.close`; logs are written out."""
        self._monitor.close()
        super().close()

    def destroy(self) -> None:
        """The same as :meth:`close`."""
        self.close()


def _refuse(given: Mapping[str, Any], supported: Mapping[str, Any], call: str) -> None:
    for name, value in given.items():
        if name not in supported:
            raise ValueError(f"{call} has no option {name}; its options are {', '.join(supported)}")
        if value != supported[name]:
            raise ValueError(f"{call}({name}={value!r}) is not supported; leave it at {supported[name]!r}")

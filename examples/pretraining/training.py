"""A pre-training run: an engine, its optimizer and schedule, and what one step is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from patrickstar.finetune.recipe import warmup_then_cosine
from patrickstar.optimizer.groups import ModelParameters
from patrickstar.runtime import initialize_engine

from .options import TrainingOptions


class Pretraining:
    """Trains what ``model_func`` builds. With several ranks each has one of these, and all call the same methods."""

    def __init__(
        self,
        model_func: Callable[[], nn.Module],
        options: TrainingOptions,
        *,
        local_rank: int = 0,
        model_parameters: ModelParameters = None,
    ):
        """``local_rank`` and ``model_parameters`` are as for ``initialize_engine``."""
        self.options = options
        self.config = options.engine_config()
        self._engine, self._optimizer = initialize_engine(model_func, local_rank, self.config, model_parameters)
        self._engine.train()
        self._scheduler = LambdaLR(self._optimizer, _schedule(options))

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of all micro-batches, and one update.

        Args:
            batch: this rank's sequences of the whole step, by the model's argument names; ``accumulate`` equal parts of
                them are run one after the other.

        Returns:
            This rank's mean loss before the update, on the device; reading it waits for the device.
        """
        self._optimizer.zero_grad()
        num_parts = self.options.accumulate
        losses = []
        for part in _parts(batch, num_parts):
            loss = self._engine(**part).loss
            self._engine.backward(loss if num_parts == 1 else loss / num_parts)
            losses.append(loss.detach())
            del loss  # else its graph would stay during the next forward
        self._optimizer.step()
        self._scheduler.step()
        return losses[0] if num_parts == 1 else torch.stack(losses).mean()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._scheduler.get_last_lr()[0]

    def report(self) -> dict[str, Any]:
        """``engine.report()``."""
        return self._engine.report()

    def save(self, folder: Path, client_state: Mapping[str, Any]) -> Path:
        """Saves the run, from all ranks; returns the checkpoint's folder."""
        return self._engine.save_checkpoint(folder, client_state=client_state, lr_scheduler=self._scheduler)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Goes on from the latest checkpoint in ``folder``; returns the ``client_state`` that was saved with it."""
        return self._engine.load_checkpoint(folder, lr_scheduler=self._scheduler)[1]

    def export(self, folder: Path) -> None:
        """Writes the weights for Hugging Face's ``from_pretrained``, from all ranks."""
        self._engine.export_weights(folder)

    def save_plan(self, path: Path) -> None:
        """Saves the plan of the next step, for ``TrainingOptions.plan``."""
        self._engine.plan().save(path)

    def discard(self) -> None:
        """Ends the run and frees its memory. The model's values are gone: save or export before."""
        self._engine.discard()


def _schedule(options: TrainingOptions) -> Callable[[int], float]:
    if options.schedule_steps is None:
        return lambda step: min(1.0, (step + 1) / max(1, options.warmup_steps))
    return warmup_then_cosine(options.warmup_steps, options.schedule_steps)


def _parts(batch: Mapping[str, torch.Tensor], num_parts: int) -> list[dict[str, torch.Tensor]]:
    """``batch`` in parts of one size.

    Raises:
        ValueError: it cannot be divided so.
    """
    if num_parts == 1:
        return [dict(batch)]
    num_rows = len(next(iter(batch.values())))
    if num_rows % num_parts:
        raise ValueError(f"a batch has {num_rows} sequences, which {num_parts} forwards (accumulate) cannot divide")
    size = num_rows // num_parts
    return [
        {name: values[start : start + size] for name, values in batch.items()} for start in range(0, num_rows, size)
    ]

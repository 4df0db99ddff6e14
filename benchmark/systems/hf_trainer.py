"""PatrickStar inside Hugging Face's ``Trainer``, to time the trainer's loop beside the plain loop of ``patrickstar``.

The trainer owns its loop, so it runs in its own thread and takes each batch from a queue; a step ends with its
``on_step_end``.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import patrickstar
from benchmark.ranks import training_device
from benchmark.systems import ADAMW, Job
from benchmark.systems.patrickstar import engine_config
from benchmark.systems.weights import build_job_model
from patrickstar.integrations.transformers import PatrickStarTrainer

_MANY_STEPS = 1_000_000  # the benchmark ends it
_DECIDED = ("bf16", "gradient_clipping")  # set by the TrainingArguments


class _Feed(IterableDataset):
    """Yields the batches of a queue."""

    def __init__(self, batches: queue.SimpleQueue[dict[str, torch.Tensor]]):
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self._batches.get()


class _Trainer(PatrickStarTrainer):
    """Reads batches from a feed, decays all parameters as the other systems do, keeps the last loss."""

    last_loss: torch.Tensor

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=None)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class _StepEnds(transformers.TrainerCallback):
    def __init__(self, ends: queue.SimpleQueue[BaseException | None]):
        self._ends = ends

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._ends.put(None)


class InTrainer:
    """A trainer with the model, the optimizer and the configuration of ``patrickstar``."""

    def __init__(self, job: Job):
        self.version = patrickstar.__version__
        self.device = training_device()
        config = engine_config(job)
        decided = {key: config["optimizer"][key] for key in ("speculation", "states", "master")}
        config = {key: value for key, value in config.items() if key not in _DECIDED}
        config["optimizer"] = decided
        options = {
            "per_device_train_batch_size": job.batch, "max_steps": _MANY_STEPS, "bf16": True,
            "max_grad_norm": job.clipping, "learning_rate": ADAMW["lr"], "adam_beta1": ADAMW["betas"][0],
            "adam_beta2": ADAMW["betas"][1], "adam_epsilon": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"],
            "lr_scheduler_type": "constant", "optim": "adamw_torch",
        }  # fmt: skip
        self.settings: dict[str, Any] = {
            "config": config,
            "arguments": options,
            "transformers": transformers.__version__,
        }
        self._batches: queue.SimpleQueue[dict[str, torch.Tensor]] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory()
        arguments = transformers.TrainingArguments(
            output_dir=self._folder.name, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=self.device.type == "cpu", logging_steps=10, **options,
        )  # fmt: skip
        self._trainer = _Trainer(
            model=build_job_model(job), args=arguments, train_dataset=_Feed(self._batches),
            callbacks=[_StepEnds(self._ends)], patrickstar_config=config,
        )  # fmt: skip
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # per thread
            self._trainer.train()
        except BaseException as error:
            self._ends.put(error)
            raise

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._batches.put(batch)
        error = self._ends.get()
        if error is not None:
            raise error
        return self._trainer.last_loss

    def grad_norm(self) -> float | None:
        return self._trainer.engine.report()["grad_norm"]

    def report(self) -> dict[str, Any]:
        return self._trainer.engine.report()

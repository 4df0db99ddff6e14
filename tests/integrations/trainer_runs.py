import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from patrickstar import _C
from patrickstar.integrations.transformers import PatrickStarTrainerMixin
from tests import models

VOCAB, LENGTH, HIDDEN = 97, 8, 64
MODEL_DATA_BYTES = 16 * 106_752  # float32: parameter, gradient and both states, as torch.optim.AdamW has them


class Tokens(Dataset):
    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return models.gpt2(HIDDEN, dropout=dropout, heads=2, length=LENGTH)


def engine_config(**more: Any) -> dict[str, Any]:
    return {"device_memory": MODEL_DATA_BYTES // 4, "default_chunk_size": 8192, **more}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    return TrainingArguments(**{**defaults, **more})


class SftLikeTrainer(Trainer):
    """Overrides the methods that TRL's ``SFTTrainer`` overrides: the loss adds metrics, which appear in the next
    log.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pending = {"train": [], "eval": []}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mode = "train" if self.model.training else "eval"
        inputs["use_cache"] = False
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        with torch.no_grad():
            right = (outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]).float().mean()
            self.pending[mode].append(self.accelerator.gather_for_metrics(right).mean().item())
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss.detach(), None if prediction_loss_only else outputs.logits.detach(), inputs["labels"]

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        values, self.pending[mode] = self.pending[mode], []
        logs["accuracy" if mode == "train" else "eval_accuracy"] = sum(values) / len(values) if values else 0.0
        super().log(logs, start_time)


class PatrickStarSftLikeTrainer(PatrickStarTrainerMixin, SftLikeTrainer):
    pass


@dataclasses.dataclass
class Run:
    losses: list[float]
    norms: list[float]
    evals: list[float]
    accuracies: list[float]
    state: dict[str, torch.Tensor]
    report: dict[str, Any]
    history: list[dict[str, float]]


def train(trainer: Trainer, resume: str | None = None, *, evaluate_first: bool = False) -> Run:
    before = trainer.evaluate()["eval_loss"] if evaluate_first else 0.0
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    engine = trainer.engine if isinstance(trainer, PatrickStarTrainerMixin) else None
    with _C.HostAllocations():
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    run = Run(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        norms=[float(entry["grad_norm"]) for entry in history if "loss" in entry],
        evals=[before, *(entry["eval_loss"] for entry in history if "eval_loss" in entry)],
        accuracies=[entry["accuracy"] for entry in history if "loss" in entry and "accuracy" in entry],
        state=state,
        report=engine.report() if engine is not None else {},
        history=history,
    )
    if engine is not None:
        trainer.close()
    return run


def make_trainer(cls: type[Trainer], folder: Path, *, config: dict[str, Any] | None = None, **more: Any) -> Trainer:
    """10 sentences, 2 in a step (4 on two ranks): on two ranks the last step of an epoch is shorter."""
    own = {"patrickstar_config": engine_config(**(config or {}))} if issubclass(cls, PatrickStarTrainerMixin) else {}
    dropout, model = more.pop("dropout", 0.0), more.pop("model", None)
    return cls(
        model=gpt2(dropout) if model is None else model,
        args=arguments(folder, **more),
        train_dataset=Tokens(10, seed=1),
        eval_dataset=Tokens(6, seed=2),
        **own,
    )

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from patrickstar import _C
from patrickstar.elastic import (
    BatchRange,
    ElasticLoader,
    ElasticRun,
    ElasticSampler,
    Next,
    Orders,
    Rendezvous,
    ResizePhase,
)
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.elastic_trainer import ElasticTrainerMixin, ElasticTraining, LeftRun
from tests.elastic import runs
from tests.integrations.trainer_runs import LENGTH, Tokens, arguments, engine_config, gpt2

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 100, 12, 3
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH
OPTIONS = {
    "per_device_train_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": 1,
    "logging_steps": 2,
    "eval_strategy": "epoch",
    "remove_unused_columns": False,
}


class Numbered(Tokens):
    """Sentences with their numbers, of different lengths: tokens are not spread evenly over ranks."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[LENGTH - index % 4 :] = -100
        return {"input_ids": self.rows[index], "labels": labels, "index": torch.tensor(index)}


class Tracing(Trainer):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen: dict[int, list[int]] = {}
        self.most = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            numbers = inputs.pop("index").tolist()
            self.seen.setdefault(self.state.global_step, []).extend(numbers)
            self.most = max(self.most, len(numbers))
        return super().compute_loss(model, inputs, *args, **kwargs)


class ElasticTracing(ElasticTrainerMixin, Tracing):
    pass


class Count(TrainerCallback, ExportableState):
    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"num_steps": self.num_steps}}


class OneOrder(TrainerCallback):
    def __init__(self, address: str, plan: dict[int, runs.Order]):
        self._orders, self._plan = Orders(Rendezvous.at(address).store), plan

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step in self._plan:
            runs.give(self._orders, self._plan[state.global_step])


class Death(TrainerCallback):
    """Kills process ``number`` before an optimizer step. Samples of a repeated step count once."""

    def __init__(self, number: int, num_steps: int, seen: dict[int, list[int]]):
        self._dies_after, self._seen = num_steps if os.environ["RANK"] == str(number) else -1, seen

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seen.pop(state.global_step, None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class InOrder(Sampler[int]):
    """The samples that steps of an elastic run take, one epoch after the other."""

    def __init__(self, seed: int):
        self._sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, GLOBAL_BATCH, seed)

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * GLOBAL_BATCH

    def __iter__(self) -> Iterator[int]:
        for batch in self._sampler:
            yield from batch
        self._sampler.next_epoch()


class PlainTracing(Tracing):
    def _get_train_sampler(self, *_: Any) -> InOrder:
        return InOrder(self.args.seed)


def data() -> dict[str, Any]:
    """Evaluation averages over batches of all ranks, so its sentences have one length."""
    return {"train_dataset": Numbered(NUM_SAMPLES, seed=1), "eval_dataset": Tokens(12, seed=2)}


def follow_orders(
    address: str,
    plan: dict[int, runs.Order],
    folder: str,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    batches: int | BatchRange = GLOBAL_BATCH,
    death: tuple[int, int] | None = None,
    kill_in: tuple[int, ResizePhase] | None = None,
) -> dict[str, Any]:
    """Runs one process; ``plan`` gives orders by step. ``death`` is a process and the steps after which it dies,
    ``kill_in`` a process and the phase of a resize. With either, ranks have copies, and no timeout ends a wait.
    """
    torch.set_num_threads(1)
    number, counter, dies = int(os.environ.get("RANK", "0")), Count(), death is not None or kill_in is not None

    def note(phase: ResizePhase) -> None:
        if kill_in == (number, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = ElasticTracing(
        gpt2(),
        arguments(Path(folder), **OPTIONS | (options or {})),
        elastic=ElasticTraining(
            global_batch=batches,
            look_seconds=1e-9,
            redundancy=1 if dies else None,
            rendezvous=address,
            resize_options={"folder": folder, "note_phase": note} | ({"timeout_seconds": 3000} if dies else {}),
        ),
        patrickstar_config=engine_config(device_memory=800_000, rank_timeout_seconds=3600 if dies else 60),
        callbacks=[counter, OneOrder(address, plan)],
        **data(),
    )
    if dies:
        trainer.add_callback(Death(*(death or (-1, 0)), trainer.seen))
    try:
        output = trainer.train(resume_from_checkpoint=resume)
    except LeftRun as left:
        return {"left": left.code, "seen": trainer.seen, "steps": trainer.state.global_step}
    with _C.HostAllocations():
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    result = {"left": None, "seen": trainer.seen, "steps": trainer.state.global_step, "most": trainer.most}
    result |= {"history": trainer.state.log_history, "state": state, "counted": counter.num_steps}
    result |= {"loss": output.training_loss, "epoch": trainer.state.epoch, "flos": trainer.state.total_flos}
    trainer.close()
    return result


def train_plainly(folder: Path) -> dict[str, Any]:
    options = OPTIONS | {"gradient_accumulation_steps": GLOBAL_BATCH // MICRO_BATCH}
    trainer = PlainTracing(gpt2(), arguments(folder, **options), **data())
    output = trainer.train()
    result = {"seen": trainer.seen, "steps": trainer.state.global_step, "history": trainer.state.log_history}
    result |= {"loss": output.training_loss, "epoch": trainer.state.epoch, "flos": trainer.state.total_flos}
    return result | {"state": {name: value.clone() for name, value in trainer.model.state_dict().items()}}


def loop_with_accelerate(address: str | None, plan: dict[int, int], folder: str) -> dict[str, Any]:
    config = {"default_chunk_size": 16384, "rank_timeout_seconds": 60}
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=config)
    model = runs.build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    sampler = ElasticSampler(runs.NUM_SAMPLES, runs.GLOBAL_BATCH, 3, seed=1)
    options = {"look_seconds": 1e-9, "rendezvous": address, "resize_options": {"folder": folder}}
    run = ElasticRun(accelerator, {"sampler": sampler}, **options)
    result: dict[str, Any] = {"losses": {}, "main": [], "left": False}
    for micro_batches in ElasticLoader(runs.samples(), sampler):
        losses = []
        for _, inputs, targets in micro_batches:
            losses.append(torch.nn.functional.mse_loss(model(inputs), targets))
            accelerator.backward(losses[-1] / len(micro_batches))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        result["losses"][run.num_steps] = accelerator.gather(torch.stack(losses).mean()).mean().item()
        result["main"].append((accelerator.num_processes, accelerator.is_main_process))
        if accelerator.is_main_process and run.num_steps + 1 in plan:
            runs.give(Orders(Rendezvous.at(address).store), plan[run.num_steps + 1])
        if run.step_done() is not Next.TRAIN:
            return result | {"left": True}
    run.end()
    accelerator.free_memory()
    return result

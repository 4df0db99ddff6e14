"""The training loop around an engine, which can resume a run exactly, or with another length."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from patrickstar.checkpoint import latest_tag
from patrickstar.command.flags import UsageError
from patrickstar.finetune.batches import (
    Batch,
    Order,
    Score,
    count_correct,
    count_labels,
    count_tokens,
    endless_batches,
    num_rows,
    share_of,
)
from patrickstar.finetune.flags import engine_config
from patrickstar.finetune.ranks import Ranks
from patrickstar.finetune.recipe import decay_groups, warmup_then_cosine
from patrickstar.finetune.reporting import print_start
from patrickstar.finetune.resuming import check_resumable, identity
from patrickstar.finetune.tasks import Output, Progress, Run, Task
from patrickstar.finetune.usage import StoppedError, StopRequest, stop_requests
from patrickstar.planning.models import enable_checkpointing
from patrickstar.runtime import initialize_engine

NUM_EVALUATIONS = 5
"""Evaluations on held-out data in one training run, in addition to the one before it."""


def with_checkpointing(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """``model``, from transformers, with activation checkpointing if the flags request it."""
    if args.checkpointing:
        enable_checkpointing(model)
    return model


def exporter(folder: Path, tokenizer: Any, ranks: Ranks, dtype: torch.dtype = torch.float32) -> Callable[[Any], Path]:
    """A function that writes a model's weights, in ``dtype``, and the tokenizer into ``folder``, for
    ``from_pretrained``. All ranks must call it; each writes its shards. A former model stays until then.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if ranks.is_first and unfinished.exists():
        shutil.rmtree(unfinished)

    def save(model: Any) -> Path:
        model.export_weights(unfinished, dtype=dtype)  # on the first rank it returns when all files are complete
        if ranks.is_first:
            tokenizer.save_pretrained(unfinished)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(unfinished)
            if folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
        return folder

    return save


def evaluate(model: nn.Module, data: Batch, task: Task, batch_size: int, ranks: Ranks) -> Score:
    """The model's score on ``data``, which is shared out over the ranks."""
    loss, correct, total = 0.0, 0, 0
    share = share_of(data, ranks)
    model.eval()
    with torch.no_grad():
        for start in range(0, num_rows(share), batch_size):
            batch = {name: values[start : start + batch_size] for name, values in share.items()}
            inputs = task.inputs(batch)
            output = model(**inputs)
            count = count_labels(inputs["labels"], task.shift)
            if count > 0:  # without labels the loss is NaN
                correct += count_correct(output.logits, inputs["labels"], task.shift).item()
                loss, total = loss + output.loss.item() * count, total + count
    model.train()
    loss, correct, total = ranks.sums(loss, correct, total)
    return Score(loss / total, correct / total)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Any]], task: Task, ranks: Ranks
) -> Score:
    """One optimizer step on the gradient of the mean over all labels that count in all ranks' ``batches``."""
    counts = [count_labels(batch["labels"], task.shift) for batch in batches]
    (total,) = ranks.sums(sum(counts))
    scores = []
    optimizer.zero_grad()
    for batch, count in zip(batches, counts, strict=True):
        output = model(**batch)
        weight = count * ranks.size / total  # the engine averages over the ranks
        model.backward(output.loss * weight)
        scores.append(
            torch.stack([output.loss.detach() * count, count_correct(output.logits, batch["labels"], task.shift)])
        )
        del output  # otherwise its logits would stay during the next forward
    optimizer.step()
    loss, correct = ranks.sums(*torch.stack(scores).double().sum(0).tolist())
    return Score(loss / total, correct / total)


def train(
    model_func: Callable[[], nn.Module],
    task: Task,
    args: argparse.Namespace,
    ranks: Ranks,
    output: Output = Output(),  # noqa: B008 (frozen)
) -> Run:
    """Trains the model that ``model_func`` builds on ``task``.

    Raises:
        UsageError: the data has fewer rows than there are ranks, or the run to resume is another one.
        StoppedError: the user ended it; it was saved as ``output`` says.
    """
    if num_rows(task.train) < ranks.size:
        raise UsageError(f"there are {num_rows(task.train)} rows to train on for {ranks.size} ranks; give more")
    batch_size = min(args.batch_size, num_rows(task.train) // ranks.size)
    rows_per_step = batch_size * args.accumulation * ranks.size
    num_steps = args.steps or max(1, round(args.epochs * num_rows(task.train) / rows_per_step))
    properties = identity(args, task, batch_size, ranks)
    if output.resume:
        check_resumable(output.checkpoints, properties, num_steps)
    logging.getLogger("patrickstar").setLevel(logging.WARNING)  # start and saves are printed here
    torch.manual_seed(args.seed + ranks.rank)  # the model is rank 0's; each rank has its own dropout
    try:
        model, optimizer = initialize_engine(
            model_func, local_rank=0, config=engine_config(args), model_parameters=decay_groups(args.weight_decay)
        )
    except ValueError as error:
        raise UsageError(error) from error
    with stop_requests() as stop, model:
        loop = _Loop(
            model=model,
            optimizer=optimizer,
            scheduler=LambdaLR(optimizer, warmup_then_cosine(max(1, round(args.warmup * num_steps)), num_steps)),
            task=task,
            args=args,
            ranks=ranks,
            output=output,
            num_steps=num_steps,
            batch_size=batch_size,
            identity=properties,
        )
        print_start(task.name, model, args, num_steps, ranks)
        loop.run(stop)
        test = evaluate(model, task.test, task, batch_size, ranks) if task.test else None
        if task.after:
            task.after(model)
        if output.save_model is not None:
            ranks.say(f"saved to {output.save_model(model)}")
        report = model.report()
    progress = loop.progress
    return Run(
        module=model.module,
        report=report,
        scores=progress.scores,
        evaluations=progress.evaluations,
        test=test,
        tokens_per_second=ranks.sums(progress.num_tokens)[0] / progress.seconds,
    )


@dataclasses.dataclass(kw_only=True)
class _Loop:
    """The steps of one run."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    task: Task
    args: argparse.Namespace
    ranks: Ranks
    output: Output
    num_steps: int
    batch_size: int
    identity: dict[str, Any]
    progress: Progress = dataclasses.field(default_factory=Progress)
    _replaced: Path | None = None
    """The checkpoint that the save that runs replaces."""

    def run(self, stop: StopRequest) -> None:
        """Runs from the present progress to the end."""
        if self.output.resume:
            self._resume()
        else:
            self._begin()
        bar = tqdm(
            total=self.num_steps,
            initial=self.progress.num_steps,
            desc=self.task.name,
            unit="step",
            mininterval=1.0,
            disable=not self.ranks.is_first,
        )
        say = bar.write if self.ranks.is_first else _nothing
        with bar:
            self.model.train()
            batches = self._batches_to_come()
            for step in range(self.progress.num_steps + 1, self.num_steps + 1):
                self._step(batches, bar)
                if step % math.ceil(self.num_steps / NUM_EVALUATIONS) == 0 or step == self.num_steps:
                    self._evaluate(step, say)
                stopped = self.ranks.sums(stop.is_made)[0] > 0  # all ranks end after the same step
                if stopped and step < self.num_steps:
                    folder = self._save()
                    self._complete_save()
                    raise StoppedError(step, folder, by_user=self.ranks.sums(stop.is_by_user)[0] > 0)
                if self.args.save_every and (step % self.args.save_every == 0 or step == self.num_steps):
                    say(f"saving to {self._save()}")
            self._complete_save()
            if self.num_steps not in self.progress.evaluations:  # resumed at its end
                self._evaluate(self.num_steps, say)

    def _begin(self) -> None:
        if self.task.before:
            self.task.before(self.model)
        self._evaluate(0, self.ranks.say)

    def _batches_to_come(self) -> Iterator[Batch]:
        order = Order(batch_size=self.batch_size, seed=self.args.seed)
        batches = endless_batches(self.task.train, self.task.prepare, order, self.ranks)
        for _ in range(self.progress.num_steps * self.args.accumulation):
            next(batches)
        return batches

    def _step(self, batches: Iterator[Batch], bar: tqdm) -> None:
        started = time.perf_counter()
        rows = [next(batches) for _ in range(self.args.accumulation)]
        lr = self.optimizer.param_groups[0]["lr"]
        score = train_step(
            self.model, self.optimizer, [self.task.inputs(batch) for batch in rows], self.task, self.ranks
        )
        self.scheduler.step()
        seconds, num_tokens = time.perf_counter() - started, sum(count_tokens(batch) for batch in rows)
        self.progress.seconds += seconds
        self.progress.num_tokens += num_tokens
        self.progress.scores.append(score)
        bar.set_postfix(
            {
                "loss": f"{score.loss:.3f}",
                "accuracy": f"{score.accuracy:.3f}",
                "lr": f"{lr:.1e}",
                "tokens/s": f"{num_tokens * self.ranks.size / seconds:.0f}",
            },
            refresh=False,
        )
        bar.update()

    def _evaluate(self, step: int, say: Callable[[str], None]) -> None:
        score = evaluate(self.model, self.task.held_out, self.task, self.args.batch_size, self.ranks)
        self.progress.evaluations[step] = score
        say(f"step {step}: held-out loss {score.loss:.4f}, accuracy {score.accuracy:.2%}")

    def _save(self) -> Path | None:
        """Begins to save the run; :meth:`_complete_save` removes the former checkpoint."""
        folder = self.output.checkpoints
        if folder is None:
            return None
        self._complete_save()
        former = latest_tag(folder)
        state = {"identity": self.identity, "num_steps": self.num_steps, "progress": self.progress.as_state()}
        path = self.model.save_checkpoint(folder, client_state=state, lr_scheduler=self.scheduler, wait=False)
        self._replaced = folder / former if former is not None and former != path.name else None
        return folder

    def _complete_save(self) -> None:
        self.model.wait_for_save()
        if self._replaced is not None and self.ranks.is_first:
            shutil.rmtree(self._replaced, ignore_errors=True)
        self._replaced = None

    def _resume(self) -> None:
        path, state = self.model.load_checkpoint(self.output.checkpoints, lr_scheduler=self.scheduler)
        self.progress = Progress.of_state(state["progress"])
        self.ranks.say(f"resumed from {path} after step {self.progress.num_steps} of {self.num_steps}")
        planned = state["num_steps"]
        if planned != self.num_steps:
            before, now = self._follow_schedule()
            self.ranks.say(
                f"the run had {planned} steps and now has {self.num_steps}: the learning rate falls to 0 at step "
                f"{self.num_steps}, and is {now:.1e} in the next step instead of {before:.1e}"
            )

    def _follow_schedule(self) -> tuple[float, float]:
        """Sets the next step's learning rate to this run's schedule; returns the former and the new rate."""
        before = self.optimizer.param_groups[0]["lr"]
        scheduler = self.scheduler
        for group, base, factor in zip(
            self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)
        return before, self.optimizer.param_groups[0]["lr"]


def _nothing(line: str) -> None:
    """Prints nothing, on other ranks than the first."""

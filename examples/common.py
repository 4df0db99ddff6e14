"""What the fine-tuning examples share: their command line, the training loop around an engine, curves and report.

Usage: ``import common`` before torch and transformers; it sets the environment variables that they read when they load.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # lets cuBLAS be deterministic
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on shared cores, spinning threads are ten times slower

import matplotlib
import torch
from pretraining.recipe import decay_groups, warmup_then_cosine
from ranks import Ranks
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler
from tqdm import tqdm

from patrickstar.command.flags import memory_size
from patrickstar.runtime import initialize_engine

matplotlib.use("Agg")
from matplotlib import pyplot

NUM_EVALUATIONS = 5
"""On the held-out data, in one training run."""

IGNORED = -100
"""The label that transformers leaves out of a loss."""

Batch = dict[str, torch.Tensor]
"""Tensors whose first dimension is the example, by the model's argument names."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A loss (nats) and an accuracy (0 to 1), each the mean over the labels that count."""

    loss: float
    accuracy: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What to learn, and from what."""

    name: str
    train: Batch
    held_out: Batch
    baseline: Score
    """The trivial answer's score on ``held_out``."""
    baseline_name: str
    shift: bool = False
    """Whether the logits at position t are for the label at t + 1 (causal language models)."""
    prepare: Callable[[Batch, torch.Generator], Batch] | None = None
    """Makes a training batch of rows of ``train``, for example by masking tokens."""
    test: Batch | None = None
    """Scored once, after the training."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """What a training run left; its module is an ordinary one again."""

    module: nn.Module
    report: dict
    """``model.report()`` at the end."""
    scores: list[Score]
    """Of every step's training batch, all ranks' together."""
    evaluations: dict[int, Score]
    """Held-out scores by the number of steps before them."""
    test: Score | None
    tokens_per_second: float
    """Of all ranks."""

    @property
    def final(self) -> Score:
        """The last held-out score."""
        return self.evaluations[max(self.evaluations)]


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every example has."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--device-memory", type=memory_size, metavar="SIZE", help="device budget, such as 2GiB (default: the device)"
    )
    memory.add_argument(
        "--host-memory", type=memory_size, metavar="SIZE", help="host budget for model data (default: most of it)"
    )
    memory.add_argument("--chunk-size", type=int, metavar="N", help="elements per chunk (default: the library's)")
    memory.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    memory.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default=precision)
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=float, default=3.0)
    training.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
    training.add_argument("--batch-size", type=int, default=8, help="examples per forward and rank")
    training.add_argument(
        "--gradient-accumulation",
        dest="accumulation",
        type=int,
        default=1,
        help="forwards and backwards per optimizer step",
    )
    training.add_argument("--lr", type=float, default=5e-4, help="the highest learning rate, after the warm-up")
    training.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    training.add_argument("--weight-decay", type=float, default=0.01, help="not for biases and norms")
    training.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", type=Path, default=Path("demo-output"), help="where the curves (PNG) go")
    output.add_argument("--save", action="store_true", help="also write OUTPUT_DIR/model, in Hugging Face's format")


def check_arguments(args: argparse.Namespace) -> None:
    """Ends the program where the flags ask for what would fail after the training."""
    if args.save and saved_model(args).exists() and any(saved_model(args).iterdir()):
        sys.exit(f"--save: {saved_model(args)} exists and is not empty; remove it or give another --output-dir")


def saved_model(args: argparse.Namespace) -> Path:
    """Where ``--save`` writes."""
    return args.output_dir / "model"


def with_checkpointing(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """``model``, a transformers one, recomputing its activations in backward if the flags ask for it."""
    if args.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def engine_config(args: argparse.Namespace) -> dict:
    """The PatrickStar configuration that the flags ask for."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": (0.9, 0.95)}},
        "gradient_clipping": args.clip,
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
    }
    if args.chunk_size is not None:
        config["default_chunk_size"] = args.chunk_size
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    return config


def num_rows(data: Batch) -> int:
    """The number of examples."""
    return len(data["input_ids"])


def count_tokens(data: Batch) -> int:
    """The number of tokens, padding left out."""
    return int(data["attention_mask"].sum()) if "attention_mask" in data else data["input_ids"].numel()


def endless_batches(task: Task, batch_size: int, seed: int, ranks: Ranks) -> Iterator[Batch]:
    """This rank's training batches of one size, in a seeded order that is another one in each epoch.

    The ranks' n-th batches together are the n-th batch of one rank with batches as large as all of theirs.
    """
    rows = range(num_rows(task.train))
    share = DistributedSampler(rows, num_replicas=ranks.size, rank=ranks.rank, seed=seed, drop_last=ranks.size > 1)
    generator = torch.Generator().manual_seed(seed + ranks.rank)
    for epoch in itertools.count():
        share.set_epoch(epoch)
        order = torch.tensor(list(share))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            batch = {name: values[order[start : start + batch_size]] for name, values in task.train.items()}
            yield task.prepare(batch, generator) if task.prepare else batch


def unigram_score(train_labels: torch.Tensor, labels: torch.Tensor) -> Score:
    """The score on ``labels`` of always predicting the frequencies in ``train_labels``, each counted once more."""
    train_labels, labels = (values[values != IGNORED] for values in (train_labels, labels))
    num_classes = int(max(train_labels.max(), labels.max())) + 1
    counts = torch.bincount(train_labels, minlength=num_classes).double() + 1
    loss = -(counts / counts.sum()).log()[labels].mean()
    return Score(loss.item(), (labels == counts.argmax()).double().mean().item())


def count_correct(logits: torch.Tensor, labels: torch.Tensor, shift: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """How many labels the largest logits hit, and how many labels count."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    return (logits.argmax(-1) == labels).sum(), (labels != IGNORED).sum()


def share_of(data: Batch, ranks: Ranks) -> Batch:
    """Every ``ranks.size``-th row. All shares have as many rows; labels of those that fill up do not count."""
    rows = torch.arange(ranks.rank, ranks.rank + -(-num_rows(data) // ranks.size) * ranks.size, ranks.size)
    share = {name: values[rows.clamp(max=num_rows(data) - 1)] for name, values in data.items()}
    share["labels"][rows >= num_rows(data)] = IGNORED
    return share


def evaluate(model: nn.Module, data: Batch, args: argparse.Namespace, shift: bool, ranks: Ranks) -> Score:
    """The model's score on ``data``, of which each rank takes a share."""
    loss, correct, total = 0.0, 0, 0
    share = share_of(data, ranks)
    model.eval()
    with torch.no_grad():
        for start in range(0, num_rows(share), args.batch_size):
            batch = {name: values[start : start + args.batch_size] for name, values in share.items()}
            output = model(**batch)
            hits, count = (number.item() for number in count_correct(output.logits, batch["labels"], shift))
            if count > 0:  # else the loss is not a number
                loss, correct, total = loss + output.loss.item() * count, correct + hits, total + count
    model.train()
    loss, correct, total = ranks.sums(loss, correct, total)
    return Score(loss / total, correct / total)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], shift: bool, ranks: Ranks
) -> Score:
    """One step of the optimizer on the mean gradient of all ranks' ``batches``."""
    scores = []
    optimizer.zero_grad()
    for batch in batches:
        output = model(**batch)
        model.backward(output.loss / len(batches))
        hits, count = count_correct(output.logits.detach(), batch["labels"], shift)
        scores.append(torch.stack([output.loss.detach(), hits / count]))
        del output  # else its logits would stay during the next forward
    optimizer.step()
    return Score(*ranks.means(*torch.stack(scores).mean(0).tolist()))


def train(
    model_func: Callable[[], nn.Module], task: Task, args: argparse.Namespace, ranks: Ranks, save_to: Path | None = None
) -> Run:
    """Trains what ``model_func`` builds on ``task``; exports its weights to ``save_to``."""
    batch_size = min(args.batch_size, num_rows(task.train) // ranks.size)
    examples_per_step = batch_size * args.accumulation * ranks.size
    num_steps = args.steps or max(1, round(args.epochs * num_rows(task.train) / examples_per_step))
    evaluate_every = math.ceil(num_steps / NUM_EVALUATIONS)
    batches = endless_batches(task, batch_size, args.seed, ranks)
    scores, evaluations, seconds, num_tokens = [], {}, 0.0, 0
    torch.manual_seed(args.seed + ranks.rank)  # the model is rank 0's; dropout is each rank's own
    model, optimizer = initialize_engine(
        model_func, local_rank=0, config=engine_config(args), model_parameters=decay_groups(args.weight_decay)
    )
    progress = tqdm(total=num_steps, desc=task.name, unit="step", mininterval=1.0, disable=not ranks.is_first)
    with model, progress:
        scheduler = LambdaLR(optimizer, warmup_then_cosine(max(1, round(args.warmup * num_steps)), num_steps))
        model.train()
        for step in range(1, num_steps + 1):
            started = time.perf_counter()
            step_batches = [next(batches) for _ in range(args.accumulation)]
            score = train_step(model, optimizer, step_batches, task.shift, ranks)
            scheduler.step()
            seconds += time.perf_counter() - started
            num_tokens += sum(count_tokens(batch) for batch in step_batches)
            scores.append(score)
            progress.set_postfix(loss=f"{score.loss:.3f}", accuracy=f"{score.accuracy:.3f}", refresh=False)
            progress.update()
            if step % evaluate_every == 0 or step == num_steps:
                evaluations[step] = held_out = evaluate(model, task.held_out, args, task.shift, ranks)
                line = f"step {step}: held-out loss {held_out.loss:.4f}, accuracy {held_out.accuracy:.2%}"
                if ranks.is_first:
                    progress.write(line)
        test = evaluate(model, task.test, args, task.shift, ranks) if task.test else None
        if save_to is not None:
            model.export_weights(save_to)  # by all ranks, each what it holds
        report = model.report()
    return Run(
        module=model.module,
        report=report,
        scores=scores,
        evaluations=evaluations,
        test=test,
        tokens_per_second=ranks.sums(num_tokens)[0] / seconds,
    )


def format_bytes(num_bytes: int) -> str:
    """MiB or, from 10 GiB on, GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def model_data_bytes(run: Run, args: argparse.Namespace) -> int:
    """Bytes of parameters, gradients and Adam states: 14 a parameter in 16-bit training, 16 in float32."""
    return run.report["num_parameters"] * (16 if args.precision == "fp32" else 14)


def print_run(run: Run, task: Task, args: argparse.Namespace, ranks: Ranks) -> None:
    """Prints how well the run learned, how fast it was, and what memory it took (on rank 0)."""
    if not ranks.is_first:
        return
    report = run.report
    budget = f"of a budget of {format_bytes(report['device_budget_bytes'])}" if args.device_memory else "(no budget)"
    together = f" on {ranks.size} ranks" if ranks.size > 1 else ""
    each = " on each rank" if ranks.size > 1 else ""
    parameters, data = f"{report['num_parameters'] / 1e6:.1f} M parameters", format_bytes(model_data_bytes(run, args))
    print(f"{task.name}: {len(run.scores)} steps{together}, {parameters} in {args.precision}, {data} of model data")
    print(f"  training loss      {run.scores[-1].loss:.4f}, accuracy {run.scores[-1].accuracy:.2%} (last batch)")
    print(f"  held-out loss      {run.final.loss:.4f} ({task.baseline_name}: {task.baseline.loss:.4f})")
    print(f"  held-out accuracy  {run.final.accuracy:.2%} ({task.baseline_name}: {task.baseline.accuracy:.2%})")
    if run.test:
        print(f"  test loss          {run.test.loss:.4f}, accuracy {run.test.accuracy:.2%}")
    print(f"  speed              {run.tokens_per_second:.0f} tokens/s")
    print(f"  device peak        {format_bytes(report['device_peak_bytes'])} {budget}{each}")
    print(f"  host peak          {format_bytes(report['host_peak_bytes'])} of model data{each}")


def save_curves(run: Run, task: Task, path: Path, ranks: Ranks) -> None:
    """Draws loss and accuracy over the steps as a PNG (on rank 0)."""
    if not ranks.is_first:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, plot in zip(("loss", "accuracy"), axes, strict=True):
        training = [getattr(score, name) for score in run.scores]
        held_out = [getattr(score, name) for score in run.evaluations.values()]
        plot.plot(range(1, len(training) + 1), training, linewidth=0.8, alpha=0.6, label="training batch")
        plot.plot(list(run.evaluations), held_out, marker="o", label="held out")
        plot.axhline(getattr(task.baseline, name), color="grey", linestyle="--", label=task.baseline_name)
        plot.set(xlabel="step", ylabel=name, title=f"{task.name}: {name}")
        plot.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"curves: {path}")

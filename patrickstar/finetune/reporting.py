"""Printed reports and pictures of a training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from patrickstar.finetune.ranks import Ranks
from patrickstar.finetune.tasks import Run, Task


def format_bytes(num_bytes: int) -> str:
    """Formats as MiB or, from 10 GiB on, GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def model_data_bytes(run: Run, args: argparse.Namespace) -> int:
    """Bytes of parameters, gradients and Adam states: 14 per parameter in 16-bit training, 16 in float32; 2 or 4 per
    frozen parameter.
    """
    trained, frozen = (16, 4) if args.precision == "fp32" else (14, 2)
    return sum(param.numel() * (trained if param.requires_grad else frozen) for param in run.module.parameters())


def print_start(name: str, model: Any, args: argparse.Namespace, num_steps: int, ranks: Ranks) -> None:
    """Prints one line on rank 0: the model, its device and budgets."""
    report, device = model.report(), torch.device(model.device)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    parts = f" ({trained / 1e6:.2f} M trained)" if trained < report["num_parameters"] else ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "simulated device"
    budget = format_bytes(report["device_budget_bytes"]) if args.device_memory or device.type == "cuda" else "none"
    together = f", {ranks.size} ranks" if ranks.size > 1 else ""
    ranks.say(
        f"{name}: {report['num_parameters'] / 1e6:.1f} M parameters{parts}, {args.precision}, {num_steps} steps on "
        f"{where}{together}; device budget {budget}, host budget {format_bytes(report['host_budget_bytes'])}"
    )


def print_run(run: Run, task: Task, args: argparse.Namespace, ranks: Ranks) -> None:
    """Prints scores, speed and memory of the run, on rank 0."""
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
    """Draws loss and accuracy over the steps as a PNG, on rank 0."""
    if not ranks.is_first:
        return
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 4), layout="constrained")
    for name, plot in zip(("loss", "accuracy"), figure.subplots(1, 2), strict=True):
        training = [getattr(score, name) for score in run.scores]
        held_out = [getattr(score, name) for score in run.evaluations.values()]
        plot.plot(range(1, len(training) + 1), training, linewidth=0.8, alpha=0.6, label="training batch")
        plot.plot(list(run.evaluations), held_out, marker="o", label="held out")
        plot.axhline(getattr(task.baseline, name), color="grey", linestyle="--", label=task.baseline_name)
        plot.set(xlabel="step", ylabel=name, title=f"{task.name}: {name}")
        plot.legend()
    figure.savefig(path, dpi=120)
    print(f"curves: {path}")

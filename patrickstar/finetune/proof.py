"""The demo's proof: a run with a device budget gives the same numbers as one without, bit by bit."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch import nn

from patrickstar.finetune import training
from patrickstar.finetune.flags import profile_folder
from patrickstar.finetune.ranks import Ranks
from patrickstar.finetune.reporting import format_bytes, model_data_bytes, print_run
from patrickstar.finetune.tasks import Run, Task


def be_deterministic() -> None:
    """Restricts PyTorch to deterministic operations."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def state_hash(module: nn.Module) -> str:
    """SHA-256 of all names and bytes in the state dict."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def compare_with_unbounded(
    run: Run, task: Task, args: argparse.Namespace, model_func: Callable[[], nn.Module], ranks: Ranks
) -> bool:
    """Trains again without the budget, prints the demo's summary, and returns True if both runs are bitwise equal."""
    bounded_hash = state_hash(run.module)
    ranks.say("\nThe same run without the budget")
    unbounded_args = argparse.Namespace(**vars(args) | {"device_memory": None, "save_every": None})
    silent = dataclasses.replace(task, before=None, after=None)
    unbounded = training.train(model_func, silent, unbounded_args, ranks)
    print_run(unbounded, task, unbounded_args, ranks)
    same_scores = run.scores == unbounded.scores and run.evaluations == unbounded.evaluations
    same_state = bounded_hash == state_hash(unbounded.module)
    verdicts = {True: "bitwise the same without the budget", False: "DIFFERENT WITHOUT THE BUDGET"}
    report, peak = run.report, format_bytes(unbounded.report["device_peak_bytes"])
    baseline = f"{task.baseline_name}: {task.baseline.loss:.6f}"
    ranks.say("\nDemo")
    ranks.say(f"  model data         {format_bytes(model_data_bytes(run, args))}")
    ranks.say(f"  device budget      {format_bytes(report['device_budget_bytes'])}")
    ranks.say(f"  device peak        {format_bytes(report['device_peak_bytes'])} (without the budget: {peak})")
    ranks.say(f"  to the device      {format_bytes(report['uploaded_bytes'])} in {len(run.scores)} steps")
    ranks.say(f"  final loss         {run.scores[-1].loss:.6f}")
    ranks.say(f"  held-out loss      {run.final.loss:.6f} ({baseline})")
    for picture in sorted(profile_folder(args).rglob("step*.svg"))[:1]:
        ranks.say(f"  picture            {picture}: chunks and activations below the budget")
    ranks.say(f"  {len(run.scores)} losses, {len(run.evaluations)} held-out scores: {verdicts[same_scores]}")
    ranks.say(f"  final state_dict: {verdicts[same_state]} (sha256 {bounded_hash[:16]})")
    return same_scores and same_state

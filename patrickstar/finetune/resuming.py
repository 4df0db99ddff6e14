"""Runs to resume: what must be as it was, compared before a model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.checkpoint import Checkpoint
from patrickstar.checkpoint.training_state import TrainingState
from patrickstar.command.flags import UsageError
from patrickstar.finetune.batches import fingerprint
from patrickstar.finetune.ranks import Ranks
from patrickstar.finetune.tasks import Progress, Task

_FLAGS = ("seed", "optimizer", "lr", "warmup", "weight_decay", "clip", "precision", "fp8", "states", "master")


def identity(args: argparse.Namespace, task: Task, batch_size: int, ranks: Ranks) -> dict[str, Any]:
    """Properties that must be equal when a run is resumed, by command-line names."""
    return {
        **task.identity,
        **{f"--{name.replace('_', '-')}": getattr(args, name) for name in _FLAGS},
        "--batch-size": batch_size,
        "--gradient-accumulation": args.accumulation,
        "ranks": ranks.size,
        "training data": fingerprint(task.train),
    }


def check_resumable(checkpoints: Path, properties: Mapping[str, Any], num_steps: int) -> None:
    """Compares a run with the one in ``checkpoints``, whose tensors are not read.

    Args:
        checkpoints: the folder of checkpoints.
        properties: of :func:`identity`.
        num_steps: steps that the run is to have in the end.

    Raises:
        UsageError: it is another run, or has made more steps. Every difference is a mistake.
        CheckpointError: the checkpoint is damaged.
    """
    with Checkpoint.find(checkpoints, None) as checkpoint:
        state = TrainingState.from_json(checkpoint.manifest.state).client_state
    began_with = state["identity"]
    mistakes = [
        f"--resume: the run in {checkpoints} has {name} {began_with.get(name)}, not {value}; give that"
        for name, value in properties.items()
        if began_with.get(name) != value
    ]
    done = Progress.of_state(state["progress"]).num_steps
    if num_steps < done:
        mistakes.append(
            f"--resume: the run in {checkpoints} has made {done} steps, more than {num_steps}; give --steps {done} to "
            "save its model as it is, or more"
        )
    if mistakes:
        raise UsageError(*mistakes)

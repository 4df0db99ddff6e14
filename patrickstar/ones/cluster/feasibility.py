"""The numbers of GPUs on which a job fits, and its step times, by ``patrickstar plan``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

from patrickstar.elastic import BatchRange, divide_batch

_FITS, _DOES_NOT_FIT = 0, 1


@dataclasses.dataclass(frozen=True)
class Feasibility:
    """Feasibility of one job."""

    step_seconds: dict[int, float]
    """Predicted seconds of an optimizer step, by number of GPUs on which it fits."""
    refusals: dict[int, str]
    """The reason for each other number of GPUs."""


def planned(
    sizes: Sequence[int], options: Sequence[str], batches: BatchRange, micro_batch: int, gpus_per_node: int
) -> Feasibility:
    """Runs the planner for each number of GPUs.

    Args:
        sizes: numbers of GPUs, each of which divides a batch.
        options: of ``patrickstar plan``: model, lengths, GPU, budgets. Batches and numbers of GPUs are added.
        batches: samples of an optimizer step on all GPUs together; each number has the batch nearest to the base.
        micro_batch: most samples that a GPU computes at once.
        gpus_per_node: of the cluster.

    Raises:
        ValueError: an option is wrong.
    """
    found = Feasibility({}, {})
    for size in sizes:
        nearest = batches.nearest_multiple(batches.base, size)
        division = divide_batch(nearest or batches.base, size, micro_batch)
        here = min(size, gpus_per_node)
        command = [
            sys.executable, "-m", "patrickstar.plan", *options, "--json", "--no-advice",
            "--nodes", str(-(-size // here)), "--gpus-per-node", str(here),
            "--batch-size", str(division.micro_batch), "--gradient-accumulation", str(division.accumulation),
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode not in (_FITS, _DOES_NOT_FIT):
            raise ValueError(f"`patrickstar plan` refuses {' '.join(options)}: {said.stderr.strip()[-500:]}")
        answer = json.loads(said.stdout)
        if answer["fits"]:
            found.step_seconds[size] = answer["step_seconds"]
        else:
            found.refusals[size] = answer["why"]
    return found

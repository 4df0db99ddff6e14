"""A user's submission: a training script, and the numbers of GPUs that it may have."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from patrickstar.elastic import divide_batch
from patrickstar.ones.jobs import Cluster

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job as it was submitted.

    Raises:
        ValueError: on construction, if it contradicts itself.
    """

    name: str
    """Unique in the cluster: letters, digits, and ``_.-``."""
    script: str
    """A Python script, at the same absolute path on all nodes."""
    arguments: tuple[str, ...]
    """Arguments of the script."""
    folder: str
    """Its working directory: absolute, the same on all nodes."""
    environment: tuple[tuple[str, str], ...]
    """Variables in addition to the node's."""
    min_gpus: int
    """Minimum to run."""
    max_gpus: int
    """Maximum to be granted."""
    requested_gpus: int
    """Number granted by a scheduler that changes nothing, and at the first start by most others."""
    global_batch: int
    """Samples of an optimizer step, on all GPUs together, for any number of GPUs."""
    epoch_samples: int
    """Samples of one epoch."""
    inner_group: int = 1
    """Ranks that belong together, such as those of a mesh's inner axes or of a sequence. It gets multiples of them,
    each group on one node, and keeps its number while it runs.
    """
    gpu_type: str = ""
    """Type of its GPUs, as Ray names it (``H100``); empty: any."""
    priority: int = 0
    """Jobs with a higher one get GPUs first."""
    user: str = ""
    """Whose quota counts."""
    planned: tuple[tuple[int, float], ...] = ()
    """Numbers of GPUs on which it fits, with predicted seconds of a step; empty: the planner was not run."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a job's name is {self.name!r}; give letters, digits and _.- only")
        for what, path in (("script", self.script), ("folder", self.folder)):
            if not Path(path).is_absolute():
                raise ValueError(f"job {self.name}: its {what} is {path!r}; give an absolute path")
        if not 1 <= self.min_gpus <= self.requested_gpus <= self.max_gpus:
            raise ValueError(
                f"job {self.name}: min_gpus {self.min_gpus}, requested_gpus {self.requested_gpus} and max_gpus "
                f"{self.max_gpus} must be at least 1 and ascend; correct its limits"
            )
        if self.global_batch < 1 or self.epoch_samples < 1:
            raise ValueError(
                f"job {self.name}: global_batch {self.global_batch} and epoch_samples {self.epoch_samples} must be at "
                "least 1; correct them"
            )
        if self.inner_group < 1:
            raise ValueError(f"job {self.name}: inner_group is {self.inner_group}; give at least 1 rank")
        if not self.sizes:
            multiples = f" that is a multiple of {self.inner_group}" if self.inner_group > 1 else ""
            raise ValueError(
                f"job {self.name}: no number of GPUs from {self.min_gpus} to {self.max_gpus}{multiples} divides its "
                f"global batch of {self.global_batch} samples; change the batch or the limits"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs that it can run on: within its limits, divisors of its global batch, and with
        enough memory.
        """
        fits = dict(self.planned)
        return tuple(
            n
            for n in range(self.min_gpus, self.max_gpus + 1)
            if n % self.inner_group == 0
            and divides(self.global_batch, n // self.inner_group)
            and (not fits or n in fits)
        )

    def check(self, cluster: Cluster) -> None:
        """Raises ValueError for a job that this cluster can never run; call it before the job is queued."""
        if self.sizes[0] > cluster.num_gpus:
            raise ValueError(
                f"job {self.name} needs at least {self.sizes[0]} GPUs and the cluster has {cluster.num_gpus}; lower "
                "its min_gpus, or submit it to a larger cluster"
            )
        if not Path(self.script).is_file():
            raise ValueError(f"job {self.name}: there is no script {self.script}; it must be there on every node")

    def as_plain(self) -> dict[str, Any]:
        """The submission in JSON's types."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Submission:
        """Inverse of :meth:`as_plain`."""
        environment = tuple((name, value) for name, value in plain["environment"])
        planned = tuple((size, seconds) for size, seconds in plain.get("planned", ()))
        return cls(**{**plain, "arguments": tuple(plain["arguments"]), "environment": environment, "planned": planned})


def divides(global_batch: int, num_ranks: int) -> bool:
    """True if the global batch is divisible by so many ranks."""
    try:
        divide_batch(global_batch, num_ranks, global_batch)
    except ValueError:
        return False
    return True

"""A user's submission: a training script, and the numbers of GPUs that it may have."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from patrickstar.elastic import BatchRange
from patrickstar.ones.jobs import Cluster

_BATCHES_PER_SIZE = 8
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
    """Samples of an optimizer step, on all GPUs together, at the start."""
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
    """The user whose quota limits the job's GPUs."""
    planned: tuple[tuple[int, float], ...] = ()
    """Numbers of GPUs on which it fits, with predicted seconds of a step; empty: the planner was not run."""
    batch_range: BatchRange | None = None
    """Global batches that it may have, and how its learning rate follows; None: the first one only."""

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
        if self.batches.base != self.global_batch:
            raise ValueError(
                f"job {self.name}: global_batch is {self.global_batch} and the base of its batch_range "
                f"{self.batches.base}; give the same number"
            )
        if self.inner_group < 1:
            raise ValueError(f"job {self.name}: inner_group is {self.inner_group}; give at least 1 rank")
        if self.inner_group > 1 and not self.batches.is_fixed:
            raise ValueError(
                f"job {self.name}: inner_group is {self.inner_group}, and ranks that share samples do not measure the "
                "noise scale, which a batch_range follows; leave one of them out"
            )
        if not self.first_sizes:
            multiples = f" that is a multiple of {self.inner_group}" if self.inner_group > 1 else ""
            raise ValueError(
                f"job {self.name}: no number of GPUs from {self.min_gpus} to {self.max_gpus}{multiples} divides its "
                f"global batch of {self.global_batch} samples; change the batch or the limits"
            )

    @property
    def batches(self) -> BatchRange:
        """Its range of batches; one batch if it has no range."""
        return BatchRange.of(self.global_batch) if self.batch_range is None else self.batch_range

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs that it can run on: within its limits, divisors of one of its batches, and with enough
        memory.
        """
        fits = dict(self.planned)
        return tuple(
            n
            for n in range(self.min_gpus, self.max_gpus + 1)
            if n % self.inner_group == 0
            and self.batches.nearest_multiple(self.global_batch, n // self.inner_group) is not None
            and (not fits or n in fits)
        )

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs that divide its first batch, of :attr:`sizes`."""
        return tuple(n for n in self.sizes if self.global_batch % (n // self.inner_group) == 0)

    @property
    def feasible_batches(self) -> tuple[int, ...]:
        """The batches to choose from, ascending: for each number of GPUs the multiples nearest to a geometric series,
        and the first batch.
        """
        low, high = self.batches.min, self.batches.max
        series = [low * (high / low) ** (step / _BATCHES_PER_SIZE) for step in range(_BATCHES_PER_SIZE + 1)]
        shares = [size // self.inner_group for size in self.sizes]
        found = {self.batches.nearest_multiple(batch, count) for count in shares for batch in series}
        return tuple(sorted({self.global_batch, *(batch for batch in found if batch is not None)}))

    def check(self, cluster: Cluster) -> None:
        """Raises ValueError for a job that this cluster can never run; call it before the job is queued."""
        least = self.first_sizes[0]
        if least > cluster.num_gpus:
            raise ValueError(
                f"job {self.name} needs at least {least} GPUs and the cluster has {cluster.num_gpus}; lower its "
                "min_gpus, or submit it to a larger cluster"
            )
        if not Path(self.script).is_file():
            raise ValueError(f"job {self.name}: there is no script {self.script}; it must be there on every node")

    def as_plain(self) -> dict[str, Any]:
        """The submission in JSON's types."""
        batch_range = None if self.batch_range is None else self.batch_range.as_plain()
        plain = dataclasses.asdict(dataclasses.replace(self, batch_range=None))
        return json.loads(json.dumps({**plain, "batch_range": batch_range}))

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Submission:
        """Inverse of :meth:`as_plain`."""
        environment = tuple((name, value) for name, value in plain["environment"])
        planned = tuple((size, seconds) for size, seconds in plain.get("planned", ()))
        told = plain.get("batch_range")
        own = {
            "arguments": tuple(plain["arguments"]),
            "environment": environment,
            "planned": planned,
            "batch_range": None if told is None else BatchRange.of_plain(told),
        }
        return cls(**{**plain, **own})

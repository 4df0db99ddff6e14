"""Global batches that a job may have, their division over ranks, and the learning rate when the batch changes."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from typing import Any

BATCH_VARIABLE = "PATRICKSTAR_ELASTIC_BATCH"
"""The environment variable with a job's :class:`BatchRange` in JSON, and the batch of its next step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """global batch = micro-batch x accumulation x ranks."""

    micro_batch: int
    """Samples that one rank computes at once."""
    accumulation: int
    """Micro-batches of each rank in one optimizer step."""
    num_ranks: int
    """Ranks that share the global batch."""

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step on all ranks."""
        return self.micro_batch * self.accumulation * self.num_ranks


def divide_batch(global_batch: int, num_ranks: int, max_micro_batch: int) -> BatchDivision:
    """The division with the largest micro-batch of at most ``max_micro_batch`` samples.

    Raises:
        ValueError: a number is below 1, or ranks cannot have equal parts of the global batch.
    """
    numbers = {"global_batch": global_batch, "num_ranks": num_ranks, "max_micro_batch": max_micro_batch}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; give at least 1")
    if global_batch % num_ranks != 0:
        next_batch = math.ceil(global_batch / num_ranks) * num_ranks
        raise ValueError(
            f"a global batch of {global_batch} samples has no equal parts for {num_ranks} ranks; take a number of "
            f"ranks that divides it, or another global batch, for example {next_batch}"
        )
    part = global_batch // num_ranks
    micro = next(size for size in range(min(part, max_micro_batch), 0, -1) if part % size == 0)
    return BatchDivision(micro_batch=micro, accumulation=part // micro, num_ranks=num_ranks)


class MicroBatches(enum.Enum):
    """Choice of the micro-batch size among divisors of a rank's part of the global batch."""

    AT_MOST = "the largest of at most max_micro_batch samples"
    BY_ACTIVATIONS = (
        "the same until the first resize; from then on the largest that device_memory allows by the measured "
        "activation memory of the step before it"
    )


class LearningRateRule(enum.Enum):
    """Change of the learning rate when the global batch changes."""

    NONE = "it stays"
    LINEAR = "it grows as the batch does, over a warm-up (Goyal et al., 2017, arXiv:1706.02677)"
    SQUARE_ROOT = (
        "it grows as the batch's square root, over a warm-up; for Adam (Malladi et al., 2022, arXiv:2205.10287)"
    )


def learning_rate_factor(
    rule: LearningRateRule, old_batch: int, new_batch: int, steps_since: int = 0, warmup_steps: int = 0
) -> float:
    """Factor of the old global batch's learning rate.

    Args:
        rule: how it follows the batch.
        old_batch: samples of a step before the change.
        new_batch: samples of a step after it.
        steps_since: steps made with the new batch so far.
        warmup_steps: steps over which the factor goes linearly from 1 to that of the new batch.

    Raises:
        ValueError: a batch is below 1, or a number of steps below 0.
    """
    if min(old_batch, new_batch) < 1 or min(steps_since, warmup_steps) < 0:
        raise ValueError(
            f"batches of {old_batch} and {new_batch} samples, {steps_since} steps since, {warmup_steps} of warm-up; "
            "give batches of at least 1 and steps of at least 0"
        )
    if rule is LearningRateRule.NONE:
        return 1.0
    ratio = new_batch / old_batch if rule is LearningRateRule.LINEAR else math.sqrt(new_batch / old_batch)
    done = 1.0 if steps_since >= warmup_steps else steps_since / warmup_steps
    return 1.0 + (ratio - 1.0) * done


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRange:
    """Global batches that a job may have, in samples, and how its learning rate follows them.

    Raises:
        ValueError: on construction, if a number is below 1, or they do not ascend.
    """

    min: int
    """The smallest."""
    base: int
    """The batch at the start. The learning rate and its schedule are given for it."""
    max: int
    """The largest."""
    rule: LearningRateRule
    """How the learning rate follows the batch."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises after the batch has grown."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.base <= self.max:
            raise ValueError(
                f"a batch range of min {self.min}, base {self.base} and max {self.max} samples; give at least 1, in "
                "ascending order"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"a batch range's warmup_steps is {self.warmup_steps}; give at least 0")

    @classmethod
    def of(cls, global_batch: int | BatchRange) -> BatchRange:
        """The range itself; for a number, the range of that batch alone."""
        if isinstance(global_batch, BatchRange):
            return global_batch
        return cls(min=global_batch, base=global_batch, max=global_batch, rule=LearningRateRule.NONE)

    @property
    def is_fixed(self) -> bool:
        """True if there is one batch only."""
        return self.min == self.max

    def check(self, global_batch: int) -> None:
        """Raises ValueError for a batch outside of the range."""
        if not self.min <= global_batch <= self.max:
            raise ValueError(
                f"a global batch of {global_batch} samples was ordered, and the job's range is {self.min} to "
                f"{self.max}; order one within it, or state a wider range"
            )

    def nearest_multiple(self, global_batch: float, num_ranks: int) -> int | None:
        """The multiple of ``num_ranks`` in the range that is nearest to ``global_batch``; None: there is none."""
        least, most = math.ceil(self.min / num_ranks), self.max // num_ranks
        return None if least > most else num_ranks * min(max(round(global_batch / num_ranks), least), most)

    def as_plain(self) -> dict[str, Any]:
        """The range in JSON's types."""
        return {**dataclasses.asdict(self), "rule": self.rule.name.lower()}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> BatchRange:
        """Inverse of :meth:`as_plain`."""
        return cls(**{**plain, "rule": LearningRateRule[plain["rule"].upper()]})


def job_batch() -> BatchRange:
    """The batch range that the job was submitted with.

    Raises:
        ValueError: no scheduler started this process.
    """
    told = os.environ.get(BATCH_VARIABLE)
    if told is None:
        raise ValueError(
            f"{BATCH_VARIABLE} is not set: `patrickstar ones` sets it for the jobs that it starts; give the script's "
            "sampler a batch or a BatchRange of its own"
        )
    return BatchRange.of_plain(json.loads(told)["range"])


def start_batch() -> int | None:
    """The global batch that the scheduler wants from the start; None: that of the checkpoint, or the base."""
    told = os.environ.get(BATCH_VARIABLE)
    return None if told is None else json.loads(told)["start"]


def batch_environment(batches: BatchRange, start: int) -> dict[str, str]:
    """Variables for :func:`job_batch` and :func:`start_batch` of a job's processes.

    The script of a job with one batch may state another, so it gets no batch to start with.
    """
    told = {"range": batches.as_plain(), "start": None if batches.is_fixed else start}
    return {BATCH_VARIABLE: json.dumps(told)}

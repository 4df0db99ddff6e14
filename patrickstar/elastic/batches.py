"""Division of a global batch over ranks, and the learning rate when the batch changes."""

from __future__ import annotations

import dataclasses
import enum
import math


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
    SQUARE_ROOT = "it grows as the batch's square root, at once (Krizhevsky, 2014, arXiv:1404.5997)"


def learning_rate_factor(
    rule: LearningRateRule, old_batch: int, new_batch: int, steps_since: int = 0, warmup_steps: int = 0
) -> float:
    """Factor of the old global batch's learning rate.

    Args:
        rule: how it follows the batch.
        old_batch: samples of a step before the change.
        new_batch: samples of a step after it.
        steps_since: steps made with the new batch so far.
        warmup_steps: for :attr:`LearningRateRule.LINEAR`: steps over which the factor goes linearly from 1 to new /
            old.

    Raises:
        ValueError: a batch is below 1, or a number of steps below 0.
    """
    if min(old_batch, new_batch) < 1 or min(steps_since, warmup_steps) < 0:
        raise ValueError(
            f"batches of {old_batch} and {new_batch} samples, {steps_since} steps since, {warmup_steps} of warm-up; "
            "give batches of at least 1 and steps of at least 0"
        )
    ratio = new_batch / old_batch
    if rule is LearningRateRule.NONE:
        return 1.0
    if rule is LearningRateRule.SQUARE_ROOT:
        return math.sqrt(ratio)
    done = 1.0 if steps_since >= warmup_steps else steps_since / warmup_steps
    return 1.0 + (ratio - 1.0) * done

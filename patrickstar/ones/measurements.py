"""A job's speed from measurements, at the sizes and batches that were tried: one rule for simulator and cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar.ones.jobs import StepTime, Throughput

_UNKNOWN_SAMPLE_S = 1e-3  # before any measurement: the same for all jobs
DISTINCT = 1.5  # the ratio of two batches per GPU from which their times separate a pass's constant part
_STEP_ERROR = 0.03  # of the difference of two measured step times, relative to the longer one
_EXPECTED_ERROR = 0.3  # of an expected synchronisation, relative
_LEAST_COMPUTING = 0.1  # share of a step


_Rest = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Synchronisation seconds of a step, over the seconds that one GPU computes for a base batch."""

    within: float = 0.0
    """Between GPUs of one node."""
    between: float = 0.0
    """Between nodes."""

    def times(self, number: float) -> Scaling:
        """So many times these ratios."""
        return Scaling(number * self.within, number * self.between)


@dataclasses.dataclass(frozen=True)
class Synchronisation:
    """Synchronisation seconds of a job's step, as expected from the links of the cluster."""

    within_s: float
    """Between GPUs of one node."""
    between_s: float
    """Between nodes."""

    def times(self, number: float) -> Synchronisation:
        """So many times these seconds."""
        return Synchronisation(number * self.within_s, number * self.between_s)


def fitted_throughput(
    measured: Sequence[StepTime],
    base_batch: int = 1,
    max_micro_batch: int = 2**30,
    prior: Scaling = Scaling(),  # noqa: B008
) -> Throughput:
    """A throughput model from measurements: computation from the smallest number of GPUs, synchronisation from the
    others.

    Args:
        measured: steps; predictions of the planner if nothing was measured.
        base_batch: in samples, for the prior.
        max_micro_batch: samples that one GPU takes in one pass.
        prior: counts where nothing was measured; by default scaling is perfect, as Pollux assumes.
    """
    if not measured:
        base_s = _UNKNOWN_SAMPLE_S * base_batch
        return _throughput(_UNKNOWN_SAMPLE_S, 0.0, prior.within * base_s, prior.between * base_s, max_micro_batch)
    alone = _on_fewest(measured)
    fewest, last = alone[-1].num_gpus, alone[-1]
    share = 0.0 if fewest == 1 else (prior.within if last.num_nodes == 1 else prior.between)
    pass_s, sample_s = _separated(alone, max_micro_batch) or (
        0.0, last.seconds / (_samples_per_gpu(last) + share * base_batch)
    )  # fmt: skip
    compute = _throughput(sample_s, pass_s, 0.0, 0.0, max_micro_batch)
    within, between = _rests(measured, fewest, compute)
    expected = Scaling(prior.within * sample_s * base_batch, prior.between * sample_s * base_batch)
    node = _mean(between) if between else _mean(within) + expected.between - expected.within * bool(within)
    return _throughput(sample_s, pass_s, _mean(within) if within else min(expected.within, node), node, max_micro_batch)


def throughput_on_links(
    measured: Sequence[StepTime], expected: Synchronisation, max_micro_batch: int = 2**30
) -> Throughput:
    """A throughput model from measurements, of a job whose synchronisation is expected.

    The expectation tells computing from synchronising in the steps on the fewest GPUs. On more GPUs synchronisation is
    a difference of two step times, which is known badly if computing takes long. So it counts beside the expectation,
    both by their variances.

    Args:
        measured: steps, at least one.
        expected: its seconds are positive.
        max_micro_batch: samples that one GPU takes in one pass.
    """
    alone = _on_fewest(measured)
    fewest, last = alone[-1].num_gpus, alone[-1]
    share_s = 0.0 if fewest == 1 else (expected.within_s if last.num_nodes == 1 else expected.between_s)
    pass_s, sample_s = _separated(alone, max_micro_batch) or (
        0.0, max(last.seconds - share_s, _LEAST_COMPUTING * last.seconds) / _samples_per_gpu(last)
    )  # fmt: skip
    within, between = _rests(measured, fewest, _throughput(sample_s, pass_s, 0.0, 0.0, max_micro_batch))
    within_s, between_s = _weighted(expected.within_s, within), _weighted(expected.between_s, between)
    return _throughput(sample_s, pass_s, within_s, between_s, max_micro_batch)


def scaling_of(
    measured: Sequence[StepTime], base_batch: int, max_micro_batch: int
) -> tuple[float | None, float | None, float]:
    """``within`` and ``between`` of a job's :class:`Scaling`, and the seconds that one GPU computes for a base batch.

    None for sizes on which it was not measured. A job that was not measured on one GPU has neither, and 0 seconds.
    """
    sizes = {(step.num_gpus, step.num_nodes > 1) for step in measured}
    if (1, False) not in sizes:
        return None, None, 0.0
    fitted = fitted_throughput(measured, base_batch, max_micro_batch)
    base_s = fitted.sample_s * base_batch
    within = fitted.sync_s / base_s if any(num > 1 and not is_far for num, is_far in sizes) else None
    return within, fitted.node_sync_s / base_s if any(is_far for _, is_far in sizes) else None, base_s


def _throughput(sample_s: float, pass_s: float, sync_s: float, node_sync_s: float, max_micro_batch: int) -> Throughput:
    return Throughput(
        sample_s=sample_s, pass_s=pass_s, sync_s=sync_s, node_sync_s=node_sync_s, gamma=1.0,
        max_micro_batch=max_micro_batch,
    )  # fmt: skip


def _on_fewest(measured: Sequence[StepTime]) -> list[StepTime]:
    """Steps on the fewest GPUs, by ascending batch."""
    fewest = min(step.num_gpus for step in measured)
    return sorted((step for step in measured if step.num_gpus == fewest), key=lambda step: step.batch_size)


def _samples_per_gpu(step: StepTime) -> int:
    return math.ceil(step.batch_size / step.num_gpus)


def _separated(alone: Sequence[StepTime], max_micro_batch: int) -> tuple[float, float] | None:
    """Seconds of a pass and of a sample, from two batches on one GPU; None if these steps do not tell them."""

    def work(step: StepTime) -> tuple[int, int]:
        return math.ceil(_samples_per_gpu(step) / max_micro_batch), _samples_per_gpu(step)

    (passes, samples), (more_passes, more_samples) = work(alone[0]), work(alone[-1])
    determinant = passes * more_samples - more_passes * samples
    if alone[0].num_gpus == 1 and more_samples >= DISTINCT * samples and determinant > 0:
        first, last = alone[0].seconds, alone[-1].seconds
        pass_s = (first * more_samples - last * samples) / determinant
        sample_s = (passes * last - more_passes * first) / determinant
        if pass_s >= 0 and sample_s > 0:
            return pass_s, sample_s
    return None


def _rests(measured: Sequence[StepTime], fewest: int, compute: Throughput) -> tuple[list[_Rest], list[_Rest]]:
    """Seconds beside computing on more than the fewest GPUs, and of the whole step: within a node, between nodes."""
    within, between = [], []
    for step in measured:
        if step.num_gpus > fewest:
            rest_s = max(0.0, step.seconds - float(compute.step_s(step.num_gpus, step.batch_size)))
            (within if step.num_nodes == 1 else between).append((rest_s, step.seconds))
    return within, between


def _weighted(expected_s: float, rests: Sequence[_Rest]) -> float:
    """Mean of an expectation and of differences of step times, each by one over its variance."""
    parts = [(expected_s, _EXPECTED_ERROR * expected_s), *((rest_s, _STEP_ERROR * step_s) for rest_s, step_s in rests)]
    weights = [error_s**-2 for _, error_s in parts]
    return sum(weight * seconds for weight, (seconds, _) in zip(weights, parts, strict=True)) / sum(weights)


def _mean(rests: Sequence[_Rest]) -> float:
    return sum(rest_s for rest_s, _ in rests) / len(rests) if rests else 0.0

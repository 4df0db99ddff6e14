"""A job's speed from measurements, at the sizes and batches that were tried: one rule for simulator and cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from patrickstar.ones.jobs import StepTime, Throughput

_UNKNOWN_SAMPLE_S = 1e-3  # before any measurement: the same for all jobs
DISTINCT = 1.5  # the ratio of two batches per GPU from which their times separate a pass's constant part


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Synchronisation seconds of a step, over the seconds that one GPU computes for a base batch."""

    within: float = 0.0
    """Between GPUs of one node."""
    between: float = 0.0
    """Between nodes."""


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
    fewest = min(step.num_gpus for step in measured)
    alone = sorted((step for step in measured if step.num_gpus == fewest), key=lambda step: step.batch_size)
    share = 0.0 if fewest == 1 else (prior.within if alone[-1].num_nodes == 1 else prior.between)
    pass_s, sample_s = _computation(alone, max_micro_batch, share * base_batch)
    compute = _throughput(sample_s, pass_s, 0.0, 0.0, max_micro_batch)
    within, between = [], []
    for step in measured:
        if step.num_gpus > fewest:
            rest = max(0.0, step.seconds - float(compute.step_s(step.num_gpus, step.batch_size)))
            (within if step.num_nodes == 1 else between).append(rest)
    expected = Scaling(prior.within * sample_s * base_batch, prior.between * sample_s * base_batch)
    node = _mean(between) if between else _mean(within) + expected.between - expected.within * bool(within)
    return _throughput(sample_s, pass_s, _mean(within) if within else min(expected.within, node), node, max_micro_batch)


def scaling_of(
    measured: Sequence[StepTime], base_batch: int, max_micro_batch: int
) -> tuple[float | None, float | None]:
    """``within`` and ``between`` of a job's :class:`Scaling`; None for what it was not measured on. A job that was not
    measured on one GPU has neither.
    """
    sizes = {(step.num_gpus, step.num_nodes > 1) for step in measured}
    if (1, False) not in sizes:
        return None, None
    fitted = fitted_throughput(measured, base_batch, max_micro_batch)
    base_s = fitted.sample_s * base_batch
    within = fitted.sync_s / base_s if any(num > 1 and not is_far for num, is_far in sizes) else None
    return within, fitted.node_sync_s / base_s if any(is_far for _, is_far in sizes) else None


def _throughput(sample_s: float, pass_s: float, sync_s: float, node_sync_s: float, max_micro_batch: int) -> Throughput:
    return Throughput(
        sample_s=sample_s, pass_s=pass_s, sync_s=sync_s, node_sync_s=node_sync_s, gamma=1.0,
        max_micro_batch=max_micro_batch,
    )  # fmt: skip


def _computation(alone: Sequence[StepTime], max_micro_batch: int, sync_samples: float) -> tuple[float, float]:
    """Seconds of a pass and of a sample, from steps on the same number of GPUs, by ascending batch.

    ``sync_samples`` is the expected synchronisation, in units of a sample's computation.
    """

    def work(step: StepTime) -> tuple[int, int]:
        per_gpu = math.ceil(step.batch_size / step.num_gpus)
        return math.ceil(per_gpu / max_micro_batch), per_gpu

    (passes, samples), (more_passes, more_samples) = work(alone[0]), work(alone[-1])
    determinant = passes * more_samples - more_passes * samples
    if alone[0].num_gpus == 1 and more_samples >= DISTINCT * samples and determinant > 0:
        first, last = alone[0].seconds, alone[-1].seconds
        pass_s = (first * more_samples - last * samples) / determinant
        sample_s = (passes * last - more_passes * first) / determinant
        if pass_s >= 0 and sample_s > 0:
            return pass_s, sample_s
    return 0.0, alone[-1].seconds / (more_samples + sync_samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

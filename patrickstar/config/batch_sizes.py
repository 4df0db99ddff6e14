"""Batch sizes of a step: ``train_batch_size`` = micro-batch x accumulation x ranks."""

from __future__ import annotations

import dataclasses

from patrickstar.config.root import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The three batch sizes of a run."""

    train_batch_size: int
    """Samples of one optimizer step, on all ranks."""
    micro_batch_size: int
    """Samples of one forward on one rank."""
    accumulation_steps: int
    """Backward passes of one optimizer step."""


def resolve_batch_sizes(config: Config, num_ranks: int) -> BatchSizes:
    """The configured sizes; missing ones are computed from the others. With only one batch size given there is no
    accumulation.

    Raises:
        ValueError: they contradict each other, are not divisible, or neither batch size is given.
    """
    train, micro, accumulation = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if train is None and micro is None:
        raise ValueError(
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; give one of them (samples of a step "
            "on all ranks, or of a forward on one rank)"
        )
    if train is None:
        accumulation = accumulation or 1
        train = micro * accumulation * num_ranks
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * num_ranks)
    elif accumulation is None:
        accumulation = train // (micro * num_ranks)
    sizes = BatchSizes(train_batch_size=train, micro_batch_size=micro, accumulation_steps=accumulation)
    _check(config, sizes, num_ranks)
    return sizes


def _check(config: Config, sizes: BatchSizes, num_ranks: int) -> None:
    micro, accumulation = sizes.micro_batch_size, sizes.accumulation_steps
    product = micro * accumulation * num_ranks
    if product == sizes.train_batch_size:
        return
    given = {
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }
    known = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    if None in given.values():
        divisor = num_ranks * (config.train_micro_batch_size_per_gpu or accumulation)
        raise ValueError(
            f"train_batch_size is {sizes.train_batch_size}, which {num_ranks} ranks{' with ' if known else ''}{known} "
            f"cannot divide evenly; give a multiple of {divisor}"
        )
    raise ValueError(
        f"train_batch_size is {sizes.train_batch_size}, but train_micro_batch_size_per_gpu x "
        f"gradient_accumulation_steps x ranks is {micro} x {accumulation} x {num_ranks} = {product}; give that, or "
        "leave one out"
    )

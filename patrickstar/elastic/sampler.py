"""Samples of an epoch for any number of ranks, each sample once.

    sampler = ElasticSampler(len(dataset), global_batch=32, max_micro_batch=4, seed=0)
    for micro_batches in ElasticLoader(dataset, sampler):
        for batch in micro_batches:
            ...  # forward and backward
        optimizer.step()

A step takes the next global batch of samples of a permutation that depends on seed and epoch. Rank r takes the r-th of
equal parts of them. So a step's samples do not depend on the number of ranks, and the order of samples does not depend
on the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from patrickstar.elastic.batches import BatchDivision, BatchRange, MicroBatches, divide_batch


@runtime_checkable
class OfRanks(Protocol):
    """User state that knows the ranks, such as ``patrickstar.elastic.ElasticSampler``."""

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError if so many ranks cannot share it."""

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """Sets the rank and the number of ranks from now on."""


@runtime_checkable
class OfBatch(Protocol):
    """User state that depends on the global batch, such as ``patrickstar.elastic.ElasticSampler``."""

    global_batch: int
    """Samples of a step on all ranks."""
    batches: BatchRange
    """The batches that it accepts."""

    def set_batch(self, global_batch: int) -> None:
        """Sets the batch from the next :meth:`OfRanks.set_ranks` on. Raises ValueError outside of the range."""


@runtime_checkable
class OfOneRun(Protocol):
    """User state that can validate a state before loading it."""

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Raises ValueError if the state does not fit; the process then does not join."""


@runtime_checkable
class ForActivations(Protocol):
    """User state that sizes micro-batches by memory, such as ``patrickstar.elastic.ElasticSampler``."""

    measured_micro_batch: int | None
    """Samples of the last step's micro-batches; None: their number does not depend on measurements."""
    global_batch: int
    """Samples of a step on all ranks."""

    def allow_micro_batch(self, most: int) -> None:
        """Sets how many samples fit, from the next :meth:`OfRanks.set_ranks` on."""


class ElasticSampler(Sampler[list[int]]):
    """This rank's micro-batches, as lists of indices, from :attr:`cursor` to the end of the epoch. Samples after an
    epoch's last whole global batch are dropped, as by ``drop_last``.

    Args:
        num_samples: of the data set.
        global_batch: samples of an optimizer step on all ranks, or the range of batches that it may have. It begins
            with the range's base.
        max_micro_batch: most samples that a rank computes at once.
        seed: of the permutations.
        rank: of this process.
        num_ranks: ranks that share the epoch.
        micro_batches: tells whether ``max_micro_batch`` follows measurements.

    Raises:
        ValueError: the data set has fewer samples than the largest global batch, or the global batch is not divisible
            by the ranks.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int | BatchRange,
        max_micro_batch: int,
        seed: int = 0,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        micro_batches: MicroBatches = MicroBatches.AT_MOST,
    ):
        self.batches = BatchRange.of(global_batch)
        if num_samples < self.batches.max:
            raise ValueError(
                f"the data set has {num_samples} samples and a global batch {self.batches.max}; take a smaller one"
            )
        self.num_samples = num_samples
        self.global_batch = self.batches.base
        self.max_micro_batch = max_micro_batch
        """Most samples that a rank computes at once, from the next :meth:`set_ranks` on."""
        self.micro_batches = micro_batches
        self.seed = seed
        self.epoch = 0
        """Number of the permutation, from 0."""
        self.cursor = 0
        """Samples of the epoch that all ranks together have taken."""
        self.set_ranks(rank, num_ranks)

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """Shares the epoch over ``num_ranks``, from the next step on.

        Raises:
            ValueError: ``rank`` is out of range, or the global batch is not divisible; nothing is changed.
        """
        division = divide_batch(self.global_batch, num_ranks, self.max_micro_batch)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}; give one from 0 to {num_ranks - 1}")
        self.rank, self.division = rank, division

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError unless the global batch is divisible by so many ranks."""
        divide_batch(self.global_batch, num_ranks, self.max_micro_batch)

    def set_batch(self, global_batch: int) -> None:
        """Sets the global batch, from the next :meth:`set_ranks` on. Raises ValueError outside of the range."""
        self.batches.check(global_batch)
        self.global_batch = global_batch

    @property
    def measured_micro_batch(self) -> int | None:
        """Samples of this rank's micro-batches, with :attr:`MicroBatches.BY_ACTIVATIONS`; else None."""
        return self.division.micro_batch if self.micro_batches is MicroBatches.BY_ACTIVATIONS else None

    def allow_micro_batch(self, most: int) -> None:
        """Sets how many samples fit, from the next :meth:`set_ranks` on."""
        self.max_micro_batch = most

    division: BatchDivision
    """The division of the global batch."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole epoch with the present global batch."""
        return self.num_samples // self.global_batch

    @property
    def remaining_steps(self) -> int:
        """Optimizer steps of the rest of the epoch with the present global batch."""
        return (self.num_samples - self.cursor) // self.global_batch

    def __len__(self) -> int:
        """This rank's remaining micro-batches of the epoch."""
        return self.remaining_steps * self.division.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        share = self.global_batch // self.division.num_ranks
        micro = self.division.micro_batch
        for step in range(self.cursor, self.num_samples - self.global_batch + 1, self.global_batch):
            begin = step + self.rank * share
            for first in range(begin, begin + share, micro):
                yield order[first : first + micro]

    def _order(self) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator, device="cpu").tolist()

    def advance(self) -> None:
        """Takes one optimizer step's samples. After the last step of an epoch, call :meth:`next_epoch`."""
        self.cursor += self.global_batch

    def next_epoch(self) -> None:
        """Starts the next permutation."""
        self.epoch, self.cursor = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The run's position, equal on all ranks and valid for any number of ranks."""
        return {
            "num_samples": self.num_samples,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
        }

    def check_state(self, state: Mapping[str, int]) -> None:
        """Raises ValueError if the state is of another data set or batch range, or is no position in an epoch."""
        low, high = self.batches.min, self.batches.max
        batch, wrong = state.get("global_batch"), []
        if state.get("num_samples") != self.num_samples:
            wrong.append(f"num_samples {state.get('num_samples')} instead of {self.num_samples}")
        if type(batch) is not int or not low <= batch <= high:
            own = str(low) if self.batches.is_fixed else f"{low} to {high}"
            wrong.append(f"global_batch {batch} instead of {own}")
        if wrong:
            raise ValueError(
                f"the sampler's state is of another run: {', '.join(wrong)}; give the same data and global batch"
            )
        if any(type(state.get(key)) is not int or state[key] < 0 for key in ("seed", "epoch", "cursor")):
            raise ValueError(f"the sampler's state {state!r} has no seed, epoch and cursor of at least 0")
        if state["cursor"] > self.num_samples or (self.batches.is_fixed and state["cursor"] % self.global_batch):
            raise ValueError(f"the cursor is {state['cursor']}; give a multiple of {self.global_batch} in the epoch")

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the position and the global batch, from the next :meth:`set_ranks` on.

        Raises:
            ValueError: as :meth:`check_state`; nothing is changed then.
        """
        self.check_state(state)
        self.seed, self.epoch, self.cursor = state["seed"], state["epoch"], state["cursor"]
        self.global_batch = state["global_batch"]


class ElasticLoader:
    """Iterates over the remaining steps of an epoch; yields this rank's micro-batches of each as a list, from a
    ``DataLoader``.

    A step counts as taken when it is yielded, so a checkpoint or resize afterwards continues with the next one. If the
    ranks or the batch change, the next step comes from a new ``DataLoader``. At the end of an epoch the sampler moves
    to the next.

    Args:
        dataset: with as many samples as the sampler.
        sampler: yields the micro-batches.
        **options: of ``DataLoader``, except batches and order (``num_workers``, ``collate_fn``, ...).
    """

    def __init__(self, dataset: Dataset[Any], sampler: ElasticSampler, **options: Any):
        self.sampler = sampler
        self._make: Callable[[], DataLoader[Any]] = lambda: DataLoader(dataset, batch_sampler=sampler, **options)

    def __len__(self) -> int:
        """Remaining optimizer steps of the epoch."""
        return self.sampler.remaining_steps

    def __iter__(self) -> Iterator[list[Any]]:
        sampler = self.sampler
        place: tuple[Any, ...] | None = None
        batches: Iterator[Any] = iter(())
        epoch = sampler.epoch
        while sampler.epoch == epoch and sampler.cursor + sampler.global_batch <= sampler.num_samples:
            here = (sampler.rank, sampler.division, sampler.cursor)
            if place != here:
                batches = iter(self._make())
            step = [next(batches) for _ in range(sampler.division.accumulation)]
            sampler.advance()
            place = (sampler.rank, sampler.division, sampler.cursor)
            yield step
            if sampler.epoch == epoch - 1 and sampler.cursor + sampler.global_batch > sampler.num_samples:
                sampler.next_epoch()  # a recovery went back to the end of the epoch before
        if sampler.epoch == epoch:
            sampler.next_epoch()

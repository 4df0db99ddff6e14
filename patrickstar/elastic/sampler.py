"""Samples of an epoch for any number of ranks, each of them once.

    sampler = ElasticSampler(len(dataset), global_batch=32, max_micro_batch=4, seed=0)
    for micro_batches in ElasticLoader(dataset, sampler):
        for batch in micro_batches:
            ...  # forward and backward
        optimizer.step()

Step k of an epoch takes the samples [k x global batch, (k + 1) x global batch) of a permutation that seed and epoch
decide, rank r the r-th of equal parts of them. So which samples a step takes does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from patrickstar.elastic.batches import BatchDivision, MicroBatches, divide_batch


@runtime_checkable
class OfRanks(Protocol):
    """What is carried and knows the ranks, such as ``patrickstar.elastic.ElasticSampler``."""

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError where it cannot be shared by so many."""

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """It is shared by so many from now on, of which this process is ``rank``."""


@runtime_checkable
class OfOneRun(Protocol):
    """What is carried and can tell whether a state is one that it could take."""

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Raises ValueError where it is not: a process then does not join."""


@runtime_checkable
class OfTide(Protocol):
    """What is carried and divides batches by what memory allows, such as ``patrickstar.elastic.ElasticSampler``."""

    measured_micro_batch: int | None
    """Samples of the last step's micro-batches; None: their number follows from nothing that is measured."""
    global_batch: int
    """Samples of a step on all ranks."""

    def allow_micro_batch(self, most: int) -> None:
        """So many samples fit, from the next :meth:`OfRanks.set_ranks` on."""


class ElasticSampler(Sampler[list[int]]):
    """This rank's micro-batches, as lists of indices, from :attr:`cursor` to the end of the epoch. What is left over
    after the last whole global batch of an epoch is left out, as by ``drop_last``.

    Args:
        num_samples: of the data set.
        global_batch: samples of an optimizer step on all ranks.
        max_micro_batch: the most samples that a rank computes at once.
        seed: of the permutations.
        rank: of this process.
        num_ranks: that share the epoch.
        micro_batches: whether ``max_micro_batch`` follows from what is measured.

    Raises:
        ValueError: the data set has fewer samples than a global batch, or that cannot be divided among the ranks.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        max_micro_batch: int,
        seed: int = 0,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        micro_batches: MicroBatches = MicroBatches.AT_MOST,
    ):
        if num_samples < global_batch:
            raise ValueError(
                f"the data set has {num_samples} samples and a global batch {global_batch}; take a smaller one"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.max_micro_batch = max_micro_batch
        """The most samples that a rank computes at once, from the next :meth:`set_ranks` on."""
        self.micro_batches = micro_batches
        self.seed = seed
        self.epoch = 0
        """Which permutation it is, from 0."""
        self.cursor = 0
        """Samples of the epoch that all ranks together have taken; a multiple of the global batch."""
        self.set_ranks(rank, num_ranks)

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """From the next step on the epoch is shared by ``num_ranks``, of which this is ``rank``.

        Raises:
            ValueError: ``rank`` is none of them, or the global batch has no equal parts for them; nothing is changed.
        """
        division = divide_batch(self.global_batch, num_ranks, self.max_micro_batch)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}; give one from 0 to {num_ranks - 1}")
        self.rank, self.division = rank, division

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError unless the global batch has equal parts for so many ranks."""
        divide_batch(self.global_batch, num_ranks, self.max_micro_batch)

    @property
    def measured_micro_batch(self) -> int | None:
        """Samples of this rank's micro-batches, with :attr:`MicroBatches.BY_TIDE`."""
        return self.division.micro_batch if self.micro_batches is MicroBatches.BY_TIDE else None

    def allow_micro_batch(self, most: int) -> None:
        """So many samples fit; it counts from the next :meth:`set_ranks` on."""
        self.max_micro_batch = most

    division: BatchDivision
    """How the global batch is divided."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.num_samples // self.global_batch

    def __len__(self) -> int:
        """Micro-batches of this rank that are left of the epoch."""
        return (self.num_steps - self.cursor // self.global_batch) * self.division.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        share = self.global_batch // self.division.num_ranks
        micro = self.division.micro_batch
        for step in range(self.cursor, self.num_steps * self.global_batch, self.global_batch):
            begin = step + self.rank * share
            for first in range(begin, begin + share, micro):
                yield order[first : first + micro]

    def _order(self) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def advance(self) -> None:
        """One optimizer step's samples are taken; after the last of an epoch :meth:`next_epoch` follows."""
        self.cursor += self.global_batch

    def next_epoch(self) -> None:
        """The next permutation, from its beginning."""
        self.epoch, self.cursor = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the run is, for any number of ranks: the same on all of them."""
        return {
            "num_samples": self.num_samples,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
        }

    def check_state(self, state: Mapping[str, int]) -> None:
        """Raises ValueError where it is of another data set or another global batch, or says no place in an epoch."""
        own = self.state_dict()
        wrong = [key for key in ("num_samples", "global_batch") if state.get(key) != own[key]]
        if wrong:
            shown = ", ".join(f"{key} {state.get(key)} instead of {own[key]}" for key in wrong)
            raise ValueError(f"the sampler's state is of another run: {shown}; give the same data and global batch")
        if any(type(state.get(key)) is not int or state[key] < 0 for key in ("seed", "epoch", "cursor")):
            raise ValueError(f"the sampler's state {state!r} has no seed, epoch and cursor of at least 0")
        if state["cursor"] % self.global_batch or state["cursor"] > self.num_samples:
            raise ValueError(f"the cursor is {state['cursor']}; give a multiple of {self.global_batch} in the epoch")

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from there, at this sampler's number of ranks.

        Raises:
            ValueError: as :meth:`check_state`; nothing is changed then.
        """
        self.check_state(state)
        self.seed, self.epoch, self.cursor = state["seed"], state["epoch"], state["cursor"]


class ElasticLoader:
    """The steps that are left of an epoch: for each the list of this rank's micro-batches, from a ``DataLoader``. It
    counts as taken when it is given out, so what is saved or resized after it goes on with the next one. Where the
    ranks change in between, the next step comes from a new ``DataLoader``. A finished epoch is followed by the next.

    Args:
        dataset: with as many samples as the sampler has.
        sampler: whose micro-batches are loaded.
        **options: of ``DataLoader``, but for its batches and its order (``num_workers``, ``collate_fn``, ...).
    """

    def __init__(self, dataset: Dataset[Any], sampler: ElasticSampler, **options: Any):
        self.sampler = sampler
        self._make: Callable[[], DataLoader[Any]] = lambda: DataLoader(dataset, batch_sampler=sampler, **options)

    def __len__(self) -> int:
        """Optimizer steps that are left of the epoch."""
        return self.sampler.num_steps - self.sampler.cursor // self.sampler.global_batch

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
        if sampler.epoch == epoch:
            sampler.next_epoch()

"""The global batch of an :class:`patrickstar.elastic.ElasticRun`, and the gradient noise scale measured for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from patrickstar.elastic.gradient_noise import GradientNoise, GradientParts
from patrickstar.elastic.sampler import OfBatch, OfRanks


@runtime_checkable
class NoisyEngine(Protocol):
    """An engine that measures its gradient noise, and whose global batch may change."""

    @property
    def gradient_parts(self) -> GradientParts | None:
        """See ``Engine.gradient_parts``."""
        ...

    def measure_gradient_parts(self) -> None:
        """See ``Engine.measure_gradient_parts``."""


class RunBatch:
    """Sets the batch and the ranks of user state, and measures noise if the batch may change. Ranks that share samples
    count as one in user state.

    Raises:
        ValueError: the user state has a range of batches, and the engine one batch.
    """

    def __init__(self, engine: Any, user_state: Iterable[Any]):
        self._ranks_per_sample = engine.ranks_per_sample
        self._items = list(user_state)
        self._of_batch = [item for item in self._items if isinstance(item, OfBatch)]
        self._changing = list(filter(_is_changing, self._of_batch))
        self._noisy = engine if self._changing else None
        if self._changing and not isinstance(engine, NoisyEngine):
            raise ValueError(
                f"the user state has a range of batches, and a {type(engine).__name__} has one batch; give the sampler "
                "a number"
            )
        self.noise = GradientNoise()
        """Notes steps only if the batch may change."""

    @property
    def global_batch(self) -> int:
        """Samples of the next step; 0 if no user state has a batch."""
        return self._of_batch[0].global_batch if self._of_batch else 0

    def measure(self) -> None:
        """Must be called before the first step, and after each change of ranks. Collective over all ranks."""
        if self._noisy is not None:
            self._noisy.measure_gradient_parts()

    def note_step(self) -> None:
        """Takes the noise of the last step."""
        if self._noisy is not None:
            self.noise.note(self._noisy.gradient_parts, self.global_batch)

    def set(self, global_batch: int) -> None:
        """Sets the batch, from the next :meth:`set_ranks` on.

        Raises:
            ValueError: the batch is fixed, or out of range; nothing is changed then.
        """
        if global_batch == self.global_batch:
            return
        if not self._changing:
            raise ValueError(
                f"a global batch of {global_batch} samples was ordered, and the script's batch is fixed; give its "
                "sampler the job's range (patrickstar.elastic.job_batch)"
            )
        for item in self._changing:
            item.batches.check(global_batch)
        for item in self._changing:
            item.set_batch(global_batch)

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """Sets the ranks of all user state. Raises ValueError if they cannot share it; nothing is changed then."""
        of_ranks = [item for item in self._items if isinstance(item, OfRanks)]
        group, num_groups = rank // self._ranks_per_sample, num_ranks // self._ranks_per_sample
        for item in of_ranks:
            item.check_ranks(num_groups)
        for item in of_ranks:
            item.set_ranks(group, num_groups)

    def states(self) -> list[Mapping[str, Any]]:
        """States for :meth:`restore`."""
        return [item.state_dict() for item in self._changing]  # type: ignore[attr-defined]

    def restore(self, states: list[Mapping[str, Any]]) -> None:
        """Undoes :meth:`set`."""
        for item, state in zip(self._changing, states, strict=True):
            item.load_state_dict(state)  # type: ignore[attr-defined]


def check_any_batch(items: Iterable[Any], num_ranks: int) -> None:
    """Raises ValueError if so many ranks cannot share the user state, with any batch that it may have."""
    for item in items:
        if _is_changing(item):
            if item.batches.nearest_multiple(item.global_batch, num_ranks) is None:
                low, high = item.batches.min, item.batches.max
                raise ValueError(f"no batch from {low} to {high} samples has equal parts for {num_ranks} ranks")
        elif isinstance(item, OfRanks):
            item.check_ranks(num_ranks)


def share(items: Iterable[Any], rank: int, num_ranks: int) -> None:
    """Sets the ranks of user state. A batch that may change, and has no equal parts for them, becomes the nearest one
    that has.
    """
    some = list(items)
    for item in filter(_is_changing, some):
        item.set_batch(item.batches.nearest_multiple(item.global_batch, num_ranks) or item.global_batch)
    for item in some:
        if isinstance(item, OfRanks):
            item.set_ranks(rank, num_ranks)


def _is_changing(item: Any) -> bool:
    return isinstance(item, OfBatch) and not item.batches.is_fixed

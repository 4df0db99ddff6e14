"""The step counts of ``patrickstar.initialize``'s engine, as user state of a resize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patrickstar.deepspeed.saving import SavingEngine
from patrickstar.elastic import divide_batch


class Counts:
    """Steps, samples and micro-batches so far; adapts the micro-batches of a step to the number of ranks.

    Args:
        engine: the engine that has the counts.
        train_batch_size: samples of a step on all ranks; constant.
        micro_batch_size: samples of one rank's micro-batch; constant.
    """

    def __init__(self, engine: SavingEngine, train_batch_size: int, micro_batch_size: int):
        self._engine = engine
        self._train_batch_size = train_batch_size
        self._micro_batch_size = micro_batch_size

    @property
    def name(self) -> str:
        """Name of the user state; processes with different names cannot train together."""
        return f"patrickstar.initialize with {self._train_batch_size} samples, {self._micro_batch_size} at once"

    def state_dict(self) -> dict[str, Any]:
        """The counts, as in a checkpoint."""
        return self._engine._own_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counts of a joining process."""
        self._engine._set_own_state(state)

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError unless a step is a whole number of micro-batches on each of so many ranks."""
        division = divide_batch(self._train_batch_size, num_ranks, self._micro_batch_size)
        if division.micro_batch != self._micro_batch_size:
            raise ValueError(
                f"train_batch_size {self._train_batch_size} is no multiple of micro-batch x ranks, "
                f"{self._micro_batch_size} x {num_ranks}; take another number of ranks"
            )

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """Divides a step over so many ranks from now on."""
        division = divide_batch(self._train_batch_size, num_ranks, self._micro_batch_size)
        self._engine._accumulation.num_micro_batches = division.accumulation

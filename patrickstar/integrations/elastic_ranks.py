"""Resizes under an accelerator: its processes follow the engine's ranks."""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

from patrickstar._C import StateError
from patrickstar.elastic.gradient_noise import GradientParts
from patrickstar.elastic.phases import Membership, Recovered, Resized
from patrickstar.engine.engine import Engine
from patrickstar.ranks.context import DistributedContext
from patrickstar.session.interrupts import deferred_signals


class ElasticRanks:
    """A base class of an ``Accelerator`` with an engine."""

    engine: Engine
    _dataloaders: list[Any]

    @property
    def rank_timeout_seconds(self) -> float:
        """The engine's timeout, for :class:`patrickstar.elastic.ElasticRun`."""
        return self.engine.rank_timeout_seconds

    @property
    def num_parameters(self) -> int:
        """See :attr:`patrickstar.engine.engine.Engine.num_parameters`."""
        return self.engine.num_parameters

    def resize(self, num_ranks: int, **options: Any) -> Resized:
        """Calls :meth:`patrickstar.engine.engine.Engine.resize`; the accelerator's processes are then the new ranks.
        Batches must come from an unprepared ``patrickstar.elastic.ElasticLoader``.

        Raises:
            StateError: a data loader was prepared, whose batches are for the old ranks.
        """
        self._check_loaders("resize")
        with deferred_signals():  # the engine and the accelerator change together
            return self._followed(self.engine.resize(num_ranks, **options))

    def join(self, **options: Any) -> Resized:
        """Calls :meth:`patrickstar.engine.engine.Engine.join`; otherwise like :meth:`resize`."""
        self._check_loaders("join")
        with deferred_signals():
            return self._followed(self.engine.join(**options))

    @property
    def gradient_parts(self) -> GradientParts | None:
        """See :attr:`patrickstar.engine.engine.Engine.gradient_parts`."""
        return self.engine.gradient_parts

    def measure_gradient_parts(self) -> None:
        """See :meth:`patrickstar.engine.engine.Engine.measure_gradient_parts`."""
        self.engine.measure_gradient_parts()

    def keep_copies(self, name: str, **options: Any) -> None:
        """Calls :meth:`patrickstar.engine.engine.Engine.keep_copies`."""
        self._check_loaders("keep_copies")
        self.engine.keep_copies(name, **options)

    def recover(self, error: BaseException, **options: Any) -> Recovered:
        """Calls :meth:`patrickstar.engine.engine.Engine.recover`; otherwise like :meth:`resize`."""
        with deferred_signals():
            recovered = self.engine.recover(error, **options)
            self._followed(recovered.resized)
            return recovered

    def _check_loaders(self, call: str) -> None:
        if self._dataloaders:
            raise StateError(
                f"{call} with {len(self._dataloaders)} prepared data loaders, which give batches for the ranks that "
                "there were; take batches from patrickstar.elastic.ElasticLoader, and do not prepare it"
            )

    def _followed(self, resized: Resized) -> Resized:
        if resized.membership is Membership.RANK:
            _follow_ranks(self, self.engine._session.ranks.context)
        return resized


def _follow_ranks(accelerator: Any, context: DistributedContext) -> None:
    """Updates Accelerate's per-process state to the new rank."""
    several = DistributedType.MULTI_GPU if context.device.type == "cuda" else DistributedType.MULTI_CPU
    for state in (PartialState(), accelerator.state):
        state.distributed_type = several if context.world_size > 1 else DistributedType.NO
        state.backend = "gloo" if context.world_size > 1 else None  # a resize makes gloo worlds
        state.num_processes, state.process_index = context.world_size, context.rank
        state.local_process_index = context.local_rank

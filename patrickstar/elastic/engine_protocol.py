"""The interfaces of an engine that elastic runs use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from patrickstar.elastic.phases import Recovered, Resized


class RecoverableEngine(Protocol):
    """The interface of :class:`patrickstar.Engine` that recoveries need."""

    @property
    def rank_timeout_seconds(self) -> float:
        """The longest wait for another process."""
        ...

    def keep_copies(self, name: str, *, redundancy: int, user_state: Mapping[str, Any]) -> None:
        """See ``Engine.keep_copies``."""

    def recover(self, error: BaseException, **options: Any) -> Recovered:
        """See ``Engine.recover``."""


class ElasticEngine(RecoverableEngine, Protocol):
    """The interface of :class:`patrickstar.Engine` that a run needs."""

    @property
    def device(self) -> torch.device:
        """This rank's compute device."""
        ...

    @property
    def num_parameters(self) -> int:
        """See ``Engine.num_parameters``."""
        ...

    @property
    def ranks_per_sample(self) -> int:
        """See ``Engine.ranks_per_sample``."""
        ...

    def resize(self, num_ranks: int, **options: Any) -> Resized:
        """See ``Engine.resize``."""

    def join(self, **options: Any) -> Resized:
        """See ``Engine.join``."""

    def save_checkpoint(self, directory: str, /, *, client_state: Mapping[str, Any]) -> Any:
        """See ``Engine.save_checkpoint``."""

    def load_checkpoint(self, directory: str, /) -> tuple[Any, dict[str, Any]]:
        """See ``Engine.load_checkpoint``."""

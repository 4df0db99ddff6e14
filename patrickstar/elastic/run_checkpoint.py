"""The checkpoints of an :class:`patrickstar.elastic.ElasticRun`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.elastic.engine_protocol import ElasticEngine


class RunCheckpoint:
    """Saves and loads a run's last checkpoint, and knows when the next one is due.

    Args:
        engine: of the run.
        user_state: user state by name, saved as client state.
        folder: that all ranks can reach; None: nothing is saved.
        seconds: between checkpoints.
    """

    def __init__(
        self,
        engine: ElasticEngine,
        user_state: Mapping[str, Any],
        folder: str | os.PathLike[str] | None,
        seconds: float,
    ):
        self._engine, self._user_state = engine, user_state
        self._folder = None if folder is None else os.fspath(folder)
        self._seconds = seconds
        self._saved_at = time.monotonic()
        self.num_steps = 0
        """Steps of the last checkpoint; 0: there is none."""

    @property
    def is_due(self) -> bool:
        """True if the last checkpoint is older than the seconds between two."""
        return time.monotonic() - self._saved_at >= self._seconds

    def note(self, num_steps: int) -> None:
        """Records a checkpoint of that step."""
        self._saved_at, self.num_steps = time.monotonic(), num_steps

    def save(self, num_steps: int) -> None:
        """Saves this step, unless its checkpoint is there. Collective over all ranks."""
        self._saved_at = time.monotonic()
        if self._folder is None or self.num_steps == num_steps:
            return
        self.num_steps = num_steps
        states = {name: item.state_dict() for name, item in self._user_state.items()}
        self._engine.save_checkpoint(self._folder, client_state=states)

    def load(self) -> bool:
        """Loads the last checkpoint; False if there is none.

        Raises:
            ValueError: the checkpoint is of a script with other user state.
        """
        if self._folder is None or not Path(self._folder, "latest").is_file():
            return False
        _, states = self._engine.load_checkpoint(self._folder)
        missing = sorted(self._user_state.keys() - states.keys())
        if missing:
            raise ValueError(
                f"the checkpoint in {self._folder} has no state of {', '.join(missing)}; it is of another script: "
                "give another folder"
            )
        for name, item in self._user_state.items():
            item.load_state_dict(states[name])
        return True

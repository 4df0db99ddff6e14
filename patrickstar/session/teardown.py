"""Closing an engine part by part."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("patrickstar")


class Teardown:
    """Calls that undo the parts of an engine, the last first, each also when another one fails."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []

    def callback(self, undo: Callable[[], object]) -> None:
        """Adds a call to what :meth:`close` does, before those that were added earlier."""
        self._parts.append(undo)

    def close(self) -> None:
        """Does all of it. Raises the first failure; those after it, which may come of it, are logged."""
        first: BaseException | None = None
        while self._parts:
            try:
                self._parts.pop()()
            except BaseException as error:
                if first is not None:
                    logger.warning("closing the engine failed further: %s: %s", type(error).__name__, error)
                first = first or error
        if first is not None:
            raise first

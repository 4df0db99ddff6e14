"""Closing an engine part by part."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("patrickstar")


class Teardown:
    """A stack of callbacks that undo an engine's parts; all are called even if one fails."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to undo."""
        return not self._parts

    def callback(self, undo: Callable[[], object]) -> None:
        """Adds a callback, to be called before the earlier ones."""
        self._parts.append(undo)

    def close(self) -> None:
        """Calls all callbacks. Raises the first failure and logs later ones."""
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
